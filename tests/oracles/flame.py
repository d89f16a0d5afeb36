"""FLAME's Eq. 6, Eq. 7 and activation counts, number by number in Python floats."""

from __future__ import annotations

import torch
from torch import Tensor


def gamma(frequency: float, temperature: float, examples: int) -> float:
    """Eq. 6 for one client and one expert, with 0^0 = 1."""
    power = 1.0
    if temperature != 0.0:
        power = frequency**temperature
    return power * examples


def mean_of_experts(values: list[Tensor], weights: list[list[float]], before: Tensor) -> Tensor:
    """Eq. 7 for one tensor [M, ..]: per expert, the mean over clients; `before` where the weights are all zero.

    Args:
        values: Each client's [M, ..].
        weights: [client][expert] gamma.
        before: The global [M, ..] before the round.
    """
    result = before.clone().double()
    for expert in range(len(before)):
        total = sum(client[expert] for client in weights)
        if total == 0.0:
            continue
        result[expert] = 0.0
        for value, client in zip(values, weights, strict=True):
            result[expert] += client[expert] / total * value[expert].double()
    return result


def count_activations(logits: Tensor, real: list[bool], active: int) -> list[int]:
    """How many real tokens have each expert among the `active` largest of their logits [N, M]."""
    counts = [0] * logits.shape[1]
    for token, is_real in enumerate(real):
        if not is_real:
            continue
        scores = logits[token].tolist()
        ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        for expert in ranked[:active]:
            counts[expert] += 1
    return counts


def random_frequency(layers: int, experts: int, seed: int) -> Tensor:
    """[L, M] in [0, 1], a third of it zero and some of it one."""
    drawn = torch.rand(layers, experts, generator=torch.Generator().manual_seed(seed))
    return ((drawn - 1 / 3).clamp(min=0) * 1.6).clamp(max=1)
