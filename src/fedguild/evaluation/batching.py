"""Batches for evaluation: bounded by tokens, rows of like length together, slots mixed freely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One row to run: which slot runs it, its index in that slot, and its length in tokens."""

    slot: int
    index: int
    tokens: int


def token_batches(items: Sequence[Item], batch_tokens: int) -> list[list[Item]]:
    """Returns the items in batches of at most `batch_tokens` tokens, padding included.

    Rows are sorted by length, the longest first, so that little is padded and the first batch
    shows whether memory suffices; an item longer than the limit gets a batch of its own. Within a
    batch the rows are slot-major and in their order.
    """
    batches: list[list[Item]] = []
    for item in sorted(items, key=lambda item: (-item.tokens, item.slot, item.index)):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].tokens > batch_tokens:
            batches.append([])
        batches[-1].append(item)
    return [sorted(batch, key=lambda item: (item.slot, item.index)) for batch in batches]
