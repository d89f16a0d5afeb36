"""Equality of the engines `flower` and `local`, bit for bit; here on the loopback Grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedguild.runs import experiment
from tests.engines.equality import METHODS_TO_COMPARE, case_config, newest_memory, save_models, site_memory, traffic
from tests.federation.flower.loopback_federation import QUICK, grid_of, serve_on, small_config, trainers_of
from tests.runs.runs import Ended, assert_same, ended, save_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("label", METHODS_TO_COMPARE)
def test_flower_gives_the_results_of_local(label: str, models: dict[str, Path], tmp_path: Path) -> None:
    config = case_config(label, models)
    experiment.run(config, tmp_path / "local")
    trainers = trainers_of(config, tmp_path / "sites")
    serve_on(grid_of(trainers), config, tmp_path / "server")
    assert traffic(tmp_path / "server/state/run") == traffic(tmp_path / "local")
    remote = replace(ended(tmp_path / "server/state/run"), memory=site_memory(tmp_path / "sites"))
    assert_same(remote, newest_memory(ended(tmp_path / "local")))
    assert {trainer.loads for trainer in trainers} == {1}


@pytest.mark.long
def test_a_codec_rounds_alike_on_every_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedguild.core.codec.SMALLEST_SHRUNK", 1)
    model = save_model(tmp_path / "model")

    def run(codec: str) -> Ended:
        """Runs on `local` with a codec, and on `flower` too if it rounds; returns how both ended."""
        config = small_config(model, *QUICK, f"federation.wire_dtype={codec}", base="fedit/tiny-tasks")
        experiment.run(config, tmp_path / codec / "local")
        local = ended(tmp_path / codec / "local")
        if codec != "fp32":
            serve_on(grid_of(trainers_of(config, tmp_path / codec)), config, tmp_path / codec / "server")
            remote = ended(tmp_path / codec / "server/state/run")
            assert_same(replace(remote, memory={}), replace(local, memory={}))
        return local

    def uploaded_bytes(run: Ended) -> int:
        return sum(record["upload_bytes"] for record in run.records if record["kind"] == "client")

    exact = run("fp32")
    for rounded in (run("bf16"), run("int8")):
        assert any(not torch.equal(tensor, rounded.state.tensors[name]) for name, tensor in exact.state.tensors.items())
        assert uploaded_bytes(rounded) < 0.75 * uploaded_bytes(exact)
