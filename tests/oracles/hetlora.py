"""HetLoRA, one rank row and one matrix after another, from the equations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def tail_penalty(matrices: Sequence[tuple[Tensor, Tensor]], start: int) -> Tensor:
    """Σ ‖B[:, t:]‖ ‖A[t:]‖ over (A [r, in], B [out, r]), a norm at zero having no gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for down, up in matrices:
        squares_a, squares_b = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for rank in range(start, down.shape[0]):
            for value in down[rank]:
                squares_a = squares_a + value.double() ** 2
            for value in up[:, rank]:
                squares_b = squares_b + value.double() ** 2
        if squares_a > 0 and squares_b > 0:
            total = total + squares_a.sqrt() * squares_b.sqrt()
        elif squares_a > 0:  # the product is zero, and so is its gradient with respect to the zero factor
            total = total + 0 * squares_a
    return total


def norm_of_products(matrices: Sequence[tuple[Tensor, Tensor]]) -> float:
    """√ Σ ‖B A‖² over (A, B)."""
    return math.sqrt(sum(float((up.double() @ down.double()).square().sum()) for down, up in matrices))


def padded_average(rows: list[list[list[float]]], weights: list[float], rank: int) -> list[list[float] | None]:
    """Σ_k w_k pad(x_k) / Σ_k w_k by rank row; None for a row that no client with a weight holds.

    Args:
        rows: [client][rank row][value], ranks differing by client.
        weights: One per client.
        rank: Rows of the result.
    """
    width, total = len(rows[0][0]), sum(weights)
    result: list[list[float] | None] = []
    for row in range(rank):
        held = [(w, client[row]) for w, client in zip(weights, rows, strict=True) if row < len(client)]
        weightless = sum(w for w, _ in held) == 0
        result.append(None if weightless else [sum(w * values[i] for w, values in held) / total for i in range(width)])
    return result
