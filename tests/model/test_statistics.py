"""Activation counts against a slow recount by hooks of the test's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.lora import Lora
from fedguild.model.moe.statistics import RoutingStatistics
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import EXPERTS, PAD, random_adapter, random_rows, tiny_backbone
from tests.oracles.routing import Recount

PLAN = AdapterPlan((Lora(4, 0.5, ("attention", "router", "experts")),))
PLANS = [replace(PLAN, active_experts=k) for k in (4, 1, 2)]
LENGTHS = ([[7, 3], [5], []], [[2], [6, 6, 4], [8]])


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_counts_equal_a_recount(checkpointing, packs):
    """Two forward and backward passes of uneven slots: padding is left out, recomputation too."""
    backbone = tiny_backbone("olmoe", gradient_checkpointing=checkpointing)
    backbone.packs = packs
    recount = Recount([layer.router for layer in backbone.moe])
    owners, chosen = [], [[], []]
    with SlotModel(backbone, PLANS) as model:
        for slot, plan in enumerate(PLANS):
            model.load(slot, random_adapter(backbone.info, plan, slot))
        with model.collect_routing() as statistics:
            for seed, lengths in enumerate(LENGTHS):
                rows = [[Encoded(tuple(ids), 1) for ids in random_rows(slot_lengths, seed)] for slot_lengths in lengths]
                batch = collate(rows, PAD)
                loss = model.token_losses(batch).sum()
                for layer in range(2):
                    chosen[layer].append(recount.chosen[layer][-1])
                loss.backward()
                width = batch.input_ids.shape[1]
                owners.append(
                    [
                        slot if at < length else None
                        for slot, slot_lengths in enumerate(lengths)
                        for length in slot_lengths
                        for at in range(length if packs else width)
                    ]
                )
    recount.close()
    assert len(recount.chosen[0]) == (4 if checkpointing else 2)
    recount.chosen = chosen
    assert statistics.counts.tolist() == recount.counts(owners, slots=3, experts=EXPERTS)
    assert statistics.tokens.tolist() == [12, 21, 8]
    per_slot = statistics.counts.sum(dim=2)
    assert per_slot.tolist() == [[12 * 4, 21 * 1, 8 * 2]] * 2


def test_nothing_is_counted_unless_asked(olmoe_backbone):
    batch = collate([[Encoded(tuple(random_rows([5], 1)[0]), 1)]], PAD)
    with SlotModel(olmoe_backbone, [PLAN]) as model, torch.no_grad():
        with model.collect_routing() as statistics:
            pass
        model.token_losses(batch)
    assert not statistics.counts.any()
    assert not statistics.tokens.any()


def test_a_count_that_was_left_ends_without_ending_another(olmoe_backbone):
    """As when the garbage collector closes a training that failed, in the middle of the next."""
    plan = AdapterPlan((Lora(2, 1.0, ("experts",)),))

    def training():
        with SlotModel(olmoe_backbone, [plan]) as model, model.collect_routing() as statistics:
            yield statistics

    def failed():
        with SlotModel(olmoe_backbone, [plan]) as model:
            count = model.collect_routing()
            count.__enter__()
            return count

    left = failed()
    running = training()
    statistics = next(running)
    left.__exit__(None, None, None)
    assert olmoe_backbone.runtime.statistics is statistics
    running.close()
    assert olmoe_backbone.runtime.statistics is None


def test_frequencies_by_token_and_by_step():
    statistics = RoutingStatistics.empty(1, 2, 3, torch.device("cpu"))
    for counts, tokens in (([[4, 1, 0], [0, 0, 0]], [5, 0]), ([[3, 0, 0], [2, 2, 0]], [3, 2])):
        before = statistics.counts.clone(), statistics.tokens.clone()
        statistics.counts += torch.tensor([counts])
        statistics.layer_tokens += torch.tensor([tokens])
        statistics.close_step(*before)
    assert statistics.steps.tolist() == [2, 1]
    assert statistics.step_hits.tolist() == [[[2, 1, 0], [1, 1, 0]]]
    assert statistics.frequency("token").tolist() == [[[7 / 8, 1 / 8, 0.0], [1.0, 1.0, 0.0]]]
    assert statistics.frequency("step").tolist() == [[[1.0, 0.5, 0.0], [1.0, 1.0, 0.0]]]
