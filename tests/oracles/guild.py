"""Guild, one line of its box after the other, number by number; numbered as in docs/methods/guild.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def theta(before: float, trained: Sequence[float], sizes: Sequence[int], eta: float) -> float:
    """Line 6, with the server's step (1 for none)."""
    above = below = 0.0
    for value, size in zip(trained, sizes, strict=True):
        above += size * (value - before)
        below += size
    return before + eta * above / below


def mixed(received: float, trained: float, mix: float) -> float:
    """Line 7 for one number."""
    return received + mix * (trained - received)


def refactored(
    down: Sequence[Sequence[float]], up: Sequence[Sequence[float]], norm: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Line 3: A and B of the same product with orthogonal rows of A, all of one norm, and orthogonal columns of B.

    From the singular value decomposition U S V^T of B A, formed in full: norm V^T and U S / norm, of A's rank.
    """
    rank, inputs, outputs = len(down), len(down[0]), len(up)
    product = [[sum(row[k] * down[k][j] for k in range(rank)) for j in range(inputs)] for row in up]
    left, values, right = np.linalg.svd(np.array(product))
    new_down = [[norm * float(right[k][j]) for j in range(inputs)] for k in range(rank)]
    new_up = [[float(left[i][k] * values[k]) / norm for k in range(rank)] for i in range(outputs)]
    return new_down, new_up
