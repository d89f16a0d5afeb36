"""FedAMoLE's server in Python loops: Eq. 10, 12 and 14, Definition 4.1 by trying everything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor

Assignment = tuple[tuple[int, ...], ...]
"""For each expert, the clients that it goes to."""


def relevance(token: list[list[float]], expert: list[list[float]], width: int) -> list[list[float]]:
    """Eq. 14: s[client][expert], divided by the root of `width`."""
    return [
        [sum(t * e for t, e in zip(own, other, strict=True)) / math.sqrt(width) for other in expert] for own in token
    ]


def selection(scores: list[list[float]]) -> list[list[float]]:
    """P[client][expert] of Definition 4.1: for each expert, a softmax over the clients."""
    result = [[0.0] * len(row) for row in scores]
    for expert in range(len(scores[0])):
        total = sum(math.exp(row[expert]) for row in scores)
        for client, row in enumerate(scores):
            result[client][expert] = math.exp(row[expert]) / total
    return result


def feasible(clients: int, experts: int, fewest: int, most: int, per_expert: int) -> Iterator[Assignment]:
    """Every assignment that satisfies Definition 4.1, expert after expert."""

    def extend(chosen: list[tuple[int, ...]], load: list[int]) -> Iterator[Assignment]:
        left = experts - len(chosen)
        if any(load[client] > most or load[client] + left < fewest for client in range(clients)):
            return
        if left == 0:
            yield tuple(chosen)
            return
        for pick in combinations(range(clients), per_expert):
            for client in pick:
                load[client] += 1
            yield from extend([*chosen, pick], load)
            for client in pick:
                load[client] -= 1

    yield from extend([], [0] * clients)


def value(weights: list[list[float]], assignment: Assignment) -> float:
    """<weights, D>, where weights is [client][expert]."""
    return math.fsum(weights[client][expert] for expert, pick in enumerate(assignment) for client in pick)


def mean_over_holders(before: Tensor, trained: dict[int, dict[int, Tensor]]) -> Tensor:
    """Eq. 10 and 12 for the experts of one module, [E, ..]: the plain mean over those that trained each.

    Args:
        before: The pool before the round; an expert without holders keeps its row.
        trained: client -> expert -> what it became there.
    """
    result = before.clone().double()
    for expert in range(len(before)):
        held = [own[expert] for own in trained.values() if expert in own]
        if not held:
            continue
        total = torch.zeros_like(held[0], dtype=torch.float64)
        for value in held:
            total = total + value.double()
        result[expert] = total / len(held)
    return result
