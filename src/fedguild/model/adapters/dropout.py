"""Dropout on the input of LoRA's product, independent of the other clients in a cohort.

Each slot draws masks for its own real tokens, in order, from a generator for its step and layer. A client in a cohort
therefore gets the same masks as alone, and a recomputed layer gets the same masks again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedguild.model.runtime import Pass
from fedguild.seeding import derive


class Dropout:
    """Per-slot dropout, inactive until `seed` is called and at rate 0."""

    def __init__(self) -> None:
        self._seeds: tuple[int, ...] | None = None

    def seed(self, seeds: Sequence[int] | None) -> None:
        """Sets each slot's seed for the coming step; None switches dropout off."""
        self._seeds = None if seeds is None else tuple(seeds)

    def __call__(self, hidden: Tensor, layer: str, current: Pass, rates: Sequence[float]) -> Tensor:
        """Returns `hidden` [..., H] with dropout on the slots' real tokens, at each slot's rate."""
        if self._seeds is None or not any(rates):
            return hidden
        flat = hidden.reshape(-1, hidden.shape[-1])
        keep = current.keep(flat.shape[0])
        slot = current.slot_of_token(flat.shape[0], flat.device)
        factor = torch.ones_like(flat)
        for index, rate in enumerate(rates):
            mine = slot == index if keep is None else (slot == index) & keep
            count = int(mine.sum())
            if rate and count:
                rng = torch.Generator().manual_seed(derive(self._seeds[index], layer))
                drawn = torch.rand(count, flat.shape[1], generator=rng) >= rate
                factor[mine] = (drawn / (1 - rate)).to(flat.device, flat.dtype)
        return (flat * factor).view_as(hidden)
