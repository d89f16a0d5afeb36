"""Aggregation element by element in Python floats, from the equations."""

import itertools

import torch
from torch import Tensor


def weighted_mean(values: list[Tensor], weights: list[Tensor], fallback: Tensor) -> Tensor:
    """sum_c w_c x_c / sum_c w_c per element (FedAvg; FLAME Eq. 7); the fallback where sum_c w_c = 0.

    Weights have the shape of the values' leading dimensions, or 1 in place of a size.
    """
    result = fallback.clone()
    for position in itertools.product(*map(range, fallback.shape)):
        numerator = denominator = 0.0
        for value, weight in zip(values, weights, strict=True):
            at = tuple(0 if size == 1 else p for p, size in zip(position, weight.shape, strict=False))
            numerator += weight[at].item() * value[position].item()
            denominator += weight[at].item()
        if denominator > 0.0:
            result[position] = numerator / denominator
    return result


def mean_over_holders(rows: list[list[list[float]]], weights: list[float], rank: int) -> list[list[float] | None]:
    """Mean of each rank row over the clients whose rank reaches it; None for a row that nobody holds.

    Args:
        rows: [client][rank row][value], ranks differing by client.
        weights: One per client.
        rank: Rows of the result.
    """
    result: list[list[float] | None] = []
    for row in range(rank):
        holders = [c for c, client in enumerate(rows) if row < len(client) and weights[c] > 0]
        if not holders:
            result.append(None)
            continue
        total = sum(weights[c] for c in holders)
        width = len(rows[holders[0]][row])
        result.append([sum(weights[c] * rows[c][row][i] for c in holders) / total for i in range(width)])
    return result


def seeded(*shape: int, seed: int) -> Tensor:
    """Normal values in fp32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
