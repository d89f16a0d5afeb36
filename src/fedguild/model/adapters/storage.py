"""Storage of an adapter's tensors with a slot axis, and views of each slot's slice at its own shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The storage of one tensor of all slots' adapters.

    Attributes:
        shape: A slot's slice in the storage, which is at least as large as any slot's own tensor.
        axis: Position of the slot axis in the storage.
        swapped: Whether a slot's slice is stored with its last two axes exchanged.
        decays: Whether weight decay applies.
        fill: Initial value of the storage.
    """

    shape: tuple[int, ...]
    axis: int = 0
    swapped: bool = False
    decays: bool = True
    fill: float = 0.0

    def allocate(self, slots: int, dtype: torch.dtype, device: torch.device, *, trains: bool) -> Tensor:
        """Returns the storage for this number of slots, which requires a gradient if it `trains`."""
        full = list(self.shape)
        if self.swapped:
            full[-1], full[-2] = full[-2], full[-1]
        full.insert(self.axis, slots)
        return torch.full(full, self.fill, dtype=dtype, device=device, requires_grad=trains)


@dataclass(frozen=True)
class SlotTensor:
    """One tensor of all slots' adapters, trained or frozen.

    A slot with a lower rank than the storage uses the first ranks. The rest stays zero, because a zero column of B
    gives the corresponding row of A no gradient, and vice versa.

    Attributes:
        name: Its name, as `adapter_shapes` gives it.
        stored: The tensor, which requires a gradient if it is trained; its slot axis is `axis`.
        axis: Position of the slot axis in `stored`.
        swapped: Whether a slot's slice is stored with its last two axes exchanged.
        shapes: Each slot's own shape; None for a slot that does not have this tensor.
        decays: Whether weight decay applies to it.
    """

    name: str
    stored: Tensor
    axis: int
    swapped: bool
    shapes: tuple[tuple[int, ...] | None, ...]
    decays: bool = True

    def view(self, slot: int) -> Tensor:
        """Returns a slot's slice, at the storage's rank, as a view."""
        whole = self.stored.detach().select(self.axis, slot)
        return whole.transpose(-1, -2) if self.swapped else whole

    def own(self, slot: int, of: Tensor | None = None) -> Tensor:
        """Returns a slot's slice at its own shape, as a view of the storage (or of `of`, like it)."""
        shape = self.shapes[slot]
        assert shape is not None, f"slot {slot} has no {self.name}"
        whole = self.view(slot) if of is None else of.select(self.axis, slot)
        whole = whole.transpose(-1, -2) if of is not None and self.swapped else whole
        return whole[tuple(slice(0, size) for size in shape)]

    def write(self, slot: int, value: Tensor) -> None:
        """Sets a slot's slice; ranks beyond its own become zero."""
        self.view(slot).zero_()
        self.own(slot).copy_(value)

    def slot_factor(self, values: Tensor) -> Tensor:
        shape = [1] * self.stored.dim()
        shape[self.axis] = values.shape[0]
        return values.view(shape)


def padded_rank(rank: int, dtype: torch.dtype) -> int:
    """Returns the storage's rank: grouped products need rows of a multiple of 16 bytes."""
    step = max(1, 16 // torch.empty(0, dtype=dtype).element_size())
    return -(-rank // step) * step
