"""A device without values (`meta`) that counts, as of a GPU, what the host waits for and how it is copied to.

Unlike plain `meta`, it answers where the host asks for a value, with zeros, so that what a method does before and after
its steps can run too.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

ATEN = torch.ops.aten
CREATED_ON_THE_DEVICE = (torch.tensor, torch.as_tensor)


@dataclass
class Found:
    """What was counted.

    Attributes:
        waits: Where the host waits until the device has done all that is queued: it reads a value, or a shape depends
            on values.
        blocking: Where numbers are copied to the device in such a way that the host waits, too.
        copies: Number of copies to the device.
        operations: Number of all operations.
        casts: The shapes of what is cast to bf16.
    """

    waits: list[str] = field(default_factory=list)
    blocking: list[str] = field(default_factory=list)
    copies: int = 0
    operations: int = 0
    casts: list[torch.Size] = field(default_factory=list)


class Device(TorchDispatchMode):
    """Counts what the host waits for on `meta`, copies to it, and the operations.

    Attributes:
        found: Where they are counted; None to count nothing.
    """

    def __init__(self, found: Found | None = None) -> None:
        super().__init__()
        self.found = found

    @contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
        """Counts inside the block; `torch.tensor(…, device=…)`, which no dispatch mode sees, is a blocking copy."""
        with monkeypatch.context() as patch:
            for function in CREATED_ON_THE_DEVICE:
                patch.setattr(torch, function.__name__, self._created(function))
            with self:
                yield self

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.found is not None:
            self.found.operations += 1
        if function is ATEN._local_scalar_dense.default and is_there(args[0]):
            self._wait()
            return torch.zeros((), dtype=args[0].dtype).item()
        if function is ATEN._to_copy.default and is_there(args[0]) and str(kwargs.get("device", "meta")) == "cpu":
            self._wait()
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if function is ATEN.nonzero.default and is_there(args[0]):
            self._wait()
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device="meta")
        if function in (ATEN._to_copy.default, ATEN.copy_.default):
            return self._copied(function, args, kwargs)
        if function in (ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default) and is_there(args[0]):
            args = (args[0], [self._place(place, args[0]) for place in args[1]], *args[2:])
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        hosts = [value for value in tensors if not is_there(value) and value.dim()]
        assert not hosts or not any(map(is_there, tensors)), f"{function} takes a tensor of the host"
        return function(*args, **kwargs)

    def _copied(self, function: Any, args: Any, kwargs: Any) -> Any:
        source, goal = (args[0], None) if function is ATEN._to_copy.default else (args[1], args[0])
        if goal is not None and not is_there(goal) and is_there(source):
            self._wait()
            return goal.zero_()
        out = function(*args, **kwargs)
        if self.found is not None and out.dtype is torch.bfloat16 is not source.dtype:
            self.found.casts.append(out.shape)
        if is_there(out) and not is_there(source):
            if self.found is not None:
                self.found.copies += 1
            if not (kwargs.get("non_blocking") or (goal is not None and len(args) > 2 and args[2])):
                self._block()
        return out

    def _place(self, place: Tensor | None, of: Tensor) -> Tensor | None:
        """Returns an index of numbers for one of bools, whose number of ones the host has to know."""
        if place is None or place.dtype not in (torch.bool, torch.uint8):
            if place is not None and not is_there(place):
                self._block()
            return None if place is None else place.to("meta", non_blocking=True)
        self._wait()
        return torch.zeros(place.numel(), dtype=torch.int64, device="meta")

    def _wait(self) -> None:
        if self.found is not None:
            self.found.waits.append(caller())

    def _block(self) -> None:
        if self.found is not None:
            self.found.blocking.append(caller())

    def _created(self, function: Any) -> Any:
        def create(values: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            out: Tensor = function(values, *args, device=device, **kwargs)
            if is_there(out) and out is not values:
                self._block()
            return out

        return create


def is_there(tensor: Tensor) -> bool:
    """Whether a tensor is on the device."""
    return tensor.device.type == "meta"


def caller() -> str:
    """Returns the lines of the package, the innermost last, that led here."""
    frames = [frame for frame in traceback.extract_stack() if "/fedguild/" in frame.filename]
    return " > ".join(f"{frame.filename.rpartition('/fedguild/')[2]}:{frame.lineno}" for frame in frames[-4:])
