"""Sums of losses over the rows of a slot, without waiting for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sums_of_slots(losses: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns [S], the sum of each slot's losses, which are [P], slot-major.

    On a GPU the number of operations does not depend on the number of slots, and the order is deterministic, unlike
    that of `index_add`.
    """
    if losses.device.type == "cpu":
        return torch.stack([part.sum() for part in losses.split(list(counts))])
    return _padded_sums(losses, counts)


def _padded_sums(losses: Tensor, counts: Sequence[int]) -> Tensor:
    slots, width = len(counts), max(1, *counts)
    if len(set(counts)) == 1:
        return losses.reshape(slots, -1).sum(dim=1)
    sizes = torch.tensor(counts)
    first = torch.arange(slots) * width - (sizes.cumsum(0) - sizes)
    places = torch.arange(len(losses)) + first.repeat_interleave(sizes)
    padded = losses.new_zeros(slots * width)
    return padded.index_copy(0, places.to(losses.device, non_blocking=True), losses).view(slots, width).sum(dim=1)
