"""Batches for evaluation: bounded by tokens, rows of like length together, slots mixed freely."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Item:
    """One row to run: its slot, its index in that slot, and its length in tokens."""

    slot: int
    index: int
    tokens: int


def token_batches(items: Sequence[Item], batch_tokens: int) -> list[list[Item]]:
    """Returns the items in batches of at most `batch_tokens` tokens, padding included.

    Rows are sorted by length, the longest first, so that little is padded and the first batch shows whether memory
    suffices. An item longer than the limit gets a batch of its own. Within a batch the rows are slot-major and in their
    order.
    """
    batches: list[list[Item]] = []
    for item in sorted(items, key=lambda item: (-item.tokens, item.slot, item.index)):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].tokens > batch_tokens:
            batches.append([])
        batches[-1].append(item)
    return [sorted(batch, key=lambda item: (item.slot, item.index)) for batch in batches]


def each(model: Any, name: str, inputs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Yields the results of a model's method for many inputs, in order.

    If the model has a method `each`, as a group of processes has, it computes several at a time.
    """
    several = getattr(model, "each", None)
    if several is not None:
        yield from several(name, inputs)
        return
    for arguments in inputs:
        yield getattr(model, name)(*arguments)
