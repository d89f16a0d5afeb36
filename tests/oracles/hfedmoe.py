"""HFedMoE, one equation after the other, number by number; numbered as in docs/methods/hfedmoe.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Gates = Sequence[Sequence[float]]
"""`gates[i][e]`, the probability G_e(x_i) that the router gives expert e for the token x_i."""


def importance(gates: Gates, expert: int, cumulative: float) -> float:
    """s_b(e), Eq. 3 to 5."""
    of_expert = [token[expert] for token in gates]
    return cumulative * sum(of_expert) / len(of_expert) + (1 - cumulative) * max(of_expert)


def information(gates: Gates, expert: int, cumulative: float, redundancy: float) -> float:
    """I_b(e), Eq. 10, 11 and 14."""
    prior = sum(token[expert] for token in gates) / len(gates)
    divergence = 0.0
    for token in gates:
        if token[expert] > 0:
            divergence += token[expert] * math.log(token[expert] / prior)
    return importance(gates, expert, cumulative) - redundancy * divergence / len(gates)


def best_set(values: Sequence[float], union: Sequence[int], budget: int) -> set[int]:
    """Eq. 15: of all sets of at most `budget` experts with a token, the one with the largest sum of values."""
    sets = [set(some) for size in range(budget + 1) for some in itertools.combinations(union, size)]
    return max(sets, key=lambda some: sum(values[expert] for expert in some))


def usage(gates: Gates, expert: int) -> float:
    """u_c(e), Eq. 16."""
    return sum(token[expert] for token in gates) / len(gates)


def expert_mean(
    values: Sequence[float], usages: Sequence[float], sizes: Sequence[int], threshold: float, before: float
) -> float:
    """Eq. 17 for one number of an expert; its old value where no client used it enough."""
    above = below = 0.0
    for value, used, size in zip(values, usages, sizes, strict=True):
        if used >= threshold:
            above += size * value
            below += size
    return above / below if below else before


def router_weight(usages: Sequence[float], scores: Sequence[float], threshold: float) -> float:
    """The sum of p_c(e) over S_c, Eq. 19 and 20 without |S_global|, which all clients share."""
    return sum(used * score for used, score in zip(usages, scores, strict=True) if used >= threshold)
