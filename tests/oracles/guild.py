"""Guild, one line of its box after the other, number by number; numbered as in docs/methods/guild.md."""

from __future__ import annotations

from collections.abc import Sequence


def theta(before: float, trained: Sequence[float], sizes: Sequence[int], eta: float) -> float:
    """Line 4, with the server's step (1 for none)."""
    above = below = 0.0
    for value, size in zip(trained, sizes, strict=True):
        above += size * (value - before)
        below += size
    return before + eta * above / below


def mixed(received: float, trained: float, mix: float) -> float:
    """Line 5 for one number."""
    return received + mix * (trained - received)


def orthogonal_rows(down: Sequence[Sequence[float]], norm: float) -> list[list[float]]:
    """Line 1: Gram and Schmidt, row by row: what lies along the rows before is taken away, and the rest scaled."""
    rows: list[list[float]] = []
    for row in down:
        rest = list(row)
        for before in rows:
            along = sum(x * y for x, y in zip(row, before, strict=True)) / norm**2
            rest = [x - along * y for x, y in zip(rest, before, strict=True)]
        length = sum(x * x for x in rest) ** 0.5
        rows.append([norm * x / length for x in rest])
    return rows
