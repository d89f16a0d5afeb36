"""Numbers copied from the host to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def on_device(values: object, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers as a tensor on a device without waiting.

    `torch.tensor(values, device=device)` would wait until the device has done all that is queued.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def kept_on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns integers as an int64 tensor on a device, copied at the first call. Do not write to it."""
    return on_device(values, device, torch.int64)


def slot_of_rows(rows_per_slot: Sequence[int], device: torch.device) -> Tensor:
    """Returns [R] on a device, the slot of each row of a batch."""
    slots = torch.arange(len(rows_per_slot)).repeat_interleave(torch.tensor(rows_per_slot))
    return slots.to(device, non_blocking=True)
