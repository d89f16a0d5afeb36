"""UB-SMoE's equations, number by number in Python floats."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def route(
    scores: Sequence[float], phi: Sequence[float], active: int, candidates: int, modulation: str, gating: str
) -> dict[int, float]:
    """Algorithm 2 for one token: expert -> weight; or `preserve`: the candidates stay, the others are modulated."""
    experts = range(len(scores))
    by_score = sorted(experts, key=lambda i: -scores[i])
    largest = set(by_score[:candidates])
    m = list(scores)
    for i in experts:
        if (modulation == "candidate" and i in largest) or (modulation == "preserve" and i not in largest):
            m[i] = scores[i] + phi[i]
    if modulation == "preserve":
        others = sorted((i for i in experts if i not in largest), key=lambda i: -m[i])
        chosen = [*by_score[:candidates], *others][:active]
    else:
        chosen = sorted(experts, key=lambda i: -m[i])[:active]
    total = sum(math.exp(m[j]) for j in (chosen if gating == "renormalised" else experts))
    return {i: math.exp(m[i]) / total for i in chosen}


def hinge(phi: Sequence[Sequence[float]], low: float, high: float, weight: float) -> float:
    """Eq. 11, summed over layers."""
    total = 0.0
    for layer in phi:
        for value in layer:
            total += max(low - value, 0.0) ** 2 + max(value - high, 0.0) ** 2
    return weight * total


def hinge_slope(value: float, low: float, high: float, weight: float) -> float:
    """The derivative of Eq. 11 by one phi."""
    if value < low:
        return -2 * weight * (low - value)
    return 2 * weight * (value - high) if value > high else 0.0


def utilisation(shares: Sequence[Sequence[float]], examples: Sequence[int]) -> list[float] | None:
    """Eq. 12 for one layer: shares[client][expert]; a client without tokens does not count, None if all."""
    counted = [(share, n) for share, n in zip(shares, examples, strict=True) if sum(share) > 0]
    total = sum(n for _, n in counted)
    if total == 0:
        return None
    return [sum(n / total * share[i] for share, n in counted) for i in range(len(shares[0]))]


def modulation(phi: Sequence[float], rate: Sequence[float], mean_active: float, zeta: float, eps: float) -> list[float]:
    """Eq. 13 and 14."""
    target = mean_active / len(rate)
    moved = [math.tanh(target / (u + eps) - 1) for u in rate]
    return [(1 - zeta) * new + zeta * old for new, old in zip(moved, phi, strict=True)]


def mean_active(clients: Sequence[tuple[int, int]]) -> float:
    """K-bar of (examples, K_c)."""
    total = sum(examples for examples, _ in clients)
    return sum(examples / total * active for examples, active in clients)


def injected(
    gradient: Tensor, pseudo: Tensor, rho: float, tokens_on: Sequence[int], tokens: int, inactivity: str
) -> Tensor:
    """Eq. 16 for one client and one tensor [M, …]: expert by expert.

    `batch` is Algorithm 3; `token` the mean over tokens of a gradient that is the token's own where
    it activates the expert and rho G~ where it does not.
    """
    result = gradient.clone()
    for expert in range(len(gradient)):
        if inactivity == "batch":
            if tokens_on[expert] == 0:
                result[expert] = rho * pseudo[expert]
            continue
        for _ in range(tokens - tokens_on[expert]):
            result[expert] = result[expert] + rho * pseudo[expert] / tokens
    return result


def clipped(pseudo: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Each expert's slices of a layer's tensors [M, …], scaled to a joint norm of at most `limit`."""
    result = [value.clone() for value in pseudo]
    for expert in range(len(pseudo[0])):
        norm = math.sqrt(sum(float((value[expert].double() ** 2).sum()) for value in pseudo))
        if norm > limit:
            for value in result:
                value[expert] *= limit / norm
    return result


class Adamw:
    """AdamW over the experts of one tensor [M, …] whose experts may be left out of a step."""

    def __init__(self, value: Tensor, betas: tuple[float, float], eps: float, decay: float) -> None:
        self.value, self.betas, self.eps, self.decay, self.count = value.clone(), betas, eps, decay, 0
        self.first, self.second = torch.zeros_like(value), torch.zeros_like(value)

    def step(self, gradient: Tensor, rate: float, learns: Sequence[bool]) -> None:
        """One step; an expert that does not learn keeps its value and its moments."""
        self.count += 1
        for expert, does in enumerate(learns):
            if not does:
                continue
            self.value[expert] *= 1 - rate * self.decay
            for moment, beta, power in ((self.first, self.betas[0], 1), (self.second, self.betas[1], 2)):
                moment[expert] = beta * moment[expert] + (1 - beta) * gradient[expert] ** power
            mean = self.first[expert] / (1 - self.betas[0] ** self.count)
            root = (self.second[expert] / (1 - self.betas[1] ** self.count)).sqrt()
            self.value[expert] -= rate * mean / (root + self.eps)


def entropy(rate: Sequence[float]) -> float:
    """Section 6.3.3, in nats."""
    return -sum(u * math.log(u) for u in rate if u > 0)


def gini(rate: Sequence[float]) -> float:
    """Eq. 62."""
    differences = sum(abs(a - b) for a in rate for b in rate)
    return differences / (2 * len(rate) * sum(rate)) if sum(rate) > 0 else 0.0


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Eq. 63."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    both = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return both / math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, ties sharing their mean."""
    return [
        (sum(other < value for other in values) + sum(other <= value for other in values) + 1) / 2 for value in values
    ]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least squares of y on x."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    both = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return both / sum((a - mean_x) ** 2 for a in x)


class OwnNorms:
    """One client's and one layer's gradient norms, expert by expert, over the steps of a round.

    Args:
        experts: M.
    """

    def __init__(self, experts: int) -> None:
        self.norms: list[list[float]] = [[] for _ in range(experts)]
        self.idle = self.steps = 0
        self.injected: list[float] = []

    def add(self, gradients: Sequence[Tensor], tokens_on: Sequence[int]) -> None:
        """Takes in a step: the layer's gradients [M, …] of each tensor, and the tokens of each expert."""
        for expert, tokens in enumerate(tokens_on):
            self.steps += 1
            if tokens:
                self.norms[expert].append(math.sqrt(sum(float((g[expert].double() ** 2).sum()) for g in gradients)))
            else:
                self.idle += 1

    def reference(self, expert: int) -> float:
        """The mean of an expert's own norms; of the whole layer's where it has none."""
        known = self.norms[expert] or [norm for norms in self.norms for norm in norms]
        return sum(known) / len(known) if known else 0.0

    def mean(self) -> float:
        """The mean over all expert-steps with tokens."""
        every = [norm for norms in self.norms for norm in norms]
        return sum(every) / len(every)


def next_phi(phi: float, rate: float, uniform: float, zeta: float, low: float, high: float, kind: str) -> float:
    """Eq. 13 and 14 for one expert, by the three readings of phi's range."""
    target = math.tanh(uniform / (rate + 1e-6) - 1)
    if kind == "scale":
        target *= high if target > 0 else -low
    phi = (1 - zeta) * target + zeta * phi
    return min(max(phi, low), high) if kind == "clamp" else phi
