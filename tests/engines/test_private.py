"""Uploads of a private client: a clipped change with noise, and no figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import LocalReport
from fedguild.client.privacy_rules import PrivacyRules
from fedguild.config.privacy import PrivacySettings
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload, Scalar
from fedguild.engines.client_report import ClientReport
from fedguild.engines.private import PrivateAnswers
from fedguild.methods import build_method
from fedguild.model.plan import AdapterPlan
from fedguild.privacy.dp.accounting import Release, epsilon
from fedguild.privacy.dp.clipping import clipped
from fedguild.privacy.dp.noise import Noise
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, FilteredEngine, Task, Wait
from tests.methods.llama import llama_1b

CLIENT = ClientInfo(2, Budget("all", 0, 2), 10)
RECEIVED = {"adapter/a": torch.tensor([1.0, 2.0]), "adapter/b": torch.tensor([[3.0]])}
TRAINED = {"adapter/a": torch.tensor([4.0, 2.0]), "adapter/b": torch.tensor([[7.0]])}
"""A change of norm 5."""
MERGED = {"merge_version": 1}
METHOD = build_method("fedex-lora", {"targets": ["attention"]})
"""Its uploads say which version of the backbone they were trained on."""


def rules(steps: int | None = 3, **settings: Any) -> PrivacyRules:
    training = TrainingSettings(batch_size=4, gradient_accumulation_steps=2, steps=steps)
    return PrivacyRules(PrivacySettings(**{"noise_multiplier": 1.0, **settings}), training, 5, 6, 3)


class Answering:
    """An engine whose client answers with an upload and a report full of figures."""

    def __init__(self, upload: dict[str, torch.Tensor] | None) -> None:
        self.upload = upload

    def train(self, method: Any, model: Any, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL) -> Iterator[Delivery]:
        report = LocalReport(steps=3, tokens=50, examples=24, loss=1.5, seconds=2.0)
        upload = None if self.upload is None else Payload(self.upload, {"merge_version": 1})
        for task in tasks:
            yield Delivery(
                task, upload, AdapterPlan(()), report, torch.ones(2, 4), 10**6, failure="" if upload else "ill"
            )

    def close(self) -> None:
        """Does nothing."""


def answer(
    own: PrivacyRules, upload: dict[str, torch.Tensor] | None = TRAINED, received: Mapping[str, Scalar] = MERGED
) -> Delivery:
    private = PrivateAnswers(own, lambda task: Noise(b"key").child(task.round), lambda client: 10)
    engine = FilteredEngine(Answering(upload), [private])
    (delivery,) = engine.train(METHOD, llama_1b(), [Task(4, CLIENT, Payload(RECEIVED, received))])
    return delivery


def test_a_clients_change_is_clipped_and_noised() -> None:
    delivery = answer(rules(unit="client", clip=2.5))
    assert delivery.upload is not None
    change = clipped({name[8:]: TRAINED[name].double() - RECEIVED[name].double() for name in TRAINED}, 2.5)
    assert change["a"].tolist() == [1.5, 0.0]
    for name, value in change.items():
        noise = 2.5 * Noise(b"key").child(4).normal(value.shape, name)
        expected = (RECEIVED[f"adapter/{name}"].double() + value + noise).float()
        assert torch.equal(delivery.upload.tensors[f"adapter/{name}"], expected)
    assert delivery.upload.scalars == {"merge_version": 1}


@pytest.mark.parametrize(
    "settings", [{"unit": "client", "trust_model": "central"}, {"unit": "example", "sample_rate": 0.1}]
)
def test_an_upload_that_is_noised_elsewhere_stays(settings: dict[str, Any]) -> None:
    delivery = answer(rules(**settings))
    assert delivery.upload is not None
    assert all(torch.equal(delivery.upload.tensors[name], value) for name, value in TRAINED.items())


@pytest.mark.parametrize(("steps", "public", "said"), [(3, (), 3), (None, (), 0), (None, ("sizes",), 2)])
def test_nothing_of_the_training_is_said(steps: int | None, public: tuple[str, ...], said: int) -> None:
    """Two steps are an epoch of 10 examples in batches of 4 x 2."""
    delivery = answer(rules(steps, unit="client", public=public))
    assert delivery.report == LocalReport(steps=said, withheld=True)
    assert delivery.frequency is None
    assert delivery.peak_memory_bytes is None
    report = ClientReport(delivery.report, None, None)
    assert ClientReport.from_json(report.to_json()).training.withheld


@pytest.mark.parametrize("settings", [{}, {"trust_model": "central"}, {"unit": "example", "sample_rate": 0.1}])
def test_an_upload_with_more_than_the_adapter_is_held_back(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the client received it."""
    monkeypatch.setitem(RECEIVED, "routing/x", torch.zeros(2))
    delivery = answer(rules(**{"unit": "client", **settings}), {**TRAINED, "routing/x": torch.ones(2)})
    assert delivery.upload is None
    assert "would release 'routing/x'" in delivery.failure


def test_scalars_that_do_not_follow_from_the_download_are_held_back() -> None:
    for received in ({}, {"merge_version": 2}):
        delivery = answer(rules(unit="client"), received=received)
        assert delivery.upload is None
        assert "has scalars that do not follow" in delivery.failure


def test_a_failure_stays_one() -> None:
    delivery = answer(rules(unit="client"), None)
    assert (delivery.upload, delivery.failure, delivery.report.withheld) == (None, "ill", True)


def test_what_a_round_releases() -> None:
    assert rules(unit="client").release(10) == Release(0.5, 1)
    assert rules(unit="client", trust_model="central").release(10, 4) == Release(1.0, 4)
    secret = rules(unit="client", trust_model="central", sampling="secret").release(10)
    assert secret == Release(0.5, 1, drawn=3, drawn_from=6)
    sized = rules(unit="example", public=("sizes",))
    assert sized.release(80, 5) == Release(1.0, 15, 0.1)
    assert sized.release(4) == Release(1.0, 3, 1.0)
    assert rules(unit="example", sample_rate=0.25).release(80) == Release(1.0, 3, 0.25)


@pytest.mark.parametrize(
    ("settings", "neighbour"),
    [
        ({"unit": "example", "public": ("sizes",)}, "contributes nothing, their number fixed and public"),
        ({"unit": "example", "sample_rate": 0.1}, "(added to those that it trains on, or removed from them)"),
        ({"unit": "client"}, "(replaced by any other)"),
        ({"unit": "client", "public": ("sizes",)}, "any other of the same size"),
        ({"unit": "client", "trust_model": "central"}, "there or all zeros"),
    ],
)
def test_the_neighbours_have_the_same_size_where_that_is_public(settings: dict[str, Any], neighbour: str) -> None:
    assert neighbour in rules(**settings).statement()[0]


def test_dp_sgd_divides_by_what_is_expected() -> None:
    noise = Noise(b"key")
    sized = rules(unit="example", public=("sizes",))
    assert sized.dp_sgd(80, noise).divisor == pytest.approx(8.0)
    assert sized.dp_sgd(4, noise).divisor == 4.0
    assert rules(unit="example", sample_rate=0.25).dp_sgd(80, noise).divisor == 8.0


def test_a_targets_noise_follows_the_size_only_where_that_is_public() -> None:
    withheld = rules(unit="client", noise_multiplier=None, target_epsilon=2.0)
    assert withheld.noise_multiplier(10) == withheld.noise_multiplier(80)
    assert 0 < epsilon([withheld.release(10, withheld.rounds)], withheld.settings.delta) <= 2.0
    assert withheld.said_examples(80) == 1
    sized = rules(unit="example", noise_multiplier=None, target_epsilon=2.0, public=("sizes",))
    assert sized.noise_multiplier(8) > sized.noise_multiplier(400)
    assert epsilon([sized.release(400, sized.rounds)], sized.settings.delta) <= 2.0


def test_rules_that_follow_from_a_hidden_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="number of examples, which is not public"):
        rules(unit="example").check()
    with pytest.raises(ConfigError, match=r"training\.epochs"):
        rules(None, unit="example", sample_rate=0.1).check()
    rules(unit="example", sample_rate=0.1).check()
