"""A step of Adam or AdamW as the kernels take it: trainables of all slots, and each slot's own numbers.

`adam` computes it on a GPU, `cpu_adam` on a CPU.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 4
"""Floating-point numbers of a slot, and as many constants before them."""


class State:
    """One trainable of all slots and its moments, all contiguous and of one shape, at fixed addresses.

    Args:
        value: [S, …] or [M, S, …].

    Attributes:
        tensors: The value and its moments.
        rows: Number of contiguous rows: one for each slot, or for each (entry, slot).
        inner: The elements of a row.
        fixed: What a kernel reads of it at every step, as 64-bit numbers: three addresses, rows, inner, decays.
    """

    __slots__ = ("axis", "decays", "dtype", "fixed", "inner", "rows", "tensors")

    def __init__(self, value: Tensor, first: Tensor, second: Tensor, axis: int, decays: bool) -> None:
        self.tensors = value, first, second
        assert all(tensor.is_contiguous() for tensor in self.tensors), "a trainable and its moments lie in one order"
        self.axis, self.decays, self.dtype = axis, decays, value.dtype
        self.rows, self.inner = math.prod(value.shape[: axis + 1]), math.prod(value.shape[axis + 1 :])
        self.fixed = array("q", [*map(address, self.tensors), self.rows, self.inner, decays]).tobytes()


class Update(NamedTuple):
    """What one step changes.

    Attributes:
        state: The trainable and its moments.
        grad: Its gradient, contiguous, of its shape.
        mask: [M, S] bool, the entries to update; None for all.
    """

    state: State
    grad: Tensor
    mask: Tensor | None = None


def mask_place(update: Update) -> tuple[int, int, int]:
    """Returns the address and the strides of an update's mask; zeros without one."""
    mask = update.mask
    if mask is None:
        return 0, 0, 0
    assert update.state.axis == 1, "a mask is of [M, S] entries"
    assert mask.dtype is torch.bool
    down, across = mask.stride()
    return address(mask), down, across


def address(tensor: Tensor) -> int:
    """Returns a tensor's address; 0 if it has no values."""
    return 0 if tensor.device.type == "meta" else tensor.data_ptr()


def step_numbers(
    rates: Sequence[float | None], counts: Sequence[int], betas: tuple[float, float], eps: float, decay: float
) -> list[float]:
    """Returns the constants, then for each slot whether it steps, its rate, and its bias corrections as factors."""
    numbers = [betas[0], betas[1], eps, decay]
    for rate, count in zip(rates, counts, strict=True):
        if rate is None:
            numbers += [0.0] * NUMBERS
        else:
            root = (1 - betas[1] ** count) ** 0.5
            numbers += [1.0, rate, rate / (1 - betas[0] ** count), root]
    return numbers
