"""Dropout on LoRA's input: whose masks, when, and how much."""

from __future__ import annotations

import pytest
import torch

from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.dropout import Dropout
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from fedguild.model.runtime import Pass
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows


class Rated(Dropout):
    """Dropout that is always called with the same rates."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def __call__(self, hidden, layer, current):
        return super().__call__(hidden, layer, current, self.rates)


ONES = torch.ones(2, 3, 500)
MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_it_does_nothing_until_seeded_and_nothing_when_switched_off():
    dropout = Rated([0.5, 0.5])
    current = Pass((1, 1), None, None, 1)
    assert torch.equal(dropout(ONES, "layer", current), ONES)
    dropout.seed([1, 2])
    assert not torch.equal(dropout(ONES, "layer", current), ONES)
    dropout.seed(None)
    assert torch.equal(dropout(ONES, "layer", current), ONES)


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_it_drops_the_rate_and_scales_the_rest(rate):
    dropout = Rated([0.0, rate])
    dropout.seed([1, 2])
    out = dropout(ONES, "layer", Pass((1, 1), None, None, 1))
    assert torch.equal(out[0], ONES[0])
    kept = out[1][out[1] != 0]
    assert kept.unique().tolist() == pytest.approx([1 / (1 - rate)])
    assert len(kept) / out[1].numel() == pytest.approx(1 - rate, abs=0.04)


def test_masks_belong_to_a_client_not_to_its_place_or_padding():
    """The same client's tokens get the same masks in another slot and beside other padding."""
    pair = Rated([0.5, 0.5])
    pair.seed([1, 2])
    in_pair = pair(ONES, "layer", Pass((1, 1), MASK, None, 1))
    alone = Rated([0.5])
    alone.seed([2])
    by_itself = alone(ONES[1:, :1], "layer", Pass((1,), None, None, 1))
    assert torch.equal(in_pair[1, :1], by_itself[0])
    assert torch.equal(in_pair[1, 1:], ONES[1, 1:])


def test_masks_differ_by_layer_and_step():
    dropout, current = Rated([0.5]), Pass((2,), None, None, 1)
    dropout.seed([1])
    first, other = dropout(ONES, "a", current), dropout(ONES, "b", current)
    assert torch.equal(first, dropout(ONES, "a", current))
    assert not torch.equal(first, other)
    dropout.seed([2])
    assert not torch.equal(first, dropout(ONES, "a", current))


def test_only_linear_layers_of_a_slot_with_a_rate_are_hit(olmoe_backbone):
    plan = AdapterPlan((Lora(4, 1.0, ("attention",)),))
    rows = [Encoded(tuple(ids), 1) for ids in random_rows([8, 6], 1)]
    adapter = random_adapter(olmoe_backbone.info, plan, 1)
    with SlotModel(olmoe_backbone, [plan, plan.with_lora(dropout=0.5)]) as model, torch.no_grad():
        model.load(0, adapter)
        model.load(1, adapter)
        quiet = model.token_losses(collate([rows, rows], PAD)).view(2, -1)
        model.dropout.seed([3, 4])
        noisy = model.token_losses(collate([rows, rows], PAD)).view(2, -1)
    assert torch.equal(quiet[0], noisy[0])
    assert (quiet[1] - noisy[1]).abs().max() > 0.01
