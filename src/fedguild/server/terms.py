"""Means of a round, each said once: what a client adds to which mean, and what comes of it, in the clear or secure.

A plain round keeps a running mean of each tensor (`RunningMeans`) and moves to it. In a secure round every client turns
its terms into numbers of a common form (`contribution`, `form_of`), only their sums are opened (`OpenedMeans`), and the
state moves by the mean of the clients' changes. Both give the same means up to rounding, from the same terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.model.targets import layer_of
from fedguild.privacy.secure_sum.form import Contribution, Floats, Form, LinearMean
from fedguild.server.aggregation import Weight, WeightedMean, pad_rank, rank_axis

if TYPE_CHECKING:
    from fedguild.privacy.secure_sum.fixed_point import Means as Opened

EXAMPLES = "examples"
"""The weight n_i of a client, its number of examples."""
CLIENTS = "clients"
"""The weight of a client where all that have an example weigh the same."""
RANK = "rank"
"""The name of weights by rank, and of the groups of clients that hold a rank."""
NORM = "weight"
"""The name of a weight of the client's own, which the server does not know."""

Weighting = Literal["size", "uniform"]


@dataclass(frozen=True)
class Upload:
    """A client's upload as it reached the server.

    Attributes:
        round: The round whose download it answers; that before the current one for a late upload.
        client: The client.
        payload: What it sent.
        download: What it had received.
    """

    round: int
    client: ClientInfo
    payload: Payload
    download: Payload = field(default_factory=Payload)


@dataclass(frozen=True)
class Term:
    """What one client adds to the mean of one tensor.

    Attributes:
        value: x, in the shape of the state's tensor.
        weight: w >= 0: a number, or a tensor whose dimensions are the leading ones of x; with `axis`, [n] along it.
        key: The name of the weight or weights.
        axis: The axis of x along which the weights lie; None for one weight.
        received: What the client received of x, from which a secure round takes its change; None: x counts as a whole.
        is_change: Whether a secure round sums changes.
        groups: The name of the groups of clients that hold parts of x; empty where everybody holds all.
        held: [n] bool, the parts along `along` that this client holds.
        along: The axis of x along which the parts lie.
        pooled: The name of the range that this mean shares with others, where it may be that of one client.
    """

    value: Tensor
    weight: Weight
    key: str
    axis: int | None = None
    received: Tensor | None = None
    is_change: bool = True
    groups: str = ""
    held: Tensor | None = None
    along: int = 0
    pooled: str = ""

    @property
    def is_padded(self) -> bool:
        """Whether parts that the client does not hold are zeros in the mean, because weights do not tell them apart."""
        return bool(self.groups) and self.axis is None

    def spread(self, values: Tensor, axis: int) -> Tensor:
        """Returns [n] values along an axis of x, with x's number of dimensions."""
        shape = [1] * self.value.dim()
        shape[axis] = -1
        return values.reshape(shape)

    @property
    def broadcast(self) -> Weight:
        """The weight as `WeightedMean.add` takes it."""
        if self.axis is None or self.axis == 0:
            return self.weight
        assert isinstance(self.weight, Tensor)
        return self.spread(self.weight, self.axis)

    @property
    def weights(self) -> Tensor:
        """What each value of x weighs, in a shape that broadcasts to x's; 0 where the client does not hold it."""
        weight = torch.as_tensor(self.broadcast)
        weight = weight.reshape([*weight.shape, *[1] * (self.value.dim() - weight.dim())])
        return weight if self.held is None else weight * self.spread(self.held, self.along)


@dataclass(frozen=True)
class Terms:
    """What one client adds to the means of a round.

    Attributes:
        means: Whole name -> term.
        totals: Name -> number or [n] numbers that are summed over the clients as they are; a client's own weight is
            always among them.
        disclose: Parts of the upload that the server needs from each client by itself; a secure round sends them in the
            clear.
        secure: Whether sums of these terms may be opened.
        why: Why not, a clause without a subject.
    """

    means: Mapping[str, Term] = field(default_factory=dict)
    totals: Mapping[str, float | Tensor] = field(default_factory=dict)
    disclose: tuple[str, ...] = ()
    secure: bool = True
    why: str = ""

    def __or__(self, other: Terms) -> Terms:
        return Terms(
            {**self.means, **other.means},
            {**self.totals, **other.totals},
            (*self.disclose, *other.disclose),
            self.secure and other.secure,
            self.why or other.why,
        )


# The words in which a method says its terms


def mean(
    part: str,
    sent: Upload,
    weights: Weighting = "size",
    *,
    tensors: Mapping[str, Tensor] | None = None,
    is_change: bool = True,
) -> Terms:
    """Returns the terms of sum_c w_c x_c / sum_c w_c, with one weight for each client.

    Args:
        part: The part of the upload, and of the state.
        sent: The client, its download and its upload.
        weights: w_c, the client's number of examples, or 1 for a client that has any.
        tensors: In place of the upload's part.
        is_change: Whether a secure round sums changes from the download, for tensors that the state holds.
    """
    key, weight = weight_of(sent.client, weights)
    values = sent.payload.part(part) if tensors is None else tensors
    received = sent.download.part(part) if is_change else {}
    terms = {
        f"{part}/{name}": Term(value, weight, key, received=received[name] if received else None, is_change=is_change)
        for name, value in values.items()
    }
    return Terms(terms, {key: weight})


def mean_by_expert(part: str, sent: Upload, experts: Mapping[str, Tensor]) -> Terms:
    """Returns the terms of means in which each of a layer's experts has a weight of its own (FLAME Eq. 7).

    Args:
        part: The part of the upload, and of the state.
        sent: The client, its download and its upload.
        experts: Path of a layer's experts -> [M] their weights; all other tensors are weighed by the client's examples.
    """
    key, weight = weight_of(sent.client, "size")
    received, terms = sent.download.part(part), {}
    for name, value in sent.payload.part(part).items():
        path = layer_of(name)
        before = received[name] if received else None
        if path in experts:
            terms[f"{part}/{name}"] = Term(value, experts[path], path, 0, before)
        else:
            terms[f"{part}/{name}"] = Term(value, weight, key, received=before)
    return Terms(terms, {key: weight})


def mean_by_rank(part: str, sent: Upload, rank: int, weights: Weighting = "size") -> Terms:
    """Returns the terms of means of LoRA of unequal ranks: each rank is averaged over the clients that hold it.

    Args:
        part: The part of the upload, and of the state.
        sent: The client, its download and its upload.
        rank: The highest rank of all clients, to which the tensors are padded.
        weights: As in `mean`.
    """
    key, weight = weight_of(sent.client, weights)
    padded = pad_rank(sent.payload.part(part), rank)
    before = pad_rank(sent.download.part(part), rank)
    held = _held(sent.payload.part(part), rank)
    terms = {}
    for name, value in padded.items():
        received, axis = before[name] if before else None, rank_axis(name)
        if axis is None:
            terms[f"{part}/{name}"] = Term(value, weight, key, received=received)
        else:
            place = axis % value.dim()
            terms[f"{part}/{name}"] = Term(
                value, weight * held.double(), RANK, place, received, True, RANK, held, place
            )
    return Terms(terms, {key: weight})


def mean_of_padded(
    part: str, sent: Upload, adapter: Mapping[str, Tensor], rank: int, weight: Weight | Mapping[str, Weight]
) -> Terms:
    """Returns the terms of means of LoRA of unequal ranks, padded with zeros that count (HetLoRA).

    A rank whose holders have no weight keeps its value.

    Args:
        part: The part of the state.
        sent: The client.
        adapter: Its tensors at its rank.
        rank: The highest rank of all clients.
        weight: One number, or one for each tensor or each expert of it, by name.
    """
    held, terms = _held(adapter, rank), {}
    for name, value in pad_rank(adapter, rank).items():
        axis, own = rank_axis(name), weight[name] if isinstance(weight, Mapping) else weight
        assert axis is not None, f"{name} has no rank"
        terms[f"{part}/{name}"] = Term(
            value, own, NORM, is_change=False, groups=RANK, held=held, along=axis % value.dim()
        )
    total = {} if isinstance(weight, Mapping) else {NORM: weight}
    return Terms(terms, total)


def mean_of_budget(
    part: str, sent: Upload, tensors: Mapping[str, Tensor] | None = None, weights: Weighting = "uniform"
) -> Terms:
    """Returns the terms of means over the clients of each budget, under `budget/NAME/PART/…` in the state.

    Args:
        part: The part of the upload, and of the state.
        sent: The client and its upload.
        tensors: In place of the upload's part.
        weights: As in `mean`.
    """
    _, weight = weight_of(sent.client, weights)
    key = f"budget/{sent.client.budget.name}/{part}"
    values = sent.payload.part(part) if tensors is None else tensors
    return Terms(
        {
            f"{key}/{name}": Term(value, weight, key, is_change=False, pooled=f"{part}/{name}")
            for name, value in values.items()
        }
    )


def weight_of(client: ClientInfo, weights: Weighting) -> tuple[str, float]:
    """Returns the name of a client's weight in an average, and the weight: 0 for a client without examples.

    Raises:
        ConfigError: there is no such weighting.
    """
    if weights == "size":
        return EXAMPLES, float(client.examples)
    if weights != "uniform":
        raise ConfigError(f"Clients cannot be weighed by {weights!r}.", "Known: size, uniform.")
    return CLIENTS, float(client.examples > 0)


def _held(adapter: Mapping[str, Tensor], rank: int) -> Tensor:
    """Returns [rank] bool, the ranks that an adapter has."""
    own = next((value.shape[axis] for name, value in adapter.items() if (axis := rank_axis(name)) is not None), rank)
    return torch.arange(rank) < own


# What comes of the terms


@dataclass(frozen=True)
class Contributor:
    """A client whose numbers are in the means.

    Attributes:
        client: Who it is.
        round: The round that it answered.
        held: Name of groups -> [n] bool, the parts that it holds, as it said.
        disclosed: The parts of its upload that the method needs by itself (`Terms.disclose`).
    """

    client: ClientInfo
    round: int
    held: Mapping[str, Tensor] = field(default_factory=dict)
    disclosed: Payload = field(default_factory=Payload)


class Means(ABC):
    """The means of a round over its clients.

    Attributes:
        contributors: The clients whose numbers are in them, in client order, then those of late uploads.
    """

    contributors: Sequence[Contributor]

    @property
    @abstractmethod
    def names(self) -> Iterable[str]:
        """The whole names of the means."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a mean anywhere in a tensor, by its whole name."""

    @abstractmethod
    def total(self, key: str) -> Tensor:
        """Returns [n] fp64, the sums of the numbers under a name over all clients."""

    @abstractmethod
    def _moved(self, name: str, before: Tensor) -> Tensor: ...

    @abstractmethod
    def _zeros(self, name: str) -> Tensor: ...

    def moved(self, part: str, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a part of the state in fp32, moved to its mean; values without a mean stay as they are.

        Args:
            part: The part.
            before: Name -> tensor of the state before the round. Empty where the state has none yet: the means of the
                part that there are.
        """
        before = before or {name: self._zeros(f"{part}/{name}") for name in self._found(part)}
        return {name: self._moved(f"{part}/{name}", value.to(torch.float32)) for name, value in before.items()}

    def _found(self, part: str) -> list[str]:
        whole = (name for name in self.names if name.startswith(f"{part}/") and self.has(name))
        return [name.partition("/")[2] for name in whole]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the state of which there are means."""
        return tuple(dict.fromkeys(name.partition("/")[0] for name in self.names))


class RunningMeans(Means):
    """The means of a plain round; holds one tensor for each name, whatever the number of clients."""

    def __init__(self) -> None:
        self.contributors: list[Contributor] = []
        self._mean = WeightedMean()
        self._held: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}

    def add(self, sent: Upload, terms: Terms) -> None:
        """Adds a client's terms.

        Raises:
            UploadError: a weight is negative, NaN or infinite.
        """
        held: dict[str, Tensor] = {}
        for name, term in terms.means.items():
            self._mean.add({name: term.value}, term.broadcast)
            if term.held is not None:
                held[term.groups] = term.held
            if term.is_padded and term.held is not None:
                weight = torch.as_tensor(term.weight, dtype=torch.float64)
                weight = weight.reshape(*weight.shape, *[1] * (term.value.dim() - weight.dim()))
                present = weight * term.spread(term.held, term.along)
                self._held[name] = self._held.get(name, torch.zeros(())) + present
        for key, number in terms.totals.items():
            numbers = torch.as_tensor(number, dtype=torch.float64).reshape(-1)
            self._totals[key] = self._totals.get(key, torch.zeros(())) + numbers
        parts = {part: {n: x.clone() for n, x in sent.payload.part(part).items()} for part in terms.disclose}
        self.contributors.append(Contributor(sent.client, sent.round, held, Payload.of(parts)))

    @property
    def names(self) -> Iterable[str]:
        """The names added so far."""
        return self._mean.names

    def has(self, name: str) -> bool:
        """Whether its total weight is positive anywhere."""
        return self._mean.has(name)

    def total(self, key: str) -> Tensor:
        """The running sum."""
        return self._totals[key]

    def _zeros(self, name: str) -> Tensor:
        return self._mean.zeros(name)

    def _moved(self, name: str, before: Tensor) -> Tensor:
        found = self._mean.of(name, before)
        return torch.where(self._held[name] > 0, found, before) if name in self._held else found


class OpenedMeans(Means):
    """The means of a secure round over its clients, whose single numbers nobody knows.

    Args:
        found: What was opened.
        form: The form of the method's sums.
        changes: The whole names of means of changes.
        contributors: The clients whose numbers are in them.
    """

    def __init__(self, found: Opened, form: Form, changes: Iterable[str], contributors: Sequence[Contributor]) -> None:
        self.contributors = contributors
        self._found_means, self._form, self._changes = found, form, frozenset(changes)

    @property
    def names(self) -> Iterable[str]:
        """The names of the form."""
        return self._form.means

    def has(self, name: str) -> bool:
        """Whether any of it was opened."""
        return name in self._found_means.known and bool(self._found_means.known[name].any())

    def total(self, key: str) -> Tensor:
        """The opened sum."""
        return torch.from_numpy(np.array(self._found_means.weights[key]))

    def _zeros(self, name: str) -> Tensor:
        return torch.zeros(self._found_means.values[name].shape)

    def _moved(self, name: str, before: Tensor) -> Tensor:
        if name not in self._found_means.values:
            return before.clone()
        mean = self._form.means[name]
        known = torch.from_numpy(np.array(self._found_means.known[name]))
        if mean.held and mean.weight_axis is None:
            held = self._found_means.weights[mean.held] > 0
            known = known & torch.from_numpy(mean.along(mean.held_axis, np.array(held)).copy())
        value = torch.from_numpy(np.array(self._found_means.values[name]))
        if name not in self._changes:
            return torch.where(known, value.to(torch.float32), before)
        change = torch.where(known, value.double(), torch.zeros(()).double())
        return (before.double() + change).to(torch.float32)


# Secure sums of the terms


def form_of(terms: Iterable[Terms]) -> tuple[Form, frozenset[str]]:
    """Returns the form of sums to which clients add these terms, and the names of those of changes.

    Args:
        terms: The terms of one client of each budget, whose values do not matter.
    """
    means: dict[str, LinearMean] = {}
    weights: dict[str, int] = {}
    changes: set[str] = set()
    disclosed: dict[str, None] = {}
    for each in terms:
        disclosed |= dict.fromkeys(each.disclose)
        weights |= {key: len(_numbers(number)) for key, number in each.totals.items()}
        for name, term in each.means.items():
            shape = tuple(term.value.shape)
            means[name] = LinearMean(shape, term.key, term.axis, term.groups, term.along, term.pooled)
            weights[term.key] = 1 if term.axis is None else shape[term.axis]
            if term.is_padded:
                weights[term.groups] = shape[term.along]
            if term.is_change:
                changes.add(name)
    return Form(means, weights, tuple(disclosed)), frozenset(changes)


def contribution(terms: Terms) -> Contribution:
    """Returns a client's numbers in the form of its terms: changes in fp64, other values as they are."""
    values: dict[str, NDArray[np.floating]] = {}
    weights: dict[str, Floats] = {key: _numbers(number) for key, number in terms.totals.items()}
    held: dict[str, NDArray[np.bool_]] = {}
    for name, term in terms.means.items():
        value = term.value if term.received is None else term.value.double() - term.received.double()
        values[name] = array_of(value)
        weights[term.key] = _numbers(term.weight)
        if term.held is not None:
            held[term.groups] = term.held.numpy()
            if term.is_padded:
                weights[term.groups] = (term.held & (torch.as_tensor(term.weight) > 0)).double().numpy()
    return Contribution(values, weights, held)


def array_of(tensor: Tensor) -> NDArray[np.floating]:
    """Returns a tensor's values as an array of fp32, or of fp64 where it is that."""
    kept = tensor.detach().to("cpu")
    array: NDArray[np.floating] = (kept if kept.dtype == torch.float64 else kept.to(torch.float32)).numpy()
    return array


def _numbers(number: float | Tensor) -> Floats:
    return torch.as_tensor(number, dtype=torch.float64).reshape(-1).numpy()
