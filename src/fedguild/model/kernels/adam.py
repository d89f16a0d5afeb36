"""One step of Adam or AdamW for all trainables of all slots in one launch, in Triton.

torch's fused kernels take one rate and one count per call. Here each slot has its own, with its own factor on the
gradient (clipping), and each (expert, slot) entry may be left out, all read on the device. A program finds what it
updates in a table of addresses, so a step is one launch for each dtype, whatever the number of trainables, experts and
slots. A slot's bits do not depend on the other slots.

The formulas are Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019, Algorithm 2, as in
`torch.optim.AdamW` (or `torch.optim.Adam`), in the trainables' own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedguild.model.kernels.adam_updates import NUMBERS, Update, address, mask_place, step_numbers

BLOCK = 1024
"""Elements that a program has in registers at once."""
CHUNK = 8
"""Blocks of one slot's row that a program goes through."""
ALIGNMENT = 16
"""Bytes that a thread loads at once."""
COLUMNS = 11
"""Whole numbers of a trainable in the table; the slots' floating-point numbers stand behind it."""
WIDTHS = {torch.float32: tl.float32, torch.float64: tl.float64}


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
    """Updates all slots that have a rate, in place; copies one small table to the device and waits for nothing.

    Args:
        updates: Trainables of one dtype, fp32 or fp64, on one device.
        rates: [S] each slot's learning rate; None for a slot that keeps its values and moments.
        counts: [S] each slot's steps, this one included.
        eps: Added to the root of the second moment.
        decoupled: Whether weight decay is AdamW's; otherwise it is added to the gradient.
        factor: [S] factor on each slot's gradient, on the device; None for 1.
    """
    numbers = step_numbers(rates, counts, betas, eps, decay)
    for aligned in (True, False):
        own = [update for update in updates if _is_aligned(update) is aligned]
        if own:
            _launch(own, numbers, len(rates), factor, decoupled=decoupled, aligned=aligned)


def _launch(
    updates: Sequence[Update],
    numbers: Sequence[float],
    slots: int,
    factor: Tensor | None,
    *,
    decoupled: bool,
    aligned: bool,
) -> None:
    """Updates trainables that are either all aligned or treated as unaligned."""
    value = updates[0].state.tensors[0]
    of_tile, first_tiles = _tiles(tuple((state.rows, state.inner) for state, _, _ in updates), value.device)
    rows = [_row(update, first) for update, first in zip(updates, first_tiles, strict=True)]
    table = _table(rows, numbers, value.device)
    if value.device.type == "meta":
        return
    with torch.cuda.device_of(value):
        _adam_kernel[(len(of_tile),)](
            of_tile,
            table,
            table[len(rows) * COLUMNS :].view(torch.float64),
            value if factor is None else factor,
            slots,
            CLIPPED=factor is not None,
            DECOUPLED=decoupled,
            ALIGNED=aligned,
            WIDTH=WIDTHS[value.dtype],
            LANES=ALIGNMENT // value.element_size(),
            COLUMNS=COLUMNS,
            NUMBERS=NUMBERS,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
        )


def _is_aligned(update: Update) -> bool:
    """Whether rows start and end at multiples of `ALIGNMENT` bytes, so that a thread can load as many at once."""
    bytes_of_row = update.state.inner * update.grad.element_size()
    return not any(number % ALIGNMENT for number in (bytes_of_row, *map(address, _tensors(update))))


def _tensors(update: Update) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    value, first, second = update.state.tensors
    return value, update.grad, first, second


def _row(update: Update, first_tile: int) -> list[int]:
    assert update.grad.is_contiguous(), "a trainable and its gradient lie in one order"
    inner = update.state.inner
    places = [*map(address, _tensors(update)), *mask_place(update)]
    return [*places, inner, first_tile, -(-inner // (BLOCK * CHUNK)), int(update.state.decays)]


def _table(rows: Sequence[Sequence[int]], numbers: Sequence[float], device: torch.device) -> Tensor:
    """Returns [n] int64 on the device: the rows, then the bits of the numbers, in one copy."""
    whole = torch.tensor([number for row in rows for number in row], dtype=torch.int64)
    table = torch.cat([whole, torch.tensor(numbers, dtype=torch.float64).view(torch.int64)])
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _tiles(shapes: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Returns [T] int32 on the device, the trainable of each program, and each trainable's first program.

    Args:
        shapes: The rows of each trainable, and the elements of a row.
    """
    parts = [rows * -(-inner // (BLOCK * CHUNK)) for rows, inner in shapes]
    sizes = torch.tensor(parts)
    of_tile = torch.arange(len(parts), dtype=torch.int32).repeat_interleave(sizes)
    return of_tile.to(device, non_blocking=True), tuple((sizes.cumsum(0) - sizes).tolist())


@triton.jit
def _adam_kernel(
    of_tile_at,
    table_at,
    numbers_at,
    factor_at,
    slots,
    CLIPPED: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Some blocks of one slot's row of one trainable."""
    tile = tl.program_id(0)
    row_at = table_at + tl.load(of_tile_at + tile).to(tl.int64) * COLUMNS
    inner = tl.load(row_at + 7)
    part = tile - tl.load(row_at + 8)
    parts = tl.load(row_at + 9)
    entry = part // parts
    slot = entry % slots
    own_at = numbers_at + (slot + 1) * NUMBERS
    mask_at = tl.load(row_at + 4)
    place = mask_at + (entry // slots) * tl.load(row_at + 5) + slot * tl.load(row_at + 6)
    wanted = tl.load(place.to(tl.pointer_type(tl.uint8)), mask=mask_at != 0, other=1)
    if (tl.load(own_at) == 0.0) | (wanted == 0):
        return
    beta2 = tl.load(numbers_at + 1).to(WIDTH)
    new1 = (1.0 - tl.load(numbers_at)).to(WIDTH)
    new2 = (1.0 - tl.load(numbers_at + 1)).to(WIDTH)
    eps = tl.load(numbers_at + 2).to(WIDTH)
    decay = (tl.load(numbers_at + 3) * tl.load(row_at + 10).to(tl.float64)).to(WIDTH)
    rate = tl.load(own_at + 1).to(WIDTH)
    size = tl.load(own_at + 2).to(WIDTH)
    root = tl.load(own_at + 3).to(WIDTH)
    start = entry * inner
    value_at = tl.load(row_at).to(tl.pointer_type(WIDTH)) + start
    grad_at = tl.load(row_at + 1).to(tl.pointer_type(WIDTH)) + start
    first_at = tl.load(row_at + 2).to(tl.pointer_type(WIDTH)) + start
    second_at = tl.load(row_at + 3).to(tl.pointer_type(WIDTH)) + start
    if ALIGNED:
        inner = tl.multiple_of(inner, LANES)
        value_at = tl.multiple_of(value_at, 16)
        grad_at = tl.multiple_of(grad_at, 16)
        first_at = tl.multiple_of(first_at, 16)
        second_at = tl.multiple_of(second_at, 16)
    begin = (part % parts) * (BLOCK * CHUNK)
    blocks = tl.minimum(tl.cdiv(inner - begin, BLOCK), CHUNK)
    for block in range(0, blocks):
        at = begin + block * BLOCK + tl.arange(0, BLOCK)
        inside = at < inner
        value = tl.load(value_at + at, mask=inside, other=0.0)
        grad = tl.load(grad_at + at, mask=inside, other=0.0)
        first = tl.load(first_at + at, mask=inside, other=0.0)
        second = tl.load(second_at + at, mask=inside, other=0.0)
        if CLIPPED:
            grad *= tl.load(factor_at + slot).to(WIDTH)
        if DECOUPLED:
            value -= rate * decay * value
        else:
            grad += decay * value
        first += new1 * (grad - first)
        second = beta2 * second + new2 * grad * grad
        value -= size * first / (tl.sqrt(second) / root + eps)
        tl.store(value_at + at, value, mask=inside)
        tl.store(first_at + at, first, mask=inside)
        tl.store(second_at + at, second, mask=inside)
