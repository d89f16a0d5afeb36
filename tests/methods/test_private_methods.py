"""Every method's word on differential privacy: those that say they can run privately do, the others say why not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.client.privacy_rules import PrivacyRules
from fedguild.config.privacy import PrivacySettings, Unit
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import ADAPTER, Payload
from fedguild.engines.local import LocalEngine
from fedguild.engines.private import PrivateAnswers
from fedguild.model.plan import adapter_shapes
from fedguild.privacy.dp.noise import Noise
from fedguild.server.engine import FilteredEngine, Task
from fedguild.server.guard import Finite, Held, not_finite
from fedguild.server.method import Method, Upload, is_client_mean, takes_means
from fedguild.server.private_mean import PrivateMean
from fedguild.server.robust import RobustMean
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, MIDDLE, SMALL
from tests.methods.test_matrix import CASES, cases, fresh, method_of
from tests.oracles import robust as oracle
from tests.server.filtering import through

TRAINING = TrainingSettings(
    optimizer="sgd",
    learning_rate=0.5,
    batch_size=2,
    gradient_accumulation_steps=2,
    steps=1,
    max_grad_norm=None,
)
UNITS: tuple[Unit, ...] = ("client", "example")


def able(unit: Unit, *, plain: bool = False) -> list[str]:
    """Returns the cases that say they can run with a unit; of each method the first if only the plain ones count."""
    able_to = [label for label in cases() if not method_of(label).privacy_refusal(unit)]
    firsts = {label.partition(" ")[0]: label for label in reversed(able_to)}
    return sorted(firsts.values()) if plain else able_to


info_of = cache(lambda family: tiny_backbone(family).info)


def is_mean(label: str) -> bool:
    return is_client_mean(method_of(label), info_of(CASES[label].family), (LARGE, MIDDLE, SMALL))


MEANS = sorted({label.partition(" ")[0] for label in able("client") if is_mean(label)})


def rules(unit: Unit, **settings: Any) -> PrivacyRules:
    public = ("sizes",) if unit == "example" else ()
    given = {"unit": unit, "noise_multiplier": 0.5, "clip": 0.1, "public": public, **settings}
    return PrivacyRules(PrivacySettings(**given), TRAINING, 2, 4, 4)


@pytest.mark.parametrize(
    ("unit", "label"), [(unit, label) for unit in UNITS for label in able(unit) if " " not in label]
)
def test_a_method_that_says_it_can_trains_privately(unit: Unit, label: str, tmp_path: Path) -> None:
    """Two rounds: uploads are in the expected form, and noise is on all of them."""
    federation, own = fresh(label, tmp_path), rules(unit)
    method, model, sizes = federation.method, federation.model, {who.index: who.examples for who in federation.clients}

    def private(client: Any, number: int) -> Any:
        return own.dp_sgd(sizes[client.index], Noise(b"key").child(client.index, number))

    local = LocalEngine(
        federation.backbone,
        federation.examples,
        TRAINING,
        federation.memory,
        seed=1,
        private=private if unit == "example" else None,
    )
    private_answers = PrivateAnswers(
        own, lambda task: Noise(b"key").child(task.round, task.client.index), sizes.__getitem__
    )
    engine = FilteredEngine(local, [private_answers])
    state = federation.start()
    for number in (1, 2):
        downloads = {who.index: method.download(state, model, who) for who in federation.clients}
        tasks = [Task(number, who, downloads[who.index]) for who in federation.clients]
        deliveries = list(engine.train(method, model, tasks))
        assert not [delivery.failure for delivery in deliveries if delivery.failure]
        uploads = []
        for delivery in deliveries:
            assert delivery.upload is not None
            expected = method.schema(model, delivery.task.client, delivery.task.download).shapes
            assert {name: tuple(value.shape) for name, value in delivery.upload.tensors.items()} == expected
            for name, value in delivery.upload.tensors.items():
                before = delivery.task.download.tensors.get(name, torch.zeros(()))
                moved = value if before.shape != value.shape else value - before
                assert bool(moved.ne(0).any()), name
                if name.endswith("lora_B") and unit == "client":
                    assert bool(moved.ne(0).all()), name  # experts without a token, too
            uploads.append(Upload(number, delivery.task.client, delivery.upload, delivery.task.download))
        if not CASES[label].is_product:
            state = method.aggregate(state, iter(uploads))
            broken = not_finite(state)
            assert not broken, f"'{broken}' is not finite; if noise may do that, set is_product in the case of {label}."


def with_equal_shapes(name: str) -> str | None:
    """Returns a case of a method whose aggregate is a mean of one adapter for all budgets; None if there is none."""
    for label in cases():
        if label.partition(" ")[0] == name and is_mean(label):
            model, method = info_of(CASES[label].family), method_of(label)
            shapes = [adapter_shapes(model, method.plan(model, budget)) for budget in (LARGE, MIDDLE, SMALL)]
            if all(one == shapes[0] for one in shapes):
                return label
    return None


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_can_be_noised_by_the_server(name: str, tmp_path: Path) -> None:
    label = with_equal_shapes(name)
    if label is None:
        assert "rank" not in method_of(name).Settings.model_fields, f"give {name} a case with one rank for all budgets"
        return
    federation = fresh(label, tmp_path)
    method = federation.method
    state = federation.start()
    uploads = federation.train(state)
    after, rejected = through([PrivateMean(0.1, 1.0, Noise(b"key"))], method, state, uploads, wanted=len(uploads))
    assert not rejected
    for key in {key for upload in uploads for key in upload.payload.part(ADAPTER)}:
        moved = after.part(ADAPTER)[key].ne(state.part(ADAPTER)[key])
        assert bool(moved.all()), key


@pytest.mark.parametrize("label", [label for label in cases() if " " not in label and takes_means(method_of(label))])
def test_a_robust_estimate_can_take_the_means_place(label: str, tmp_path: Path) -> None:
    """With one upload far away, too: every mean is the median over the clients that hold the value."""
    federation = fresh(label, tmp_path)
    method = federation.method
    state = federation.start()
    uploads = federation.train(state)
    last = uploads[-1]
    far = {key: value + 1e3 if key.startswith(f"{ADAPTER}/") else value for key, value in last.payload.tensors.items()}
    uploads = [*uploads[:-1], replace(last, payload=Payload(far, last.payload.scalars))]
    after, rejected = through([Held(tmp_path / "spool"), Finite(), RobustMean("median")], method, state, uploads)
    assert not rejected
    plain, expected = method.aggregate(state, uploads), method.update(state, oracle.Medians(uploads, method))
    assert after.scalars == expected.scalars
    for name, value in after.tensors.items():
        torch.testing.assert_close(value, expected.tensors[name], atol=1e-5, rtol=1e-5)
    assert any(not torch.equal(value, plain.tensors[name]) for name, value in after.tensors.items())


def test_a_refusal_is_declared_once() -> None:
    """A clause for both units, or one for each; what a method says itself counts, and silence is a refusal."""
    plain, by_unit, own = (method_of(name) for name in ("flame", "fdlora", "fed-sb"))
    assert plain.privacy_refusal("client") == plain.privacy_refusal("example") == plain.facts.not_private
    assert [by_unit.privacy_refusal(unit) for unit in UNITS] == ["", by_unit.facts.not_private.example]
    assert [own.privacy_refusal(unit) for unit in UNITS] == [own.privacy_refusal("client")] * 2 != ["", ""]
    assert method_of("fed-sb from random factors").privacy_refusal("client") == ""
    assert len(able("example")) > 5
    assert "does not say" in Method.facts.not_private
