"""DPO on the slot axis: against TRL, against a plain loop, with privacy, and for every method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedguild.client.observing import observing
from fedguild.client.preference import margins, preference_losses, reference_losses, sums_of_rows
from fedguild.client.schedule import learning_rate, plan_steps
from fedguild.client.training import train
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError
from fedguild.core.packing import unpack
from fedguild.core.seeding import numpy_rng, torch_rng
from fedguild.data.batches import Encoded, collate
from fedguild.engines.ray_actor import pack_examples, unpack_rows
from fedguild.measuring.scores.preferences import ACCURACY, MARGIN, pair_losses, preference_scores
from fedguild.methods import METHODS
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.privacy.dp.dp_sgd import DpSgd
from fedguild.privacy.dp.noise import Noise
from fedguild.server.method import Upload
from tests.backbones import PAD, random_rows, tiny_model
from tests.client.clients import ROUND, SEED, SETTINGS, Client, distance, make_clients, make_cohort
from tests.methods.test_matrix import CASES, TEN_STEPS, fresh, method_of
from tests.oracles import dpo as oracle
from tests.oracles.dp_sgd import clipped
from tests.oracles.lora import MergedModel
from tests.oracles.optimizer import ClientOptimizer

# Prompt, chosen and rejected answer.
PAIRS = (([1, 4, 5], [6, 2], [7, 8, 9, 2]), ([3], [5, 5, 2], [4, 2]), ([1, 2, 3, 4], [10, 9, 2], [8, 2]))
# What trl 1.16.0 makes of them: `DataCollatorForPreference`, then `DPOTrainer._compute_loss` (loss_type sigmoid) with
# `log_softmax` of `trl_logits` as the log-likelihoods of model and reference. beta -> loss, rewards/margins.
TRL = {0.1: (0.661390991782764, 0.0725088535125063), 0.5: (0.6174139327528058, 0.3625442675625316)}
TRL_ACCURACY = 2 / 3
TRL_LOGPS = (-11.057747663000079, -9.505138425761695)
STARTS_ELSEWHERE = {"fedprompt", "fedptuning", "flex"}
"""Methods whose first adapter changes the model."""
REFUSED = {"fdlora", "fedalign-moe", "fedamole", "fedmoe", "hfedmoe", "pfl-moe", "smoe-llb", "ub-smoe"}
TWO_STEPS = TEN_STEPS.model_copy(update={"steps": 2})


def pair(prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int]) -> Encoded:
    other = Encoded((*prompt, *rejected), len(prompt))
    return Encoded((*prompt, *chosen), len(prompt), rejected=other)


def trl_logits(shift: float) -> Tensor:
    """[6, 7, 11]: first the chosen rows, then the rejected ones, padded to the longest."""
    return 3 * torch.sin(torch.arange(6 * 7 * 11, dtype=torch.float64) * 0.37 + shift).view(6, 7, 11)


def test_losses_and_scores_are_those_of_trl_on_the_same_logits() -> None:
    pairs = [pair(*one) for one in PAIRS]
    batch = collate([pairs], PAD)
    assert batch.rows_per_slot == (6,)

    def losses(shift: float) -> Tensor:
        ours = trl_logits(shift)[[0, 3, 1, 4, 2, 5]].reshape(-1, 11)  # a pair's rows side by side
        return cross_entropy(ours[batch.predict_at], batch.targets, reduction="none")

    own, reference = losses(0.0), sums_of_rows(losses(1.0), pairs)
    assert (-sums_of_rows(own, pairs).mean(0)).tolist() == pytest.approx(TRL_LOGPS, rel=1e-12)
    for beta, (loss, margin) in TRL.items():
        assert float(preference_losses(own, pairs, reference, beta).mean()) == pytest.approx(loss, rel=1e-12)
        assert float(margins(sums_of_rows(own, pairs), reference, beta).mean()) == pytest.approx(margin, rel=1e-6)
        scores = [
            preference_scores(mine, theirs, beta)
            for mine, theirs in zip(sums_of_rows(own, pairs).tolist(), reference.tolist(), strict=True)
        ]
        assert sum(one[ACCURACY] for one in scores) / 3 == pytest.approx(TRL_ACCURACY)
        assert sum(one[MARGIN] for one in scores) / 3 == pytest.approx(margin, rel=1e-6)


def with_pairs(client: Client, seed: int) -> Client:
    """The client with a rejected answer to each of its prompts, one with a turn in between that is not learned."""
    examples = []
    for number, (row, other) in enumerate(
        zip(client.examples, random_rows([5] * len(client.examples), seed), strict=True)
    ):
        ids = (*row.input_ids[: row.prompt_length], *other[: 2 + number % 4])
        skipped = ((row.prompt_length + 1, row.prompt_length + 2),) if number == 0 else ()
        examples.append(replace(row, rejected=Encoded((*ids, 7, 8), row.prompt_length, skipped)))
    return replace(client, examples=tuple(examples))


@pytest.fixture(scope="module")
def clients(exact: Backbone) -> list[Client]:
    """Clients of 5, 3 and 1 pairs, of other ranks and active experts, without dropout."""
    made = make_clients(exact, dropout=False)
    return [with_pairs(made[index], index) for index in (3, 0, 4)]


def test_a_cohort_trains_as_a_plain_loop_over_pairs(exact: Backbone, clients: list[Client]) -> None:
    """transformers' own model with W + s·BA against the one without it: accumulation, two epochs, padding."""
    settings = SETTINGS.model_copy(update={"dpo_beta": 0.7})
    with SlotModel(exact, [client.plan for client in clients]) as model:
        cohort = make_cohort(model, clients, settings)
        train(cohort)
        found = [cohort.read(slot) for slot in range(len(clients))]
        assert cohort.routing is not None
        counted = cohort.routing.counts.sum(dim=(0, 2))
    plain = tiny_model("olmoe", dtype=torch.float64)
    for slot, client in enumerate(clients):
        report = cohort.reports[slot]
        tokens = sum(len(row.input_ids) for one in client.examples for row in one.rows)
        assert (report.examples, report.tokens) == (2 * client.info.examples, 2 * tokens)
        assert report.reference_tokens == tokens  # once for each pair, whatever the epochs
        assert int(counted[slot]) == 2 * tokens * (client.plan.active_experts or 4) * 2  # the reference is not counted
        leaves = {name: value.clone().requires_grad_() for name, value in client.start.items()}
        optimizer = ClientOptimizer(leaves, settings)
        plan = plan_steps(len(client.examples), settings, numpy_rng(SEED, "batches", ROUND, client.info.index))
        reference = MergedModel(plain, exact.info, AdapterPlan((), client.plan.active_experts), {})
        for index, step in enumerate(plan):
            model_of_now = MergedModel(plain, exact.info, client.plan, leaves)
            pairs = [client.examples[i] for batch in step for i in batch]
            loss = oracle.loss(model_of_now, reference, pairs, 0.7)
            if index == 0:
                assert report.first_loss == pytest.approx(loss.item(), rel=1e-6)
            grads = torch.autograd.grad(loss, list(leaves.values()))
            rate = learning_rate(settings, index, len(plan), ROUND)
            optimizer.step(dict(zip(leaves, grads, strict=True)), rate, settings.max_grad_norm)
        for name, value in found[slot].items():
            assert distance(value - client.start[name], leaves[name].detach() - client.start[name]) < 1e-4, name


def test_a_pair_is_one_example_of_dp_sgd(exact: Backbone, clients: list[Client]) -> None:
    """One step of sgd at rate 1 without noise: the mean of the pairs' clipped gradients."""
    client = clients[1]
    settings = TrainingSettings(optimizer="sgd", learning_rate=1.0, batch_size=2, steps=1, max_grad_norm=None)
    clip = 0.05
    dp = DpSgd(clip, 0.0, 1.0, 1, float(len(client.examples)), Noise(b"one"))
    with SlotModel(exact, [client.plan]) as model:
        cohort = make_cohort(model, [client], settings, private=[dp])
        train(cohort)
        found = cohort.read(0)
    total = {name: torch.zeros_like(value).double() for name, value in client.start.items()}
    norms = []
    for one in client.examples:
        with SlotModel(exact, [client.plan]) as model:
            model.load(0, client.start)
            (reference,) = reference_losses(model, [[one]], 1, PAD)
            losses = model.token_losses(collate([[one]], PAD))
            preference_losses(losses, [one], reference, settings.dpo_beta).sum().backward()
            gradient = {n: t.own(0, of=t.stored.grad).clone().double() for n, t in model.trainables.items()}
        norms.append(float(torch.cat([value.flatten() for value in gradient.values()]).norm()))
        for name, value in clipped(gradient, clip).items():
            total[name] += value
    assert max(norms) > clip
    for name, value in found.items():
        assert distance(client.start[name] - value, total[name] / len(client.examples)) < 1e-8, name


@pytest.mark.parametrize("label", [label for label in CASES if label in METHODS])
def test_a_method_trains_on_pairs_or_says_why_not(label: str, tmp_path: Path) -> None:
    """The reference is the backbone, whatever a method attaches and merges: an adapter of zeros has a loss of ln 2."""
    if method_of(label).facts.not_preferences:
        assert label in REFUSED
        return
    federation = fresh(label, tmp_path)
    for index, rows in federation.examples.items():
        others = [Encoded((*row.input_ids[:2], *row.input_ids[:1:-1]), 2) for row in rows]
        federation.examples[index] = [replace(row, rejected=other) for row, other in zip(rows, others, strict=True)]
    state = federation.start()
    for number in (1, 2):
        deliveries = federation.deliver(state, number, settings=TWO_STEPS)
        assert not [one.failure for one in deliveries if one.failure]
        for one in deliveries:
            assert 0 < one.report.reference_tokens <= one.report.tokens
            assert math.isfinite(one.report.loss)
        losses = [one.report.first_loss for one in deliveries]
        if number == 1 and label not in STARTS_ELSEWHERE:
            assert losses == pytest.approx([math.log(2)] * len(losses), abs=1e-4)
        sent = [(one.task, one.upload) for one in deliveries if one.upload is not None]
        uploads = [Upload(number, task.client, upload, task.download) for task, upload in sent]
        state = federation.method.aggregate(state, uploads)


def test_observers_see_the_passes_of_the_training_and_not_those_of_the_reference(exact, clients) -> None:
    client, found = clients[1], []
    for observes in (False, True):
        with SlotModel(exact, [client.plan]) as model:
            cohort = make_cohort(model, [client], SETTINGS)
            seen: list[int] = []
            with (
                observing(exact.moe, lambda routing, seen=seen: seen.append(routing.layer))
                if observes
                else nullcontext()
            ):
                for step in cohort.steps(pairs=True):
                    loss = step.forward()
                    assert seen == [layer.index for layer in exact.moe if observes]
                    seen.clear()
                    step.backward(loss)
                    step.apply()
            found.append(cohort.read(0))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_loop_of_its_own_refuses_pairs(exact: Backbone, clients: list[Client]) -> None:
    with SlotModel(exact, [clients[1].plan]) as model:
        cohort = make_cohort(model, [clients[1]], SETTINGS)
        with pytest.raises(ConfigError, match="training loop of its own"):
            next(iter(cohort.steps()))


def test_the_reference_is_the_backbone_without_what_was_merged(exact: Backbone, clients: list[Client]) -> None:
    pairs = [client.examples for client in clients]
    linear = exact.info.linears[0]
    rng = torch_rng(0, "merged")
    merges = {
        f"1/{linear.name}.lora_A": torch.randn(2, linear.inputs, generator=rng),
        f"1/{linear.name}.lora_B": torch.randn(linear.outputs, 2, generator=rng),
    }
    with SlotModel(exact, [AdapterPlan((), client.plan.active_experts) for client in clients]) as model:
        batch = collate(pairs, PAD)
        expected = sums_of_rows(model.token_losses(batch), [one for own in pairs for one in own])
    before = exact.fingerprint()
    with exact.merged(merges):
        changed = exact.fingerprint()
        with SlotModel(exact, [client.plan for client in clients]) as model:
            for slot, client in enumerate(clients):
                model.load(slot, client.start)
            own = model.token_losses(batch)
            found = torch.cat(reference_losses(model, pairs, 2, PAD))
            assert torch.equal(model.token_losses(batch), own)
        assert exact.fingerprint() == changed
    assert exact.fingerprint() == before
    assert found.flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-9)
    with SlotModel(exact, [AdapterPlan((), client.plan.active_experts) for client in clients]) as model:
        scored = pair_losses(model, pairs, 64, PAD)
    flat = [loss for own_pairs in scored for both in own_pairs for loss in both]
    assert flat == pytest.approx(expected.flatten().tolist(), rel=1e-9)


def test_pairs_travel_to_other_processes(clients: list[Client]) -> None:
    packed, _ = unpack(pack_examples({3: clients[0].examples}))
    assert unpack_rows(packed, 3) == list(clients[0].examples)
