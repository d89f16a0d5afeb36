"""Linear sums of methods: declaring them, a client's terms in them, and the means that come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.payload import Payload, with_part
from fedguild.secure.fixed_point import Means
from fedguild.secure.form import Bits, Floats, LinearMean
from fedguild.server.aggregation import rank_axis

EXAMPLES = "examples"
"""The weight n_i of a client, its number of examples."""
CLIENTS = "clients"
"""The weight of a client where all that have an example weigh the same."""
"""The name of weights by size or uniform: one weight for each client."""
RANK = "rank"
"""The name of weights by rank, and of the groups of clients that hold a rank."""


@dataclass(frozen=True)
class Contributor:
    """A client whose numbers are in the means.

    Attributes:
        client: Who it is.
        held: Name of groups -> [n] bool, the parts that it holds, as it said.
        disclosed: What it sent in the clear.
    """

    client: ClientInfo
    held: Mapping[str, Tensor] = field(default_factory=dict)
    disclosed: Payload = field(default_factory=Payload)


@dataclass(frozen=True)
class SecureMeans:
    """The means of a round over its clients, whose single numbers nobody knows.

    Attributes:
        round: The round.
        found: The means.
        contributors: The clients whose numbers are in them, in client order.
    """

    round: int
    found: Means
    contributors: Sequence[Contributor]

    def result(self, part: str, fallback: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the fp32 mean of every name in `fallback`, and the fallback's values where there is no mean.

        Args:
            part: The part of the form's names, `part/name`.
            fallback: Name -> tensor.
        """
        return {name: self._filled(f"{part}/{name}", kept.to(torch.float32)) for name, kept in fallback.items()}

    def moved(self, part: str, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what was sent to the clients, moved by the mean of their changes (`changes_of`), in fp32.

        What no client has changed is the same bit for bit.

        Args:
            part: The part of the form's names.
            before: Name -> tensor, of which every client received all or a part.
        """
        zeros = {name: torch.zeros(kept.shape) for name, kept in before.items()}
        changes = {name: self._filled(f"{part}/{name}", zero.double()) for name, zero in zeros.items()}
        return {name: (kept.double() + changes[name]).to(torch.float32) for name, kept in before.items()}

    def zeros(self, part: str) -> dict[str, Tensor]:
        """Returns zeros in the shapes of a part's tensors, of those in which there is a mean anywhere."""
        shapes = {name.removeprefix(f"{part}/"): value.shape for name, value in self.found.values.items()}
        return {name: torch.zeros(shape) for name, shape in shapes.items() if self.has(f"{part}/{name}")}

    def has(self, name: str) -> bool:
        """Whether there is a mean anywhere in a tensor."""
        return name in self.found.known and bool(self.found.known[name].any())

    def weight(self, key: str) -> Tensor:
        """Returns [n] fp64, the sums of the weights under a name over all clients that sent weights."""
        return torch.from_numpy(np.array(self.found.weights[key]))

    def _filled(self, name: str, kept: Tensor) -> Tensor:
        if name not in self.found.values:
            return kept.clone()
        known = torch.from_numpy(np.array(self.found.known[name]))
        value = torch.from_numpy(np.array(self.found.values[name])).to(kept.dtype)
        return torch.where(known, value, kept)


def means_of(
    part: str,
    shapes: Mapping[str, tuple[int, ...]],
    weight: str = EXAMPLES,
    axis: int | None = None,
    *,
    pooled: str = "",
) -> dict[str, LinearMean]:
    """Returns the means of one part, all with one weight for each client, or one along an axis.

    Args:
        part: The part of the names.
        shapes: Name -> shape.
        weight: The name of the weight or weights.
        axis: The axis along which the weights lie; None for one weight.
        pooled: The part whose ranges they share, of means of few clients: those of a name in it share one.
    """
    return {
        f"{part}/{name}": LinearMean(tuple(shape), weight, axis, range=f"{pooled}/{name}" if pooled else "")
        for name, shape in shapes.items()
    }


def means_by_expert(
    part: str, shapes: Mapping[str, tuple[int, ...]], experts: Mapping[str, int], otherwise: str = EXAMPLES
) -> dict[str, LinearMean]:
    """Returns the means of trainables of which a layer's experts have weights of their own (`weights_by_name`).

    Args:
        part: The part of the names.
        shapes: Name -> shape.
        experts: Path of a layer's experts, the name of their weights -> M.
        otherwise: The name of the weight of all other trainables.
    """
    means: dict[str, LinearMean] = {}
    for name, shape in shapes.items():
        path = name.rsplit(".", 2)[0]
        means |= means_of(part, {name: shape}, *((path, 0) if path in experts else (otherwise, None)))
    return means


def weights_by_expert(means: Mapping[str, LinearMean]) -> dict[str, int]:
    """Returns name -> number of the weights along an axis that means have; sums that no mean needs stay closed."""
    return {mean.weight: mean.shape[mean.weight_axis] for mean in means.values() if mean.weight_axis is not None}


def used_by_expert(values: Mapping[str, NDArray[np.floating]], weights: Mapping[str, Tensor]) -> dict[str, Floats]:
    """Returns the weights of those layers' experts that a client's values have, as `weights_by_expert` of the form."""
    used = {name.partition("/")[2].rsplit(".", 2)[0] for name in values}
    return {experts: weight.double().numpy() for experts, weight in weights.items() if experts in used}


def means_by_rank(
    part: str, shapes: Mapping[str, tuple[int, ...]], weight: str = RANK, otherwise: str = EXAMPLES
) -> dict[str, LinearMean]:
    """Returns the means of LoRA of unequal ranks: each client holds the first ones (`held_ranks`).

    Args:
        part: The part of the names.
        shapes: Name -> shape at the full rank.
        weight: `RANK` averages a rank over its holders; the name of one weight for each client averages over all
            clients, of which those without the rank have zeros.
        otherwise: With `RANK`, the name of the weight of what has no rank.
    """
    means: dict[str, LinearMean] = {}
    for name, shape in shapes.items():
        axis = rank_axis(name)
        if axis is None:
            means |= means_of(part, {name: shape}, otherwise if weight == RANK else weight)
            continue
        place = axis % len(shape)
        means[f"{part}/{name}"] = LinearMean(tuple(shape), weight, place if weight == RANK else None, RANK, place)
    return means


def held_ranks(own: int, full: int) -> Bits:
    """Returns [full] whether a client of rank `own` holds each rank."""
    return np.arange(full) < own


def values_of(part: str, tensors: Mapping[str, Tensor]) -> dict[str, NDArray[np.floating]]:
    """Returns a part's tensors as a client's values."""
    return {name: numpy_of(value) for name, value in with_part(part, tensors).items()}


def changes_of(
    part: str, tensors: Mapping[str, Tensor], received: Mapping[str, Tensor]
) -> dict[str, NDArray[np.floating]]:
    """Returns a part's changes from what the client received, in fp64, as its values.

    Args:
        part: The part of the names.
        tensors: Name -> tensor as trained.
        received: Name -> tensor of the same shape, for every name of `tensors`.
    """
    return {
        name: numpy_of(value.double() - received[key].double())
        for (key, value), name in zip(tensors.items(), with_part(part, tensors), strict=True)
    }


def numpy_of(tensor: Tensor) -> NDArray[np.floating]:
    """Returns a tensor's values as an array of fp32, or of fp64 where it is that."""
    kept = tensor.detach().to("cpu")
    array: NDArray[np.floating] = (kept if kept.dtype == torch.float64 else kept.to(torch.float32)).numpy()
    return array


def one(weight: float) -> Floats:
    """Returns one weight for all of a client."""
    return np.array([float(weight)])
