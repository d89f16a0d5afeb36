"""Moments of several trainables in one row for each slot, and their values in pieces of such rows.

An expert's factor is stored as [M, S, …], so that a slot's part of it is M separate pieces; over all layers of a model
that is tens of thousands, each a call of its own. Here a slot's moments are one contiguous row over all trainables, and
its values and gradients are copied, a piece at a time, into rows of the same layout. A piece is small enough to stay in
a CPU's cache, so that the copies cost no traffic of the memory beyond what an update needs anyway.

Each trainable starts at a multiple of `LANES` elements and fills up to one. torch's vectorised kernels therefore never
compute one of its elements in their scalar remainder, which may round otherwise, and a slot's bits do not depend on how
many slots there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedguild.model.adapters.storage import SlotTensor

LANES = 16
"""Elements that a fused kernel hands out at a time; a multiple of any vector's width."""
PIECE = {"cpu": 1 << 20}
"""Elements of all slots in one piece, by type of device."""
PIECE_ELSEWHERE = 1 << 23


def is_aligned(trainable: SlotTensor) -> bool:
    """Whether every slot's part of a trainable fills whole lanes as it is stored."""
    return (trainable.stored.numel() // len(trainable.shapes)) % LANES == 0


@dataclass(frozen=True)
class _Part:
    """Rows `first` to `last` of a trainable [S, rows, …], and where they lie in a piece.

    Attributes:
        index: The trainable.
        axis: Position of the slot axis in its storage.
        first: First row.
        last: Row behind the last.
        values: Its stored values there, [S, last - first, …], a view.
        windows: The same shape of the scratch memory for values and for gradients, views.
        places: Where they begin and end in a slot's row of the piece.
    """

    index: int
    axis: int
    first: int
    last: int
    values: Tensor
    windows: tuple[Tensor, Tensor]
    places: tuple[int, int]

    def of(self, stored: Tensor) -> Tensor:
        """Returns the same part [S, last - first, …] of another tensor of the trainable's stored shape."""
        by_slot = _by_slot(stored, self.axis)
        whole = self.last - self.first == by_slot.shape[1]
        return by_slot if whole else by_slot[:, self.first : self.last]


class Piece:
    """A contiguous range of the rows, and the parts of trainables in it.

    Attributes:
        start: First element of the range in a slot's row.
        end: Element behind it.
        values: [S, end - start], the values in scratch memory, from `gather` on.
        grads: The gradients likewise.
    """

    def __init__(self, start: int, end: int, parts: Sequence[_Part], scratch: Sequence[Tensor]) -> None:
        self.start = start
        self.end = end
        self.values, self.grads = (memory[:, : end - start] for memory in scratch)
        self._parts = parts
        self._stored = [part.values for part in parts]
        self._value_windows, self._grad_windows = ([part.windows[which] for part in parts] for which in (0, 1))

    def gather(self, grads: Mapping[int, Tensor], *, changes_only: bool) -> None:
        """Copies the trainables' gradients, and their values or zeros, into scratch memory.

        Args:
            grads: Index -> gradient, of the trainable's stored shape.
            changes_only: Whether to start from zeros; `scatter` then adds.
        """
        if changes_only:
            self.values.zero_()
        else:
            torch._foreach_copy_(self._value_windows, self._stored)
        torch._foreach_copy_(self._grad_windows, [part.of(grads[part.index]) for part in self._parts])

    def mask(self, masks: Mapping[int, Tensor]) -> Tensor | None:
        """Returns [S, end - start] bool, where an update counts; None where it does everywhere.

        Args:
            masks: Index -> [M, S] bool of a trainable whose rows M not all slots update.
        """
        if not any(part.index in masks for part in self._parts):
            return None
        whole = torch.ones_like(self.values, dtype=torch.bool)
        for part in self._parts:
            if part.index in masks:
                window = whole[:, slice(*part.places)].unflatten(1, (part.last - part.first, -1))
                window.copy_(masks[part.index].T[:, part.first : part.last, None].expand_as(window))
        return whole

    def scatter(self, *, changes_only: bool) -> None:
        """Copies the values back, or adds the changes to them."""
        if changes_only:
            torch._foreach_add_(self._stored, self._value_windows)
        else:
            torch._foreach_copy_(self._stored, self._value_windows)


class SlotMajor:
    """The moments of some trainables, one row for each slot.

    Args:
        trainables: Index -> trainable, in the order of the rows.
        slots: S.
        moments: Number of moments.

    Attributes:
        places: Index -> where the trainable starts in a row.
        moments: Each moment's rows [S, n].
    """

    def __init__(self, trainables: Mapping[int, SlotTensor], slots: int, moments: int) -> None:
        self.places: dict[int, int] = {}
        self._trainables = trainables
        end = 0
        for index, trainable in trainables.items():
            self.places[index] = end
            end += _whole_lanes(trainable.stored.numel() // slots)
        stored = next(iter(trainables.values())).stored
        self.moments = [stored.detach().new_zeros(slots, end) for _ in range(moments)]
        self._most = max(LANES, PIECE.get(stored.device.type, PIECE_ELSEWHERE) // slots // LANES * LANES)
        self._slots = slots
        self._pieces: tuple[list[int], list[Piece]] = ([], [])

    def view(self, index: int, rows: Tensor) -> Tensor:
        """Returns a trainable's part of the rows [S, n], in the shape in which the trainable is stored."""
        trainable = self._trainables[index]
        by_slot = _by_slot(trainable.stored, trainable.axis)
        window = _window(rows, self.places[index], by_slot)
        return window.squeeze(1) if trainable.stored.dim() == 1 else window.transpose(0, trainable.axis)

    def pieces(self, indices: list[int]) -> Iterator[Piece]:
        """Yields the pieces that hold these trainables and nothing else."""
        if self._pieces[0] != indices:
            self._pieces = indices, self._divided(indices)
        yield from self._pieces[1]

    def _divided(self, indices: list[int]) -> list[Piece]:
        ranges: list[tuple[int, int, list[tuple[int, int, int]]]] = []
        for index in indices:
            shape = _by_slot(self._trainables[index].stored, self._trainables[index].axis).shape
            row = math.prod(shape[2:])
            unit = LANES // math.gcd(LANES, row)
            step = max(unit, self._most // row // unit * unit)
            for first in range(0, shape[1], step):
                last = min(first + step, shape[1])
                start = self.places[index] + first * row
                end = start + _whole_lanes((last - first) * row)
                if ranges and ranges[-1][1] == start and end - ranges[-1][0] <= self._most:
                    before, _, parts = ranges.pop()
                    ranges.append((before, end, [*parts, (index, first, last)]))
                else:
                    ranges.append((start, end, [(index, first, last)]))
        stored = next(iter(self._trainables.values())).stored.detach()
        longest = max((end - start for start, end, _ in ranges), default=0)
        scratch = [stored.new_zeros(self._slots, longest) for _ in range(2)]
        return [
            Piece(start, end, [self._part(*part, start, scratch) for part in parts], scratch)
            for start, end, parts in ranges
        ]

    def _part(self, index: int, first: int, last: int, start: int, scratch: Sequence[Tensor]) -> _Part:
        trainable = self._trainables[index]
        values = _by_slot(trainable.stored.detach(), trainable.axis)[:, first:last]
        place = self.places[index] + first * math.prod(values.shape[2:]) - start
        windows = _window(scratch[0], place, values), _window(scratch[1], place, values)
        places = place, place + math.prod(values.shape[1:])
        return _Part(index, trainable.axis, first, last, values, windows, places)


def _whole_lanes(elements: int) -> int:
    return -(-elements // LANES) * LANES


def _by_slot(stored: Tensor, axis: int) -> Tensor:
    """Returns a view [S, rows, …] of a trainable's storage."""
    if stored.dim() == 1:
        return stored[:, None]
    return stored if axis == 0 else stored.transpose(0, axis)


def _window(rows: Tensor, start: int, like: Tensor) -> Tensor:
    """Returns a view of rows [S, n] from `start` on, in the shape [S, …] of a tensor."""
    window: Tensor = rows[:, start : start + like[0].numel()].unflatten(1, like.shape[1:])
    return window
