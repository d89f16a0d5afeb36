"""Dropout on the input of LoRA's product, drawn by a counter on the tensor's own device.

Every element has its own random number, a function of integers alone: the slot's seed (run, round, client, step), the
layer's name, the token's place among the slot's real tokens, and the feature. A client in a cohort therefore gets the
same mask as alone, with any padding, on a CPU as on a GPU, and a recomputed layer gets the same mask again. Nothing is
drawn on the host or copied from it while a layer runs.

The function is SplitMix64 (Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, Section 5,
Figure 17), whose n-th output is `mix64(key + n·GAMMA)`. The layer's key seeds a generator that gives one key for every
token; each of these gives two 32-bit numbers per output.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fedguild.core.seeding import derive
from fedguild.model import kernels
from fedguild.model.runtime import Pass

GAMMA = 0x9E3779B97F4A7C15
"""2⁶⁴ divided by the golden ratio, SplitMix64's increment."""
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
_CHUNK = 1 << 18
"""Elements of a mask drawn at a time on a CPU, so that what is in between stays in the cache."""
_LOWEST = -(1 << 31)
"""The smallest int32, with which everything is kept."""


class Dropout:
    """Per-slot dropout, inactive until `seed` is called and at rate 0."""

    def __init__(self) -> None:
        self._seeds: tuple[int, ...] | None = None
        self._on_device: Tensor | None = None

    def seed(self, seeds: Sequence[int] | None) -> None:
        """Sets each slot's seed, below 2⁶³, for the coming step; None switches dropout off."""
        self._seeds = None if seeds is None else tuple(seeds)
        self._on_device = None

    def __call__(self, hidden: Tensor, layer: str, current: Pass, rates: Sequence[float]) -> Tensor:
        if self._seeds is None or not any(rates):
            return hidden
        flat = hidden.reshape(-1, hidden.shape[-1])
        tokens, device = flat.shape[0], flat.device
        if self._on_device is None or self._on_device.device != device:
            self._on_device = torch.tensor(self._seeds, dtype=torch.int64).to(device, non_blocking=True)
        slot, keep = current.slot_of_token(tokens, device), current.keep(tokens)
        keys = mix64(self._on_device ^ _layer_key(layer)).index_select(0, slot)
        keys = mix64(keys.add_(current.place_in_slot(tokens, device) + 1, alpha=_signed(GAMMA)))
        least, factor = _table(tuple(rates), device, flat.dtype)
        least, factor = least.index_select(0, slot), factor.index_select(0, slot)
        if keep is not None:
            least, factor = least.masked_fill(~keep, _LOWEST), factor.masked_fill(~keep, 1.0)
        return (flat * kept(keys, least, flat.shape[1]) * factor[:, None]).view_as(hidden)


def kept(keys: Tensor, least: Tensor, features: int) -> Tensor:
    """Returns [N, features] bool, the elements that are kept.

    Args:
        keys: [N] int64, the key of each token.
        least: [N] int32; an element is kept if its number, from -2³¹ to 2³¹ - 1, is at least this.
        features: H.
    """
    if kernels.runs("dropout", keys.device):
        from fedguild.model.kernels.dropout import kept_elements

        return kept_elements(keys, least, features, GAMMA, MULTIPLIERS, SHIFTS)
    offsets = torch.arange(1, features // 2 + features % 2 + 1, device=keys.device) * _signed(GAMMA)
    rows = max(1, _CHUNK // features) if keys.device.type == "cpu" else max(1, len(keys))
    out = torch.empty(len(keys), features, dtype=torch.bool, device=keys.device)
    for start in range(0, len(keys), rows):
        part = slice(start, start + rows)
        numbers = mix64(keys[part, None] + offsets).view(torch.int32)[:, :features]
        torch.ge(numbers, least[part, None], out=out[part])
    return out


def mix64(values: Tensor) -> Tensor:
    """Returns SplitMix64's output function of int64 values, whose products wrap around."""
    first, second, last = SHIFTS
    values = (values ^ _shifted(values, first)).mul_(_signed(MULTIPLIERS[0]))
    values = values.bitwise_xor_(_shifted(values, second)).mul_(_signed(MULTIPLIERS[1]))
    return values.bitwise_xor_(_shifted(values, last))


def _shifted(values: Tensor, places: int) -> Tensor:
    """Logical right shift; torch's repeats the sign."""
    return (values >> places).bitwise_and_((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    """Returns the int64 with the bits of an unsigned number below 2⁶⁴."""
    return value - (1 << 64) if value >> 63 else value


@cache
def _layer_key(layer: str) -> int:
    return derive(0, "dropout", layer)


@cache
def _table(rates: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns [S] int32, the smallest number that each slot keeps, and [S], the factor on what is kept."""
    least = torch.tensor([_LOWEST + round(rate * 2**32) for rate in rates], dtype=torch.int32)
    factor = torch.tensor([1 / (1 - rate) for rate in rates], dtype=dtype)
    return least.to(device, non_blocking=True), factor.to(device, non_blocking=True)
