"""The sorted pairs of a layer, and the way back to the tokens' order."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from fedguild.model.moe.dispatch import combine, dispatch, gather

# Three tokens of slot 0, two of slot 1; three experts, 3 = not active; token 2 is padding.
INDICES = torch.tensor([[2, 0], [0, 3], [1, 2], [0, 1], [2, 3]])
SLOT = torch.tensor([0, 0, 0, 1, 1])
KEEP = torch.tensor([True, True, False, True, True])


def test_pairs_are_sorted_by_expert_then_slot_then_token():
    plan = dispatch(INDICES, SLOT, KEEP, experts=3, slots=2)
    assert plan.token.tolist() == [0, 1, 3, 3, 0, 4]
    assert plan.pair.tolist() == [1, 2, 6, 7, 0, 8]
    assert plan.slot.tolist() == [0, 0, 1, 1, 0, 1]
    assert plan.expert_ends.tolist() == [3, 4, 6]
    assert plan.group_ends.tolist() == [2, 3, 3, 4, 5, 6]
    assert plan.expert_ends.dtype is plan.group_ends.dtype is torch.int32


def test_combine_sums_each_tokens_rows_and_leaves_padding_zero():
    plan = dispatch(INDICES, SLOT, KEEP, experts=3, slots=2)
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])
    assert combine(rows, plan).squeeze(1).tolist() == [17.0, 2.0, 0.0, 12.0, 32.0]
    weights = torch.tensor([2.0, 0.5, 1.0, 0.25, 0.5, 0.0])
    assert combine(rows, plan, weights).squeeze(1).tolist() == [32.5, 2.0, 0.0, 5.0, 0.0]


def test_blocks_fill_each_group_up_to_whole_blocks(monkeypatch):
    monkeypatch.setattr("fedguild.model.moe.dispatch.BLOCK_HEIGHTS", (2,))
    monkeypatch.setattr("fedguild.model.moe.dispatch.FILLER_LIMIT", 1.0)
    plan = dispatch(INDICES, SLOT, KEEP, experts=3, slots=2, blocks=True)
    assert plan.block_height == 2
    assert plan.group_ends.tolist() == [2, 4, 4, 6, 8, 10]
    assert plan.expert_ends.tolist() == [4, 6, 10]
    assert plan.block_ends.tolist() == [1, 2, 2, 3, 4, 5]
    assert plan.slot.tolist() == [0, 0, 1, 2, 1, 2, 0, 2, 1, 2]
    assert plan.token.tolist() == [0, 1, 3, 0, 3, 0, 0, 0, 4, 0]
    rows = torch.tensor([1.0, 2.0, 4.0, 99.0, 8.0, 99.0, 16.0, 99.0, 32.0, 99.0])[:, None]
    assert combine(rows, plan).squeeze(1).tolist() == [17.0, 2.0, 0.0, 12.0, 32.0]


def test_blocks_are_left_out_where_they_cost_too_many_rows():
    plan = dispatch(INDICES, SLOT, KEEP, experts=3, slots=2, blocks=True)
    assert plan.block_height == 0
    assert plan.block_ends is None


def test_gather_takes_each_pairs_token():
    plan = dispatch(INDICES, SLOT, None, experts=3, slots=2)
    assert gather(torch.arange(5.0)[:, None], plan).squeeze(1).tolist() == [0.0, 1.0, 3.0, 2.0, 3.0, 0.0, 2.0, 4.0]


@pytest.mark.parametrize("keep", [KEEP, None], ids=["padding", "all real"])
@pytest.mark.parametrize("indices", [INDICES, INDICES.clamp(max=2)], ids=["mixed experts", "all active"])
def test_the_number_of_pairs_changes_nothing(keep, indices):
    """Whether the host knows it or reads it."""
    real = indices < 3 if keep is None else (indices < 3) & keep[:, None]
    read = dispatch(indices, SLOT, keep, experts=3, slots=2)
    known = dispatch(indices, SLOT, keep, experts=3, slots=2, pairs=int(real.sum()))
    for field in fields(read):
        one, other = getattr(read, field.name), getattr(known, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, field.name
