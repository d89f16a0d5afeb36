from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config.training import TrainingSettings
from fedguild.measuring.costs.flops import cost
from fedguild.measuring.costs.memory import StepForm, memory
from fedguild.measuring.costs.profile import Profile, profile
from fedguild.measuring.costs.rows import as_rows
from fedguild.measuring.costs.tiers import Workload
from fedguild.methods import METHODS, build_method
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import Method
from tests.backbones import tiny_backbone

LARGE, SMALL = Budget("large", 4, 3), Budget("small", 1, 1)
CLIENTS = [ClientInfo(0, LARGE, 10), ClientInfo(1, SMALL, 10), ClientInfo(2, SMALL, 10)]
TRAINING = TrainingSettings(batch_size=2, gradient_accumulation_steps=2, epochs=2)
WORK = Workload(examples=10, tokens=16, context_tokens=8, training=TRAINING)


def profiled(name: str = "flame", work: Workload = WORK, participants: int = 3, **options: object) -> Profile:
    return profile(build_method(name, options), tiny_backbone().info, CLIENTS, work, participants=participants)


def test_a_round_is_its_steps_and_a_step_its_passes() -> None:
    """Ten examples by twos are 5 passes, by pairs 3 steps, twice over: 6 steps, the last of an epoch of one pass."""
    large, small = profiled(rank=2).tiers
    assert (large.steps, large.clients, small.clients) == (6, 1, 2)
    counted = cost(tiny_backbone().info, large.plan)
    assert large.flops_forward == counted.forward_flops(16, 8)
    assert large.flops_training_step == 2 * counted.training_flops(16, 8)
    assert large.flops_round == 5 * large.flops_training_step
    assert large.flops_round_forward == 10 * large.flops_forward
    assert small.flops_round < large.flops_round


def test_steps_short_of_an_epoch_are_of_full_batches() -> None:
    tier = profiled(
        rank=2, work=replace(WORK, training=TRAINING.model_copy(update={"epochs": None, "steps": 2}))
    ).tiers[0]
    assert tier.flops_round == 2 * tier.flops_training_step


def test_a_partial_batch_counts_the_examples_that_it_has() -> None:
    """Three examples by twos are a full and a half pass, twice over."""
    tier = profiled(rank=2, work=replace(WORK, examples=3)).tiers[0]
    assert (tier.steps, tier.flops_round_forward) == (2, 3 * tier.flops_forward)


def test_dpo_adds_a_forward_pass_of_the_backbone() -> None:
    dpo = Workload(10, 16, 8, TRAINING.model_copy(update={"objective": "dpo"}))
    sft, pairs = profiled(rank=2).tiers[0], profiled(rank=2, work=dpo).tiers[0]
    reference = cost(tiny_backbone().info, AdapterPlan((), 4)).forward_flops(16, 8)
    assert pairs.flops_training_step - sft.flops_training_step == 2 * reference
    once = 5 * reference  # of each pair, in two epochs
    assert pairs.flops_round - sft.flops_round == once == pairs.flops_round_forward - sft.flops_round_forward
    assert dpo.training.rows == 2 * TRAINING.rows == 4


def test_a_method_that_states_no_costs_is_profiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = profiled("fedit", rank=2)
    monkeypatch.setattr(METHODS.load("fedit"), "facts", Method.facts)
    silent = profiled("fedit", rank=2)
    assert silent.tiers == stated.tiers
    assert (silent.server.entry.memory, silent.server.entry.time) == ("not stated", "not stated")


def test_checkpointing_adds_a_forward_pass_and_takes_memory() -> None:
    plain, again = (
        profiled(rank=2, work=Workload(10, 16, 8, TRAINING, checkpointing=checkpointing)).tiers[0]
        for checkpointing in (False, True)
    )
    assert again.flops_round - plain.flops_round == plain.flops_round_forward
    assert again.peak_memory.total_bytes < plain.peak_memory.total_bytes
    assert [row.estimate for row in again.memory] == [row.estimate for row in plain.memory]
    assert again.peak_memory == again.memory[1].estimate


def test_moments_follow_the_optimizer() -> None:
    def moments(kind: str, momentum: float = 0.0) -> int:
        return TrainingSettings(optimizer=kind, momentum=momentum, steps=1).moments  # type: ignore[arg-type]

    assert [moments("adamw"), moments("sgd"), moments("sgd", 0.9)] == [2, 0, 1]


def test_under_trivial_a_client_pays_for_every_budget() -> None:
    large, small = profiled("trivial", targets=["attention"]).tiers
    assert large.flops_round == small.flops_round
    assert large.flops_round > large.steps * large.flops_training_step
    assert large.upload == small.upload


def test_memory_counts_the_slots_that_a_client_holds_beside_its_own() -> None:
    """Under trivial those of the largest rank, whatever the client's own budget."""
    model = tiny_backbone().info
    small = profiled("trivial", targets=["attention"]).tiers[1]
    own, largest = (build_method("trivial", {"targets": ["attention"]}).plan(model, each) for each in (SMALL, LARGE))
    form = StepForm(TRAINING.gradient_accumulation_steps, row_tokens=8)
    assert small.peak_memory == memory(model, own, 16, dtype=torch.bfloat16, beside=largest, form=form)
    assert small.peak_memory.adapters_bytes > memory(model, own, 16, dtype=torch.bfloat16, form=form).adapters_bytes


def test_memory_counts_the_single_examples_of_dp_sgd() -> None:
    plain, private = (
        profiled(rank=2, work=replace(WORK, sample_rate=rate)).tiers[0].peak_memory for rate in (None, 0.5)
    )
    assert private.gradients_bytes == 3 * plain.gradients_bytes


def test_dp_sgd_counts_the_examples_that_it_is_expected_to_draw() -> None:
    """Each of 6 steps draws half of ten examples: 5 are two and a half passes by twos."""
    tier = profiled(rank=2, work=replace(WORK, sample_rate=0.5)).tiers[0]
    once = cost(tiny_backbone().info, tier.plan).training_flops(16, 8)
    assert (tier.steps, tier.flops_training_step, tier.flops_round) == (6, 2.5 * once, 6 * 2.5 * once)
    assert tier.flops_round_forward == 6 * 2.5 * tier.flops_forward


def test_the_reference_of_dpo_scores_the_pairs_that_dp_sgd_draws_at_least_once() -> None:
    """One of two steps at 0.5 draws 3/4 of ten pairs."""
    training = TRAINING.model_copy(update={"epochs": None, "steps": 2})
    sft, pairs = (
        profiled(rank=2, work=replace(WORK, training=each, sample_rate=0.5)).tiers[0]
        for each in (training, training.model_copy(update={"objective": "dpo"}))
    )
    reference = cost(tiny_backbone().info, AdapterPlan((), 4)).forward_flops(16, 8)
    assert pairs.flops_round - sft.flops_round == 0.75 * 5 * reference


def test_a_client_that_is_not_asked_every_round_is_shown() -> None:
    found = profiled("ub-smoe", participants=2, rank=2, candidates=3)
    assert found.server.participants == 2
    small = found.tiers[1]
    assert small.absent_download is not None
    assert small.absent_download.bytes > small.download.bytes
    assert "pseudo_gradient" in small.absent_download.parts


def test_tiers_that_no_round_has_room_for_have_a_first_and_a_later_round_of_their_own() -> None:
    """One client in a round, of the first tier; the other tier's figures are those of rounds that it takes part in."""
    everyone = profiled("ub-smoe", rank=2, candidates=3).tiers[1]
    alone = profiled("ub-smoe", participants=1, rank=2, candidates=3).tiers[1]
    assert alone.first_download == everyone.first_download
    assert alone.download == everyone.download
    assert alone.upload == everyone.upload
    assert alone.absent_download is not None
    assert "pseudo_gradient" in alone.absent_download.parts.keys() - alone.download.parts.keys()


def test_the_server_of_a_running_mean_holds_one_upload_and_that_of_a_stack_all() -> None:
    mean, stacked = profiled("fedit", rank=3).server, profiled("flexlora", rank=3).server
    assert mean.memory_bytes < 2 * mean.state_bytes + mean.received_bytes
    assert stacked.memory_bytes == 2 * stacked.state_bytes + stacked.received_bytes
    assert 0 < mean.running_sum_seconds < 10


def test_records_hold_what_is_promised_and_agree_with_each_other() -> None:
    promised = (
        "tier parameters_total parameters_active trainable_total trainable_active flops_forward flops_training_step "
        "upload_bytes download_bytes peak_memory_bytes"
    )
    for record in as_rows(profiled("fedalign-moe", rank=2)):
        assert set(promised.split()) <= set(record)
        assert record["bytes_are"] == "at most"
        assert record["upload_least_bytes"] < record["upload_bytes"] == sum(record["upload_parts"].values())
        assert record["download_bytes"] == sum(record["download_parts"].values())
        assert record["flops_round"] == record["flops_round_forward"] + record["flops_round_backward"]
        for row in record["memory"]:
            assert row["total_bytes"] == sum(value for key, value in row.items() if key[-6:] == "_bytes") / 2


@pytest.mark.parametrize(("experts", "each"), [(6, 4), (4, 8 / 3)])
def test_unequal_shares_are_reported_as_their_mean(experts: int, each: float) -> None:
    """E k^c / C experts a client: 6 · 2 / 3 = 4, 4 · 2 / 3."""
    options = {"rank": 2, "experts": experts, "active_experts": 1, "targets": ["q_proj"]}
    budget = Budget("all", 4, 3)
    clients = [ClientInfo(index, budget, 10) for index in range(3)]
    found = profile(build_method("fedamole", options), tiny_backbone().info, clients, WORK, participants=3)
    (tier,) = found.tiers
    assert tier.upload.parts["experts"] == pytest.approx(4 * 2 * 2 * (16 + 16) * each, abs=1)
    assert as_rows(found)[0]["bytes_are"] == "mean over the clients"
