"""Differential privacy under secure aggregation: the noise is in an upload before it is masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.config import load_config
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.engines.private import PrivateAnswers
from fedguild.engines.secure import SecureClients
from fedguild.measuring.log.records import ClientRecord, PrivacyRecord, RoutingRecord, RunLog
from fedguild.runs import experiment
from fedguild.runs.setup import check_config
from tests.federation.flower.loopback_federation import grid_of, serve_on
from tests.privacy.secure_sum.test_runs import SECURE, sites
from tests.runs.runs import ended, small_config

METHOD = ("method.targets=[q_proj]", "method.rank_by_budget=false", "federation.clients=3", *SECURE[1:])
GUILD = ("method.targets=[q_proj]", "federation.clients=3", *SECURE[1:])
LOCAL = ("privacy.unit=client", "privacy.clip=0.1", "privacy.noise_multiplier=2")
EXAMPLE = ("privacy.unit=example", "privacy.noise_multiplier=1", "privacy.sample_rate=0.1")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Payload]]:
    """What private clients release, and what is kept for masking, in order."""
    seen: dict[str, list[Payload]] = {"released": [], "kept": []}
    release, keep = PrivateAnswers._released, SecureClients.keep

    def releasing(self: PrivateAnswers, *given: Any) -> Payload:
        seen["released"].append(release(self, *given))
        return seen["released"][-1]

    def keeping(self: SecureClients, method: Any, model: Any, task: Any, upload: Payload, *rest: Any) -> None:
        seen["kept"].append(upload)
        keep(self, method, model, task, upload, *rest)

    monkeypatch.setattr(PrivateAnswers, "_released", releasing)
    monkeypatch.setattr(SecureClients, "keep", keeping)
    return seen


def assert_masked_after_the_noise(seen: dict[str, list[Payload]]) -> None:
    assert len(seen["kept"]) == 3
    assert all(kept is released for kept, released in zip(seen["kept"], seen["released"], strict=True))


@pytest.mark.parametrize("privacy", [LOCAL, EXAMPLE])
@pytest.mark.parametrize(
    ("base", "method"), [("fedit/tiny-tasks", METHOD), ("guild/tiny-tasks", GUILD), ("rolora/tiny-tasks", GUILD)]
)
def test_a_simulation_masks_what_is_noised_and_ends_as_without(base, method, privacy, olmoe_folder, tmp_path, seen):
    config = small_config(olmoe_folder, *method, *privacy, base=base)
    experiment.run(config, tmp_path / "secure")
    assert_masked_after_the_noise(seen)
    plain = small_config(olmoe_folder, *method, *privacy, "federation.secure=false", base=base)
    experiment.run(plain, tmp_path / "plain")
    expected = ended(tmp_path / "plain").state
    for name, value in ended(tmp_path / "secure").state.tensors.items():
        torch.testing.assert_close(value, expected.tensors[name], rtol=1e-6, atol=1e-6)
    records = RunLog(tmp_path / "secure").read()
    figures = [record for record in records if isinstance(record, ClientRecord)]
    assert {(record.examples, record.steps, record.tokens, record.train_loss) for record in figures} == {
        (None, 2, None, None)
    }
    assert not any(isinstance(record, RoutingRecord) for record in records)
    spent = [
        [one for one in RunLog(tmp_path / name).read() if isinstance(one, PrivacyRecord)]
        for name in ("secure", "plain")
    ]
    assert spent[0][0].epsilon == spent[1][0].epsilon


def test_sites_mask_what_is_noised(olmoe_folder: Path, tmp_path: Path, seen: dict[str, list[Payload]]) -> None:
    config = small_config(olmoe_folder, *METHOD, *LOCAL, base="fedit/tiny-tasks")
    trainers = sites(config, tmp_path / "sites", {1: {"accept": {"secure": True}}})
    serve_on(grid_of(trainers), config, tmp_path / "server")
    assert_masked_after_the_noise(seen)


def test_central_noise_is_refused() -> None:
    overrides = ["privacy.unit=client", "privacy.trust_model=central", "privacy.noise_multiplier=1"]
    with pytest.raises(ConfigError, match=r"with federation\.secure the server has no single upload to clip"):
        check_config(load_config("fedit/tiny-tasks", [*overrides, "federation.secure=true"]))
