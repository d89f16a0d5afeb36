"""The form of a sum: a method's weighted means, their weights, and the part of them that a client holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedguild.core.errors import ConfigError

Floats = NDArray[np.float64]
Bits = NDArray[np.bool_]


@dataclass(frozen=True)
class LinearMean:
    """A tensor of which the server takes sum_i(w_i x_i) / sum_i(w_i) over clients i.

    Attributes:
        shape: The shape of x in the server's state; a client with less of it pads with zeros.
        weight: Name of its weights.
        weight_axis: The axis of x along which the weights lie; None for one weight.
        held: Name of the groups of clients that hold parts of x, if not every client holds all; empty otherwise.
        held_axis: The axis of x along which these parts lie.
        range: Name of the range, the sum of the clients' largest magnitudes, that it shares with other means; by
            default its own name. A mean to which a single client may contribute shares that of means to which all do,
            because a range over one client is its magnitude.
    """

    shape: tuple[int, ...]
    weight: str
    weight_axis: int | None = None
    held: str = ""
    held_axis: int = 0
    range: str = ""

    @property
    def size(self) -> int:
        return prod(self.shape)

    def along(self, axis: int | None, values: NDArray[Any]) -> NDArray[Any]:
        """Returns [n] values along an axis of x (or [1] for none), with x's number of dimensions."""
        if axis is None:
            return values.reshape([1] * len(self.shape))
        shape = [1] * len(self.shape)
        shape[axis % len(self.shape)] = -1
        return values.reshape(shape)

    def spread(self, axis: int | None, values: NDArray[Any]) -> NDArray[Any]:
        """Returns [size], the entry along an axis that belongs to each value of x."""
        return np.broadcast_to(self.along(axis, values), self.shape).reshape(-1)


@dataclass(frozen=True)
class Form:
    """Everything that one round of a method sums.

    Attributes:
        means: Name -> mean.
        weights: Name -> number of weights under it; one that no mean uses is summed for its own sake.
        disclosed: Parts of an upload that the server needs from each client, and receives unmasked.
    """

    means: Mapping[str, LinearMean]
    weights: Mapping[str, int]
    disclosed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, mean in self.means.items():
            length = 1 if mean.weight_axis is None else mean.shape[mean.weight_axis]
            if self.weights.get(mean.weight) != length:
                raise ValueError(f"'{name}' needs {length} weight(s) under '{mean.weight}'.")

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.means))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        return tuple(sorted(self.weights))

    @cached_property
    def places(self) -> dict[str, slice]:
        ends = np.cumsum([0, *(self.weights[key] for key in self.keys)]).tolist()
        return {key: slice(start, end) for key, start, end in zip(self.keys, ends, ends[1:], strict=False)}

    @cached_property
    def slices(self) -> dict[str, slice]:
        ends = np.cumsum([0, *(self.means[name].size for name in self.names)]).tolist()
        return {name: slice(start, end) for name, start, end in zip(self.names, ends, ends[1:], strict=False)}

    @cached_property
    def ranges(self) -> tuple[str, ...]:
        return tuple(sorted({self.means[name].range or name for name in self.names}))

    @cached_property
    def range_places(self) -> NDArray[np.intp]:
        """[means] the place of each mean's range among all ranges."""
        places = {name: place for place, name in enumerate(self.ranges)}
        return np.array([places[self.means[name].range or name] for name in self.names], dtype=np.intp)

    @property
    def word_count(self) -> int:
        """Number of words of a client's first half: three for each weight and one for each range."""
        return 3 * self.weight_count + len(self.ranges)

    @property
    def weight_count(self) -> int:
        return sum(self.weights.values())

    @property
    def value_count(self) -> int:
        return sum(mean.size for mean in self.means.values())

    @cached_property
    def groups(self) -> dict[str, int]:
        return {mean.held: mean.shape[mean.held_axis] for name in self.names if (mean := self.means[name]).held}

    @cached_property
    def group_places(self) -> dict[str, slice]:
        """Name of groups -> their places among all groups; place 0 is the group of all clients."""
        ends = np.cumsum([1, *(self.groups[key] for key in sorted(self.groups))]).tolist()
        return {key: slice(start, end) for key, start, end in zip(sorted(self.groups), ends, ends[1:], strict=False)}

    @property
    def is_unequal(self) -> bool:
        """Whether clients may differ in what they hold or have a weight for, so that each has to know it of all."""
        return bool(self.groups) or any(mean.weight_axis is not None or mean.range for mean in self.means.values())

    @property
    def group_count(self) -> int:
        """Number of all groups, that of all clients included."""
        return 1 + sum(self.groups.values())

    def holdings(self, held: Mapping[str, Bits]) -> Bits:
        """Returns [groups], whether a client is in each, from name of groups -> [n] whether it holds each part.

        A client holds all groups of a name that `held` lacks.
        """
        everything = np.ones(self.group_count, dtype=np.bool_)
        for key, bits in held.items():
            everything[self.group_places[key]] = bits
        return everything

    def covered(self, groups: Bits) -> Bits | None:
        """Returns [values], which ones lie in some groups; None for all of them."""
        if bool(groups.all()):
            return None
        covered = np.ones(self.value_count, dtype=np.bool_)
        for name, place in self.slices.items():
            mean = self.means[name]
            if mean.held:
                covered[place] = mean.spread(mean.held_axis, groups[self.group_places[mean.held]])
        return covered

    def by_value(self, weights: NDArray[np.uint8], groups: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns [values], the smaller of the numbers of its weight and its group, from [weights] and [groups]."""
        found = np.empty(self.value_count, np.uint8)
        for name, place in self.slices.items():
            mean = self.means[name]
            found[place] = mean.spread(mean.weight_axis, weights[self.places[mean.weight]])
            if mean.held:
                held = mean.spread(mean.held_axis, groups[self.group_places[mean.held]])
                found[place] = np.minimum(found[place], held)
        return found

    def digest(self) -> str:
        """Returns 64 hexadecimal digits that are equal for equal forms."""
        named = {
            "means": {name: asdict(self.means[name]) for name in self.names},
            "weights": dict(sorted(self.weights.items())),
            "disclosed": list(self.disclosed),
        }
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Contribution:
    """One client's numbers, in the server's form.

    Attributes:
        values: Name -> x, of the means that the client contributes to.
        weights: Name -> [n] weights, not negative; missing names have weight 0.
        held: Name of groups -> [n] whether it holds each part; it holds all under missing names.
    """

    values: Mapping[str, NDArray[np.floating]]
    weights: Mapping[str, Floats]
    held: Mapping[str, Bits] = field(default_factory=dict)


def require_disclosure(form: Form, allowed: Sequence[str], method: str) -> None:
    """Raises unless the config allows what a method's server needs from each client unmasked.

    Raises:
        ConfigError: it does not.
    """
    missing = [part for part in form.disclosed if part not in allowed]
    if missing:
        raise ConfigError(
            f"federation.secure: the server of {method} needs {', '.join(missing)} of every single client.",
            f"Set federation.secure_disclose=[{', '.join(form.disclosed)}] to send this in the clear, or another "
            "method.",
        )
