"""FedMoE's search, its adjustment, its loss and its aggregation, with lists and loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def smallest_set(p: Sequence[float], threshold: float, least: int) -> set[int]:
    """The likeliest experts, as few as have `threshold` of all activations together, and at least `least`."""
    total = sum(p)
    p = [value / total for value in p] if total else [1 / len(p)] * len(p)
    order = sorted(range(len(p)), key=lambda e: -p[e])
    chosen: list[int] = []
    while len(chosen) < least or sum(p[e] for e in chosen) < threshold - 1e-12:
        chosen.append(order[len(chosen)])
    return set(chosen)


def parameters(sets: Sequence[set[int]], sizes: Sequence[int]) -> int:
    return sum(len(own) * size for own, size in zip(sets, sizes, strict=True))


def fitted(
    p: Sequence[Sequence[float]], sizes: Sequence[int], least: Sequence[int], limit: int
) -> tuple[list[set[int]], float]:
    """Halves [0, 1] sixty times; theta fits or it does not."""

    def sets(threshold: float) -> list[set[int]]:
        return [smallest_set(own, threshold, few) for own, few in zip(p, least, strict=True)]

    low, high = 0.0, 1.0
    if parameters(sets(1.0), sizes) <= limit:
        return sets(1.0), 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if parameters(sets(middle), sizes) <= limit:
            low = middle
        else:
            high = middle
    return sets(low), low


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Eq. 4."""
    norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0


def peers(p: Sequence[Sequence[float]], client: int, count: int) -> list[int]:
    """Eq. 5."""
    others = [other for other in range(len(p)) if other != client]
    return sorted(others, key=lambda other: -cosine(p[client], p[other]))[:count]


def recommended(p: Sequence[Sequence[float]], client: int, chosen: Sequence[int]) -> list[float]:
    """Eq. 6."""
    weights = [cosine(p[client], p[other]) for other in chosen]
    return [
        sum(w * p[other][e] for w, other in zip(weights, chosen, strict=True)) / sum(weights)
        for e in range(len(p[client]))
    ]


def adjusted(
    held: Sequence[set[int]],
    wanted: Sequence[Sequence[float]],
    peer_experts: Sequence[int],
    sizes: Sequence[int],
    least: Sequence[int],
    limit: int,
) -> list[set[int]]:
    """One expert in or out at a time."""
    sets = [set(own) for own in held]
    change = math.floor(sum(peer_experts) / len(peer_experts) + 0.5) - sum(map(len, sets))
    places = [(layer, e) for layer, own in enumerate(wanted) for e in range(len(own))]
    if change > 0:
        outside = [(layer, e) for layer, e in places if e not in sets[layer] and wanted[layer][e] > 0]
        for layer, e in sorted(outside, key=lambda place: -wanted[place[0]][place[1]])[:change]:
            sets[layer].add(e)
            if parameters(sets, sizes) > limit:
                sets[layer].remove(e)
    else:
        inside = [(layer, e) for layer, e in places if e in sets[layer]]
        for layer, e in sorted(inside, key=lambda place: wanted[place[0]][place[1]]):
            if change < 0 and len(sets[layer]) > least[layer]:
                sets[layer].remove(e)
                change += 1
    return sets


def smoothed_loss(logits: Tensor, target: int, smoothing: float) -> float:
    """The cross-entropy of one token with 1 - s on the target and s spread over all V tokens."""
    values = [float(value) for value in logits]
    whole = math.log(sum(math.exp(value - max(values)) for value in values)) + max(values)
    total = 0.0
    for v, value in enumerate(values):
        share = smoothing / len(values) + (1 - smoothing if v == target else 0.0)
        total -= share * (value - whole)
    return total


def expert_mean(before: float, versions: Sequence[float | None], sizes: Sequence[int]) -> float:
    """An expert's value after a round: unchanged, copied, or the mean of its holders by size."""
    holders = [(value, size) for value, size in zip(versions, sizes, strict=True) if value is not None]
    if not holders:
        return before
    return sum(value * size for value, size in holders) / sum(size for _, size in holders)
