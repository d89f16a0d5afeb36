"""First sets of FedMoE's stage 2: the likeliest experts of every layer, as many as a client's memory holds.

Source: Mei et al., "FedMoE: Personalized Federated Learning via Heterogeneous Mixture of Experts", 2024.
A layer's p [M] are the shares of its experts in the activations, and a set is a bool [M]. Ties go to
the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """Bounds of a client's sets.

    Attributes:
        sizes: Parameters of one expert of each layer.
        least: Fewest experts of each layer, its active ones.
        most: Most expert parameters in all.
    """

    sizes: Sequence[int]
    least: Sequence[int]
    most: int

    @property
    def smallest(self) -> int:
        """Parameters of the smallest sets."""
        return sum(size * least for size, least in zip(self.sizes, self.least, strict=True))

    def used(self, counts: Sequence[int]) -> int:
        """Returns the parameters of so many experts in each layer."""
        return sum(size * count for size, count in zip(self.sizes, counts, strict=True))


def fitted_sets(activation: Sequence[Tensor], limits: Limits) -> tuple[list[Tensor], float]:
    """Returns the sets of the largest threshold that fit, and the threshold theta, by binary search.

    A layer's set for theta is the smallest of its likeliest experts whose shares add up to at least theta,
    and never fewer than its active ones. The sets change only at the sums of a layer's largest shares, so the
    search is over these, and exact. A layer without activations counts as one that uses all experts equally.

    Args:
        activation: p [M] of each layer; scaled to sum to 1 here.
        limits: What the client can hold.

    Raises:
        ValueError: not even the smallest sets fit.
    """
    if limits.smallest > limits.most:
        raise ValueError(f"The smallest sets have {limits.smallest} parameters, which do not fit into {limits.most}.")
    shares = [p.double() if bool(p.any()) else torch.ones_like(p, dtype=torch.float64) for p in activation]
    orders = [p.argsort(descending=True, stable=True) for p in shares]
    sums = [p[order].cumsum(0) for p, order in zip(shares, orders, strict=True)]
    sums = [total / total[-1] for total in sums]
    thresholds = torch.cat([torch.zeros(1, dtype=torch.float64), *sums]).unique().tolist()

    def counts(threshold: float) -> list[int]:
        return [
            max(least, int((total < threshold).sum()) + (threshold > 0))
            for total, least in zip(sums, limits.least, strict=True)
        ]

    low, high = 0, len(thresholds) - 1  # the threshold at `low` fits
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if limits.used(counts(thresholds[middle])) <= limits.most else (low, middle - 1)
    sets = [
        torch.zeros(len(order), dtype=torch.bool).index_fill_(0, order[:count], True)
        for order, count in zip(orders, counts(thresholds[low]), strict=True)
    ]
    return sets, thresholds[low]
