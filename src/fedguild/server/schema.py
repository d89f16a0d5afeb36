"""Schema of an upload: which names it has, of which shapes, within which limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from fedguild.core.payload import Payload, Scalar

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Bound:
    """Limits of values that a client computes about itself: no honest client's exceed them, whatever its data.

    Values with a bound may differ between honest clients as much as their data do, so that their norms are not compared
    (`fedguild.server.guard`).

    Attributes:
        largest: Largest magnitude; None for the limit that holds for everything else, too.
        total: For shares: no value is negative, and the sum over the last axis is at most this; None for other values.
    """

    largest: float | None = None
    total: float | None = None


@dataclass(frozen=True)
class Entry:
    """A tensor of an upload.

    Attributes:
        shape: Its shape.
        bound: Limits of its own, for a statistic of a client; None for trained values. Those that real clients upload
            are at most `guard.LARGEST_VALUE`, and their norms are compared with the other clients'.
        omissible: Whether an upload may lack it, as that of an expert that was never activated.
    """

    shape: Shape
    bound: Bound | None = None
    omissible: bool = False


@dataclass(frozen=True)
class Schema:
    """What an upload has: exactly these tensors, save the omissible ones, and at least these scalars.

    Attributes:
        tensors: By name.
        scalars: Name -> a value that follows from the download, or the type of one that a client chooses without
            looking at its data.
    """

    tensors: Mapping[str, Entry]
    scalars: Mapping[str, Scalar | type[Scalar]] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def needed(self) -> Schema:
        """The schema without what may be omitted."""
        return Schema({name: tensor for name, tensor in self.tensors.items() if not tensor.omissible}, self.scalars)

    def example(self, dtype: torch.dtype = torch.float32) -> Payload:
        """Returns an upload that has shapes, but no values."""
        tensors = {name: without_values(tensor.shape, dtype) for name, tensor in self.tensors.items()}
        scalars = {name: value() if isinstance(value, type) else value for name, value in self.scalars.items()}
        return Payload(tensors, scalars)

    def of_parts(self, parts: Collection[str]) -> Schema:
        """Returns the tensors of some parts."""
        return Schema({name: tensor for name, tensor in self.tensors.items() if name.partition("/")[0] in parts})


@cache
def without_values(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Returns a tensor on the device `meta`."""
    return torch.empty(shape, dtype=dtype, device="meta")


def entries(
    part: str, shapes: Mapping[str, Shape], bound: Bound | None = None, *, omissible: bool = False
) -> dict[str, Entry]:
    """Returns the entries of a payload's part, by the names within it."""
    return {f"{part}/{name}": Entry(tuple(shape), bound, omissible) for name, shape in shapes.items()}
