"""One step of Adam or AdamW for all trainables of all slots in one pass on a CPU, in Numba.

torch's fused kernels take one rate and one count per call. Here each slot has its own, with its own factor on the
gradient (clipping), and each (expert, slot) entry may be left out and is not touched. Adjacent rows of slots with the
same numbers are one loop. Every element is read and written once, by one thread, so memory bandwidth is the limit, as
it is for torch's.

The formulas are those of `adam`, the GPU's kernel, and of torch, in the trainables' own dtype. No operation is fused
with another or reordered, and each is rounded as in IEEE 754. An element's bits depend neither on its place in a
vector, nor on the other slots, nor on the number of threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from fedguild.model.kernels.adam_updates import NUMBERS, Update, mask_place, step_numbers
from fedguild.model.kernels.threads import (
    EVERYTHING,
    Kernel,
    booleans,
    long_integers,
    next_piece,
    pointer_like,
    prefetch,
)

LEAST_ELEMENTS = 1 << 14
"""Elements that are worth a thread."""
LANES = 16
"""Elements that a piece begins at a multiple of."""
NEAR = 1024
"""Elements of a gap that are asked for, before the next that is updated."""
FIXED = 6
"""Whole numbers of a trainable that stay."""
MASK = 3
"""Whole numbers of its mask."""
CONSTANTS = 4
"""Floating-point numbers of all slots, before the slots' own."""
OWN = 6
"""Floating-point numbers of a slot."""


def adam_step(
    updates: Sequence[Update],
    rates: Sequence[float | None],
    counts: Sequence[int],
    *,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decoupled: bool,
    factor: Tensor | None = None,
) -> None:
    """Updates all slots that have a rate, in place; the arguments are those of `adam.adam_step`, on the CPU."""
    numbers = step_numbers(rates, counts, betas, eps, decay)
    factors = [1.0] * len(rates) if factor is None else factor.tolist()
    own = [_own(numbers[NUMBERS * (slot + 1) :], decay, factors[slot], decoupled) for slot in range(len(rates))]
    single = updates[0].state.dtype is torch.float32
    constants = [1 - betas[0], betas[1], 1 - betas[1], eps]
    floats = array("f" if single else "d", [*constants, *chain.from_iterable(own)])
    grads = array("q", [_place(update.grad) for update in updates])
    masked = any(update.mask is not None for update in updates)
    masks = array("q", chain.from_iterable(map(mask_place, updates)) if masked else ())
    fixed = b"".join([update.state.fixed for update in updates])
    whole = array("q", [*_alike(own)]) + grads + masks
    whole.frombytes(fixed)
    total = sum([update.state.rows * update.state.inner for update in updates])
    given = (whole.buffer_info()[0], floats.buffer_info()[0], len(rates), len(updates), masked, total)
    kernel = _single if single else _double
    kernel.run(given, most_pieces=-(-total // LEAST_ELEMENTS))


def _place(grad: Tensor) -> int:
    assert grad.is_contiguous(), "a trainable and its gradient lie in one order"
    return grad.data_ptr()


def _own(numbers: Sequence[float], decay: float, factor: float, decoupled: bool) -> list[float]:
    """Returns a slot's own numbers in the order of the kernel."""
    steps, rate, size, root = numbers[:NUMBERS]
    if not steps:
        return [0.0] * OWN
    return [1.0, factor, 0.0 if decoupled else decay, rate * decay if decoupled else 0.0, size, 1 / root]


def _alike(own: Sequence[Sequence[float]]) -> list[int]:
    """Returns, for each slot [S], how many successive slots have its numbers, itself included."""
    alike = [1] * len(own)
    for slot in reversed(range(len(own) - 1)):
        if own[slot] == own[slot + 1]:
            alike[slot] += alike[slot + 1]
    return alike


@njit(error_model="numpy")
def _update(tensors, start, elements, floats, own, decays):
    """Updates adjacent elements, all by the same numbers."""
    new1, beta2, new2, eps = floats[0], floats[1], floats[2], floats[3]
    factor, size, inverse_root = floats[own + 1], floats[own + 4], floats[own + 5]
    coupled = decoupled = floats[own] - floats[own]
    if decays:
        coupled, decoupled = floats[own + 2], floats[own + 3]
    value, grad = carray(tensors[0], EVERYTHING), carray(tensors[1], EVERYTHING)
    first, second = carray(tensors[2], EVERYTHING), carray(tensors[3], EVERYTHING)
    begin = np.uint64(start)
    for k in range(np.uint64(elements)):
        i = begin + k
        x = value[i]
        g = grad[i] * factor + coupled * x
        m = first[i]
        m += new1 * (g - m)
        v = beta2 * second[i] + new2 * g * g
        first[i] = m
        second[i] = v
        value[i] = x - decoupled * x - size * m / (np.sqrt(v) * inverse_root + eps)


@njit(error_model="numpy")
def _pass_over(tensors, start, end):
    """Prefetches the end of a gap: a CPU's own prefetching stops there, which costs more than the gap saves."""
    for i in range(max(start, end - NEAR), end, LANES):
        for tensor in range(4):
            prefetch(tensors[tensor], i)


@njit(error_model="numpy")
def _step(numbers, zero):
    """Updates everything; a piece is a range of the elements of all trainables, one trainable after the other."""
    given = carray(numbers, 8)
    pieces, slots, trainables, masked, total = given[1], given[4], given[5], given[6] != 0, given[7]
    whole, floats = carray(long_integers(given[2]), EVERYTHING), carray(pointer_like(given[3], zero), EVERYTHING)
    masks = slots + trainables
    fixed = masks + (trainables * MASK if masked else 0)
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        at, last = total * piece // pieces // LANES * LANES, total
        if piece + 1 < pieces:
            last = total * (piece + 1) // pieces // LANES * LANES
        end = np.int64(0)
        for trainable in range(trainables):
            column, begin = fixed + trainable * FIXED, end
            inner = whole[column + 4]
            end += whole[column + 3] * inner
            if at < min(end, last):
                tensors = (
                    pointer_like(whole[column], zero),
                    pointer_like(whole[slots + trainable], zero),
                    pointer_like(whole[column + 1], zero),
                    pointer_like(whole[column + 2], zero),
                )
                own_mask = masks + trainable * MASK
                has_mask = masked and whole[own_mask] != 0
                decays = whole[column + 5] != 0
                i, until = at - begin, min(end, last) - begin
                row = i // inner
                while i < until:
                    slot, rows, wanted = row % slots, np.int64(1), True
                    if has_mask:
                        mask = carray(booleans(whole[own_mask]), EVERYTHING)
                        wanted = mask[row // slots * whole[own_mask + 1] + slot * whole[own_mask + 2]] != 0
                    elif whole[0] < slots:
                        rows = whole[slot]
                    else:
                        rows = until // inner + 1
                    row += rows
                    to = min(row * inner, until)
                    own = CONSTANTS + OWN * slot
                    if wanted and floats[own] != 0:
                        _update(tensors, i, to - i, floats, own, decays)
                    else:
                        _pass_over(tensors, i, to)
                    i = to
                at = end


@Kernel
def _single(numbers):
    _step(numbers, np.float32(0))


@Kernel
def _double(numbers):
    _step(numbers, np.float64(0))
