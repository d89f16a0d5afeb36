"""The proof of the slot axis: a client in a cohort gets the update that it would get alone."""

from __future__ import annotations

import pytest
import torch

from fedguild.client.cohort import tokens_of
from fedguild.client.schedule import learning_rate, plan_steps
from fedguild.client.sums import _padded_sums
from fedguild.core.seeding import numpy_rng
from fedguild.model.slots import SlotModel
from tests.backbones import tiny_model
from tests.client.clients import (
    ROUND,
    SEED,
    SETTINGS,
    STEPS,
    distance,
    first_gradients,
    flat,
    make_clients,
    make_cohort,
    train,
)
from tests.oracles.lora import MergedModel
from tests.oracles.optimizer import ClientOptimizer


@pytest.fixture(scope="module")
def together(exact):
    """All eight clients trained in one cohort, in fp64."""
    return train(exact, make_clients(exact))


@pytest.fixture(scope="module")
def alone(exact):
    """Each of them trained alone."""
    return [train(exact, [client])[0] for client in make_clients(exact)]


def test_gradients_in_a_cohort_of_eight_equal_those_alone(olmoe_backbone):
    """fp32, relative 1e-5 of a client's gradient; dropout, accumulation, padding, other clients' rows.

    A single tensor may be off by a few times more of its own size, where its sum over tokens cancels.
    """
    clients = make_clients(olmoe_backbone)
    for client, found in zip(clients, first_gradients(olmoe_backbone, clients, SETTINGS), strict=True):
        (alone,) = first_gradients(olmoe_backbone, [client], SETTINGS)
        assert distance(flat(found), flat(alone)) < 1e-5, client.info.name
        for name, grad in alone.items():
            assert distance(found[name], grad) < 1e-4, (client.info.name, name)
            assert grad.any(), (client.info.name, name)


def test_state_after_ten_steps_equals_the_state_alone(exact, together, alone):
    """fp64, relative 1e-8, weights and moments, for clients of 2 to 10 steps."""
    assert tuple(trained.report.steps for trained in together) == STEPS
    for client, found, expected in zip(make_clients(exact), together, alone, strict=True):
        for name, value in expected.weights.items():
            assert distance(found.weights[name], value) < 1e-8, (client.info.name, name)
            assert not torch.equal(value, client.start[name])
        for name, value in expected.moments.items():
            assert distance(found.moments[name], value) < 1e-8, (client.info.name, name)


def test_reports_and_routing_equal_those_alone(exact, together, alone):
    for client, found, expected in zip(make_clients(exact), together, alone, strict=True):
        for field in ("steps", "tokens", "examples"):
            assert getattr(found.report, field) == getattr(expected.report, field)
        assert found.report.loss == pytest.approx(expected.report.loss, rel=1e-8)
        assert torch.equal(found.counts, expected.counts)
        assert torch.equal(found.hits, expected.hits)
        assert found.report.examples == 2 * client.info.examples
        assert found.report.tokens == 2 * sum(len(row.input_ids) for row in client.examples)
        active = client.plan.active_experts or 4
        assert found.counts.sum(dim=1).tolist() == [found.report.tokens * active] * 2
        assert int(found.hits.max()) <= found.report.steps


@pytest.mark.parametrize("number", [1, 3])
def test_training_equals_a_plain_loop_over_merged_weights(exact, number):
    """transformers' own model with W + s·BA, torch's own optimizer and clipping, row by row."""
    client = make_clients(exact, dropout=False)[number]
    settings = SETTINGS
    (found,) = train(exact, [client])

    plain = tiny_model("olmoe", dtype=torch.float64)
    leaves = {name: value.clone().requires_grad_() for name, value in client.start.items()}
    optimizer = ClientOptimizer(leaves, settings)
    plan = plan_steps(len(client.examples), settings, numpy_rng(SEED, "batches", ROUND, client.info.index))
    loss_sum = target_count = 0.0
    for index, step in enumerate(plan):
        model = MergedModel(plain, exact.info, client.plan, leaves)
        rows = [client.examples[i] for batch in step for i in batch]
        losses = torch.cat([model.losses(row.input_ids, row.prompt_length) for row in rows])
        grads = torch.autograd.grad(losses.mean(), list(leaves.values()))
        rate = learning_rate(settings, index, len(plan), ROUND)
        optimizer.step(dict(zip(leaves, grads, strict=True)), rate, settings.max_grad_norm)
        loss_sum, target_count = loss_sum + losses.sum().item(), target_count + len(losses)
        if index == 0:
            assert found.report.first_loss == pytest.approx(loss_sum / target_count, rel=1e-6)
    assert found.report.loss == pytest.approx(loss_sum / target_count, rel=1e-6)
    for name, value in found.weights.items():
        assert distance(value - client.start[name], leaves[name].detach() - client.start[name]) < 1e-4, name


def test_losses_of_accumulated_passes_add_up_to_the_mean(olmoe_backbone):
    """At rate 0 each client's parts of a step sum to the mean over all its response tokens."""
    clients = make_clients(olmoe_backbone, dropout=False)[:3]
    settings = SETTINGS.model_copy(
        update={"learning_rate": 0.0, "epochs": 1, "batch_size": 2, "gradient_accumulation_steps": 10}
    )
    with SlotModel(olmoe_backbone, [client.plan for client in clients]) as model, torch.no_grad():
        cohort = make_cohort(model, clients, settings)
        parts = []
        for step in cohort.steps():
            assert step.index == 0
            assert step.is_update == (len(parts) == 9)
            parts.append(step.forward())
    assert len(parts) == 10
    assert not torch.stack(parts[2:])[:, 0].any()
    assert torch.stack(parts).sum(dim=0).tolist() == pytest.approx([report.loss for report in cohort.reports], rel=1e-5)


def test_progress_and_time_are_shared_out(olmoe_backbone):
    clients = make_clients(olmoe_backbone)[:3]
    calls = []
    with SlotModel(olmoe_backbone, [client.plan for client in clients]) as model:
        cohort = make_cohort(model, clients, SETTINGS, on_step=lambda *call: calls.append(call))
        for step in cohort.steps():
            step.backward(step.forward())
            step.apply()
        assert [call[:2] for call in calls] == [(done, 10) for done in range(1, 11)]
        assert calls[-1][2] == cohort.mean_loss()
        trained = [report.tokens for report in cohort.reports]
        for _ in cohort.passes([cohort.work[0].examples, [], cohort.work[2].examples[:1]]):
            pass
    read = [tokens_of(cohort.work[0].examples), 0, tokens_of(cohort.work[2].examples[:1])]
    assert [report.forward_tokens for report in cohort.reports] == read
    assert [report.tokens for report in cohort.reports] == trained
    cohort.share_time(6.0)
    whole = sum(trained) + sum(read)
    assert [report.seconds for report in cohort.reports] == pytest.approx(
        [6.0 * (own + more) / whole for own, more in zip(trained, read, strict=True)]
    )
    assert cohort.routing.steps.tolist() == list(STEPS[:3])


@pytest.mark.parametrize("counts", [(3, 0, 5), (2, 2), (0, 0), (4,)], ids=str)
def test_losses_are_summed_by_slot_in_as_many_operations_for_any_number_of_slots(counts):
    """What a GPU does, against the sums one by one, gradients too."""
    losses = torch.randn(sum(counts), dtype=torch.float64, requires_grad=True)
    weights = torch.arange(1.0, 1 + len(counts), dtype=torch.float64)
    found = _padded_sums(losses, counts)
    expected = torch.stack([part.sum() for part in losses.split(list(counts))])
    assert torch.allclose(found, expected, rtol=1e-14)
    gradients = [torch.autograd.grad((sums * weights).sum(), losses)[0] for sums in (found, expected)]
    assert torch.equal(*gradients)
