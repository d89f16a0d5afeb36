"""Partitions: the assignment of training examples to clients. Pure functions, deterministic given the generator.

Every built-in scheme uses every example exactly once. A scheme of another package is a function in the entry-point
group `fedguild.partitions`; it may leave examples out.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedguild.config.data import PARTITIONS_GROUP
from fedguild.core.errors import DataError, nearest
from fedguild.core.plugins import Plugins
from fedguild.data.example import Example

Parts = list[list[int]]
Assignment = Sequence[int] | Sequence[Sequence[int]]
"""A client for each example, or for each client the indices of its examples."""
PartitionScheme = Callable[[Sequence[Example], int, np.random.Generator], Assignment]
"""Called with the training examples, the number of clients and the source of all random choices."""
_ACCEPTED = "Give a client for each example, or for each client the indices of its examples, as integers (3, not 3.0)."

SCHEMES: dict[str, str] = {
    "iid": "every client draws from the whole, in equal sizes",
    "dirichlet": "every label is spread over the clients by Dirichlet(alpha); small alpha, strong skew",
    "label": "every client has different labels (one task per client)",
    "document": "every document stays whole on one client, in sizes as equal as that allows",
    "quantity": "every client draws from the whole, in sizes drawn from Dirichlet(alpha)",
    "power_law": "every client draws from the whole; the i-th client's size is proportional to i to the power -alpha",
}
"""Scheme -> one-line description."""


def _accepted(name: str, loaded: object) -> PartitionScheme:
    if not callable(loaded):
        raise TypeError(f"a partition scheme is a function, not a {type(loaded).__name__}")
    return loaded


PARTITIONS: Plugins[PartitionScheme] = Plugins("partition scheme", "", PARTITIONS_GROUP, _accepted, attribute="assign")
"""The schemes of other packages."""


def partition(
    scheme: str,
    examples: Sequence[Example],
    clients: int,
    *,
    rng: np.random.Generator,
    alpha: float = 0.5,
    minimum: int = 1,
) -> Parts:
    """Assigns examples to clients.

    Args:
        scheme: A name in `SCHEMES`, or in `PARTITIONS`.
        rng: Source of all random choices.
        alpha: Concentration of `dirichlet` and `quantity`, exponent of `power_law`; unused by the
            others.

    Returns:
        For each client the indices into `examples`, ascending.

    Raises:
        DataError: the scheme is unknown, alpha is not positive, or no partition of this kind gives
            every client its minimum.
    """
    if scheme not in SCHEMES:
        if scheme not in PARTITIONS:
            raise DataError(f"There is no partition scheme '{scheme}'.", nearest(scheme, [*SCHEMES, *PARTITIONS]))
        parts = as_parts(PARTITIONS.load(scheme)(examples, clients, rng), len(examples), clients, what=f"'{scheme}'")
        _check_minimum(scheme, parts, minimum)
        return parts
    _check(len(examples), clients, alpha, minimum)
    if scheme == "iid":
        parts = iid(len(examples), clients, rng)
    elif scheme == "dirichlet":
        parts = dirichlet([example.label for example in examples], clients, alpha, minimum, rng)
    elif scheme == "label":
        parts = by_label([example.label for example in examples], clients)
    elif scheme == "document":
        parts = by_document([example.document for example in examples], clients, rng)
    elif scheme == "quantity":
        parts = by_size(rng.dirichlet(np.full(clients, alpha)), len(examples), minimum, rng)
    else:
        parts = by_size(np.arange(1.0, clients + 1) ** -alpha, len(examples), minimum, rng)
    _check_minimum(scheme, parts, minimum)
    return [sorted(part) for part in parts]


def as_parts(assignment: Assignment, examples: int, clients: int, what: str = "given") -> Parts:
    """Returns an assignment as lists of indices, ascending, after checking it.

    Args:
        assignment: A client for each example, or for each client the indices of its examples.

    Raises:
        DataError: it names an example or a client that does not exist, uses an example twice, leaves a client without
            examples, has the wrong length, or an entry that is no integer.
    """
    rows: list[Any] = list(in_integers(assignment, what))
    if all(isinstance(entry, int) for entry in rows):
        if len(rows) != examples:
            raise DataError(
                f"The partition {what} has a client for {len(rows)} examples, but there are {examples}.",
                "Examples without a response, and those above data.max_samples, are left out before the partition.",
            )
        wrong = next((entry for entry in rows if not 0 <= entry < clients), None)
        if wrong is not None:
            raise DataError(f"The partition {what} names client {wrong}, but clients count from 0 to {clients - 1}.")
        parts: Parts = [[] for _ in range(clients)]
        for index, client in enumerate(rows):
            parts[client].append(index)
    else:
        parts = [sorted(row) for row in rows]
        if len(parts) != clients:
            raise DataError(
                f"The partition {what} has {len(parts)} parts, but there are {clients} clients.",
                f"Set federation.clients={len(parts)}, or give a part for each client.",
            )
    seen = Counter(index for part in parts for index in part)
    wrong = next((index for index in seen if not 0 <= index < examples), None)
    if wrong is not None:
        raise DataError(f"The partition {what} names example {wrong}, but they count from 0 to {examples - 1}.")
    twice = next((index for index, times in seen.items() if times > 1), None)
    if twice is not None:
        raise DataError(f"The partition {what} uses example {twice} twice.")
    empty = next((client for client, part in enumerate(parts) if not part), None)
    if empty is not None:
        raise DataError(f"The partition {what} leaves client {empty} without an example.")
    return parts


def in_integers(assignment: Assignment, what: str = "given") -> Assignment:
    """Returns an assignment with all entries as Python integers.

    Args:
        assignment: A client for each example, or for each client the indices of its examples.

    Raises:
        DataError: it is neither of these, or an entry is not an integer of Python, NumPy or another library (3.0 is
            not).
    """
    if not _is_list(assignment):
        raise DataError(f"The partition {what} is {assignment!r}.", _ACCEPTED)
    entries: list[Any] = list(assignment)
    lists = [entry for entry in entries if _is_list(entry)]
    if lists and len(lists) < len(entries):
        other = next(entry for entry in entries if not _is_list(entry))
        raise DataError(f"The partition {what} has {other!r} beside lists of indices.", _ACCEPTED)
    if lists:
        return [[_integer(index, what) for index in entry] for entry in lists]
    return [_integer(entry, what) for entry in entries]


def _is_list(entry: Any) -> bool:
    return isinstance(entry, Iterable) and not isinstance(entry, str) and getattr(entry, "ndim", 1) > 0


def _integer(entry: Any, what: str) -> int:
    try:
        return int(operator.index(entry))
    except TypeError:
        raise DataError(f"The partition {what} has an entry that is no whole number: {entry!r}.", _ACCEPTED) from None


def _check(count: int, clients: int, alpha: float, minimum: int) -> None:
    if clients < 1:
        raise DataError(f"The number of clients must be at least 1, but is {clients}.")
    if not 0 < alpha < float("inf"):
        raise DataError(f"The partition's alpha must be positive, but is {alpha}.")
    if minimum < 1:
        raise DataError(f"The minimum per client must be at least 1, but is {minimum}.")
    if count < clients * minimum:
        raise DataError(
            f"{count} examples cannot give each of {clients} clients its minimum of {minimum}.",
            "Use fewer federation.clients, a smaller data.partition.minimum, or more data.",
        )


def _check_minimum(scheme: str, parts: Parts, minimum: int) -> None:
    for client, part in enumerate(parts):
        if len(part) < minimum:
            raise DataError(
                f"The partition '{scheme}' leaves client {client} with {len(part)} of at least {minimum} examples.",
                "Use fewer federation.clients, a smaller data.partition.minimum, or another scheme.",
            )


def iid(count: int, clients: int, rng: np.random.Generator) -> Parts:
    """Deals `count` indices at random, in sizes that differ by at most one."""
    return _lists(np.array_split(rng.permutation(count), clients))


def dirichlet(labels: Sequence[str], clients: int, alpha: float, minimum: int, rng: np.random.Generator) -> Parts:
    """Spreads every label over the clients in proportions from Dirichlet(alpha) (Hsu et al. 2019).

    A client below the minimum then takes examples, one by one and at random, from whichever client
    holds the most at that moment.
    """
    parts: Parts = [[] for _ in range(clients)]
    of_label = _groups(labels)
    for label in sorted(of_label):
        indices = rng.permutation(of_label[label])
        shares = rng.dirichlet(np.full(clients, alpha))
        ends = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(int)
        for part, piece in zip(parts, np.split(indices, ends), strict=True):
            part.extend(piece.tolist())
    _fill_up(parts, minimum, rng)
    return parts


def _fill_up(parts: Parts, minimum: int, rng: np.random.Generator) -> None:
    for part in parts:
        while len(part) < minimum:
            largest = max(parts, key=len)
            part.append(largest.pop(int(rng.integers(len(largest)))))


def by_label(labels: Sequence[str], clients: int) -> Parts:
    """Deals whole labels to clients in turn, the largest first; with as many labels as clients, one each.

    Raises:
        DataError: there are fewer labels than clients.
    """
    of_label = _groups(labels)
    if len(of_label) < clients:
        raise DataError(
            f"The partition 'label' gives every client different labels, but {clients} clients share "
            f"{len(of_label)} label(s): {', '.join(sorted(of_label)[:20])}.",
            f"Use at most {len(of_label)} clients, or the scheme dirichlet.",
        )
    parts: Parts = [[] for _ in range(clients)]
    ranked = sorted(of_label, key=lambda label: (-len(of_label[label]), label))
    for place, label in enumerate(ranked):
        parts[place % clients].extend(of_label[label])
    return parts


def by_document(documents: Sequence[str], clients: int, rng: np.random.Generator) -> Parts:
    """Gives each document, the largest first, to the client with the fewest examples so far.

    Documents of equal size come in random order.

    Raises:
        DataError: an example has no document, or there are fewer documents than clients.
    """
    if not all(documents):
        raise DataError(
            "The partition 'document' needs the document of every example, which this corpus does not have.",
            "Use another scheme, or a corpus with documents (telequad, or instructions with a document column).",
        )
    of_document = _groups(documents)
    if len(of_document) < clients:
        raise DataError(
            f"The partition 'document' cannot give {clients} clients one of {len(of_document)} documents each.",
            f"Use at most {len(of_document)} clients.",
        )
    parts: Parts = [[] for _ in range(clients)]
    names = sorted(of_document)
    shuffled = [names[index] for index in rng.permutation(len(names))]
    for document in sorted(shuffled, key=lambda name: -len(of_document[name])):
        min(parts, key=len).extend(of_document[document])
    return parts


def by_size(weights: NDArray[np.floating[Any]], count: int, minimum: int, rng: np.random.Generator) -> Parts:
    """Deals `count` indices at random: the minimum to every client, the rest in proportion to `weights`."""
    sizes = minimum + apportion(weights, count - minimum * len(weights))
    return _lists(np.split(rng.permutation(count), np.cumsum(sizes)[:-1]))


def apportion(weights: NDArray[np.floating[Any]], total: int) -> NDArray[np.int64]:
    """Returns integers that add up to `total`, in proportion to `weights` by largest remainders."""
    exact = weights / weights.sum() * total
    whole: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    remaining = total - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:remaining]] += 1
    return whole


def _groups(names: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name, []).append(index)
    return groups


def _lists(arrays: Sequence[NDArray[np.int64]]) -> Parts:
    return [array.tolist() for array in arrays]


@dataclass(frozen=True, slots=True)
class PartitionTable:
    """Number of examples by client and label.

    Attributes:
        labels: All labels, the most frequent first.
        counts: For each client, the counts in the order of `labels`.
    """

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def client_sizes(self) -> tuple[int, ...]:
        return tuple(sum(row) for row in self.counts)


def partition_table(examples: Sequence[Example], parts: Sequence[Sequence[int]]) -> PartitionTable:
    per_client = [Counter(examples[index].label for index in part) for part in parts]
    totals = sum(per_client, Counter[str]())
    labels = tuple(sorted(totals, key=lambda label: (-totals[label], label)))
    return PartitionTable(labels, tuple(tuple(counter[label] for label in labels) for counter in per_client))
