"""The parts of Guild that its ablation took out, number by number; lettered as in docs/methods/guild-parts.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.oracles import guild
from tests.oracles.low_rank import best_approximation


def route(logits: Sequence[float], phi: Sequence[float], active: int) -> dict[int, float]:
    """Part c: the experts of the largest logits + phi, each with its softmax of the logits over all experts."""
    total = sum(math.exp(value) for value in logits)
    ranked = sorted(range(len(logits)), key=lambda expert: -(logits[expert] + phi[expert]))
    return {expert: math.exp(logits[expert]) / total for expert in ranked[:active]}


def shares(counts: Sequence[int]) -> list[float]:
    """Part c: u_i / k_i, from the number of tokens that activated each expert."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def mean(values: Sequence[float], sizes: Sequence[int]) -> float:
    """sum_i n_i x_i / sum_i n_i, as part c has it."""
    return sum(size * value for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def phi(before: Sequence[float], used: Sequence[float], zeta: float, limit: float) -> list[float]:
    """Part c, from u."""
    after = []
    for value, share in zip(before, used, strict=True):
        even = 1 / len(used)
        value += zeta if share < even else -zeta if share > even else 0.0
        after.append(limit if value > limit else -limit if value < -limit else value)
    return after


def from_sketches(change: Tensor, omega: Tensor, psi: Tensor) -> Tensor:
    """Part e: Q (Psi Q)^+ Psi D of one matrix D [out, in], with Q from the decomposition of the whole of D Omega."""
    if change.shape[0] < change.shape[1]:
        return from_sketches(change.T, omega, psi).T
    u, s, _ = torch.linalg.svd(change @ omega, full_matrices=False)
    basis = u[:, s > 1e-12 * s.max()]
    return basis @ torch.linalg.pinv(psi @ basis) @ (psi @ change)


def next_product(
    before: Tensor, trained: Sequence[Tensor], sizes: Sequence[int], omega: Tensor, psi: Tensor, rank: int
) -> Tensor:
    """Lines 5 and 6 with part e: B A of the next round, from B A and every B_i A_i, [out, in] in full."""
    change = torch.zeros_like(before)
    for product, size in zip(trained, sizes, strict=True):
        change = change + size / sum(sizes) * (product - before)
    return best_approximation(before + from_sketches(change, omega, psi), rank)


def mean_active(own: int, smaller: Sequence[int], rho: float) -> float:
    """Part b: the expected number of active experts of a step."""
    return (1 - rho) * own + rho * sum(smaller) / len(smaller) if smaller else float(own)


def mixed(received: float, trained: float, mix: float, share: float | None = None, experts: int = 0) -> float:
    """Line 7 for one number; by expert with its share of the client's activations (part d)."""
    if share is not None:
        mix *= min(1.0, experts * share)
    return guild.mixed(received, trained, mix)


def best_mix(loss: Callable[[float], float]) -> float:
    """Part d: the lambda of the least loss, the smaller one of two that are equal."""
    best, least = math.nan, math.inf
    for mix in (0.0, 0.25, 0.5, 0.75, 1.0):
        if loss(mix) < least:
            best, least = mix, loss(mix)
    return best
