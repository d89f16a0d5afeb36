"""DP-SGD on the slot axis against a loop over single examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fedguild.client.cohort import Cohort
from fedguild.client.private_training import clipped_sum, spread
from fedguild.client.training import train
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError, DataError
from fedguild.data.batches import collate
from fedguild.methods.pfl_moe.second_training import second_training
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.privacy.dp.dp_sgd import DpSgd
from fedguild.privacy.dp.noise import Noise
from tests.backbones import PAD
from tests.client.clients import Client, distance, flat, make_clients, make_cohort
from tests.oracles import dp_sgd as oracle

SETTINGS = TrainingSettings(optimizer="sgd", learning_rate=0.5, batch_size=3, steps=2, max_grad_norm=None)
DP = DpSgd(clip=0.3, noise_multiplier=0.2, probability=0.6, steps=2, divisor=4.5, noise=Noise(b"one"))


@pytest.fixture(scope="module")
def clients(exact: Backbone) -> list[Client]:
    """A client of 8 examples at rank 1, and one of 3 at rank 4, without dropout."""
    made = make_clients(exact, dropout=False)
    return [made[1], made[0]]


def privately(backbone: Backbone, clients: list[Client], private: list[DpSgd]) -> list[dict[str, torch.Tensor]]:
    """Trains clients in one cohort by DP-SGD; returns their weights."""
    with SlotModel(backbone, [client.plan for client in clients]) as model:
        cohort = make_cohort(model, clients, SETTINGS, private=private)
        train(cohort)
        return [cohort.read(slot) for slot in range(len(clients))]


def test_clipped_gradients_equal_those_of_a_loop_over_examples(exact: Backbone, clients: list[Client]) -> None:
    """Some are clipped and some are not; one slot has no example."""
    client = clients[0]
    rows = list(client.examples[:3])
    singles = [oracle.example_gradient(exact, client.plan, client.start, row) for row in rows]
    norms = [float(flat(gradient).norm()) for gradient in singles]
    clip = sorted(norms)[1]
    with SlotModel(exact, [client.plan] * 4) as model:
        for name, tensor in model.loaded.items():
            spread(tensor, client.start[name])
        losses = model.token_losses(collate([*([row] for row in rows), []], PAD))
        targets = [row.response_tokens for row in rows]
        torch.stack([part.mean() for part in losses.split(targets)]).sum().backward()
        found = clipped_sum(model.trainables, clip)
    expected = {name: sum(oracle.clipped(one, clip)[name] for one in singles) for name in singles[0]}
    assert found.keys() == expected.keys()
    assert min(norms) < clip < max(norms)
    for name, value in expected.items():
        assert distance(found[name], value) < 1e-9, name


def test_an_example_whose_gradient_is_not_finite_adds_nothing(exact: Backbone, clients: list[Client]) -> None:
    client = clients[0]
    with SlotModel(exact, [client.plan] * 2) as model:
        for tensor in model.trainables.values():
            tensor.stored.grad = torch.zeros_like(tensor.stored)
            tensor.own(0, of=tensor.stored.grad).fill_(1.0)
            tensor.own(1, of=tensor.stored.grad).fill_(torch.nan)
        found = clipped_sum(model.trainables, 1.0)
    assert float(flat(found).norm()) == pytest.approx(1.0)


def test_training_equals_the_loop_in_a_cohort_of_unequal_clients(exact: Backbone, clients: list[Client]) -> None:
    """More examples are drawn than fit a microbatch, and noise is on every tensor."""
    private = [DP, replace(DP, probability=1.0, divisor=3.0, noise=Noise(b"other"))]
    drawn = [dp.batch(0, len(client.examples)) for dp, client in zip(private, clients, strict=True)]
    assert len(drawn[0]) > SETTINGS.batch_size
    assert drawn[1] == [0, 1, 2]
    for client, dp, found in zip(clients, private, privately(exact, clients, private), strict=True):
        expected = oracle.dp_sgd(
            exact,
            client.plan,
            client.start,
            [[client.examples[i] for i in dp.batch(step, len(client.examples))] for step in range(dp.steps)],
            clip=dp.clip,
            deviation=dp.clip * dp.noise_multiplier,
            divisor=dp.divisor,
            rate=SETTINGS.learning_rate,
            noise=lambda step, name, shape, dp=dp: dp.noise.child("step", step).normal(shape, name),
        )
        for name, value in found.items():
            assert distance(value, expected[name]) < 1e-9, name
            assert not torch.equal(value, client.start[name]), name


@pytest.mark.parametrize("removed", [0, 4])
def test_one_drawn_example_less_changes_the_sum_by_no_more_than_the_clip(
    exact: Backbone, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    """With dropout of 0.3, and all gradients clipped; the others move to other places and microbatches."""
    client = make_clients(exact)[1]
    dp = replace(DP, clip=1e-3, noise_multiplier=1e-12, probability=1.0, steps=1)
    (whole,) = privately(exact, [client], [dp])
    everybody = [index for index in range(len(client.examples)) if index != removed]
    monkeypatch.setattr(DpSgd, "batch", lambda self, step, examples: everybody)
    (lacking,) = privately(exact, [client], [dp])
    changed = float(flat({name: whole[name] - lacking[name] for name in whole}).norm())
    sensitivity = SETTINGS.learning_rate * dp.clip / dp.divisor
    assert 0.5 * sensitivity < changed < (1 + 1e-6) * sensitivity


def test_a_step_without_examples_is_noise_alone(exact: Backbone, clients: list[Client]) -> None:
    dp = replace(DP, probability=0.0, steps=1)
    (found,) = privately(exact, clients[:1], [dp])
    for name, value in found.items():
        noise = dp.noise.child("step", 0).normal(value.shape, name) * dp.clip * dp.noise_multiplier
        assert torch.allclose(value, clients[0].start[name] - SETTINGS.learning_rate * noise / dp.divisor), name


def test_memory_depends_on_the_microbatch_and_not_on_the_batch(
    exact: Backbone, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    whole = SlotModel.token_losses

    def counting(self: SlotModel, batch, smoothing: float = 0.0):  # type: ignore[no-untyped-def]
        rows.append(sum(batch.rows_per_slot))
        assert self.slots == SETTINGS.batch_size
        assert max(batch.rows_per_slot) == 1
        return whole(self, batch, smoothing)

    monkeypatch.setattr(SlotModel, "token_losses", counting)
    privately(exact, clients[:1], [replace(DP, probability=1.0, steps=1)])
    assert rows == [3, 3, 2]


def test_a_penalty_on_the_weights_gets_no_noise(exact: Backbone, clients: list[Client]) -> None:
    """The mean over 4.5 examples of noise of deviation 0.06, next to a gradient of the weights themselves."""
    client = clients[0]
    quiet = replace(DP, probability=0.0, noise_multiplier=1e-12, steps=1)
    with SlotModel(exact, [client.plan]) as model:
        cohort = make_cohort(model, [client], SETTINGS, private=[quiet])
        train(cohort, lambda: sum(t.stored.square().sum()[None] / 2 for t in cohort.trainables.values()))
        found = cohort.read(0)
    for name, value in found.items():
        assert torch.allclose(value, client.start[name] * (1 - SETTINGS.learning_rate)), name


@pytest.fixture
def private_cohort(exact: Backbone, clients: list[Client]) -> Iterator[Cohort]:
    with SlotModel(exact, [clients[0].plan]) as model:
        yield make_cohort(model, clients[:1], SETTINGS, private=[replace(DP, steps=1)])


def test_no_other_look_at_the_examples_is_possible(private_cohort: Cohort) -> None:
    looks = [
        lambda: next(private_cohort.steps()),
        lambda: next(private_cohort.passes([private_cohort.work[0].examples])),
        lambda: private_cohort.hold_out(0, 0.5, 3),
        lambda: second_training(private_cohort, SETTINGS),
    ]
    for look in looks:
        with pytest.raises(ConfigError, match=r"privacy\.unit is example"):
            look()
    train(private_cohort)
    assert private_cohort.routing is None
    with pytest.raises(ConfigError, match="trains twice"):
        train(private_cohort)


def test_other_slots_of_the_same_plan_train_once(private_cohort: Cohort) -> None:
    """RoLoRA trains in slots of another plan."""
    start = private_cohort.read(0)
    with private_cohort.afresh(list(private_cohort.model.plans)) as again:
        again.load(0, start)
        train(again)
        assert any(not torch.equal(value, start[name]) for name, value in again.read(0).items())
    with pytest.raises(ConfigError, match="trains twice"):
        train(private_cohort)


def test_a_client_without_examples_is_refused(exact: Backbone, clients: list[Client]) -> None:
    with pytest.raises(DataError, match="without training examples"):
        privately(exact, [replace(clients[0], examples=())], [DP])
