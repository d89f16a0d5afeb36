"""Which experts a client of FedMoE gets: the first sets, that its memory holds, and their adjustment to its peers'.

Source: Mei et al., "FedMoE: Personalized Federated Learning via Heterogeneous Mixture of Experts", 2024.
Everything here is of one client; a layer's p [M] are the shares of its experts in the
activations, and a set is a bool [M]. Ties go to the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Room:
    """What bounds a client's sets, layer by layer.

    Attributes:
        sizes: Parameters of one expert of each layer.
        least: Fewest experts of each layer, its active ones.
        limit: Most expert parameters in all.
    """

    sizes: Sequence[int]
    least: Sequence[int]
    limit: int

    @property
    def smallest(self) -> int:
        """Parameters of the smallest sets."""
        return sum(size * least for size, least in zip(self.sizes, self.least, strict=True))

    def used(self, counts: Sequence[int]) -> int:
        """Returns the parameters of so many experts in each layer."""
        return sum(size * count for size, count in zip(self.sizes, counts, strict=True))


def fitted_sets(activation: Sequence[Tensor], room: Room) -> tuple[list[Tensor], float]:
    """Returns the sets of the largest threshold that fit, and the threshold theta, by binary search.

    A layer's set for theta is the smallest of its likeliest experts whose shares add up to at least theta,
    and never fewer than its active ones. The sets change at the sums of a layer's largest shares only, so the
    search is over these, and exact. A layer without activations counts as one that uses all experts alike.

    Args:
        activation: p [M] of each layer; scaled to sum to 1 here.
        room: What fits.

    Raises:
        ValueError: not even the smallest sets fit.
    """
    if room.smallest > room.limit:
        raise ValueError(f"The smallest sets have {room.smallest} parameters, which do not fit into {room.limit}.")
    shares = [p.double() if bool(p.any()) else torch.ones_like(p, dtype=torch.float64) for p in activation]
    orders = [p.argsort(descending=True, stable=True) for p in shares]
    sums = [p[order].cumsum(0) for p, order in zip(shares, orders, strict=True)]
    sums = [total / total[-1] for total in sums]
    thresholds = torch.cat([torch.zeros(1, dtype=torch.float64), *sums]).unique().tolist()

    def counts(threshold: float) -> list[int]:
        return [
            max(least, int((total < threshold).sum()) + (threshold > 0))
            for total, least in zip(sums, room.least, strict=True)
        ]

    low, high = 0, len(thresholds) - 1  # the threshold at `low` fits
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if room.used(counts(thresholds[middle])) <= room.limit else (low, middle - 1)
    sets = [
        torch.zeros(len(order), dtype=torch.bool).index_fill_(0, order[:count], True)
        for order, count in zip(orders, counts(thresholds[low]), strict=True)
    ]
    return sets, thresholds[low]


def similarities(activation: Tensor) -> Tensor:
    """Returns [n, n], the cosines of clients' p over all layers (Eq. 4); 0 with a client whose p is zero.

    Args:
        activation: [n, D], the p of all layers, one after the other.
    """
    values = activation.double()
    norms = values.norm(dim=1, keepdim=True)
    unit = torch.where(norms > 0, values / norms.clamp(min=torch.finfo(values.dtype).tiny), 0.0)
    return unit @ unit.t()


def top_peers(similarity: Tensor, client: int, known: Tensor, count: int) -> list[int]:
    """Returns the `count` other clients that are most similar to one, the most similar first (Eq. 5).

    Args:
        similarity: [n, n].
        client: Whose peers.
        known: [n] bool, who can be a peer.
        count: K.
    """
    order = similarity[client].argsort(descending=True, stable=True).tolist()
    return [other for other in order if other != client and bool(known[other])][:count]


def recommendation(similarity: Tensor, activation: Tensor) -> Tensor | None:
    """Returns p-hat [D], the peers' p weighed by their similarity (Eq. 6); None where no weight falls.

    Args:
        similarity: [K] with each peer.
        activation: [K, D] the peers' p.
    """
    total = float(similarity.sum())
    return (similarity.double() @ activation.double()) / total if total > 0 else None


def adjusted_sets(
    held: Sequence[Tensor], wanted: Sequence[Tensor], peer_experts: Sequence[int], room: Room
) -> list[Tensor]:
    """Returns sets of about as many experts as the peers hold, by what they recommend.

    n = mean(n_peers) - n_own, rounded. Where n > 0 the n experts with the largest p-hat that are not held
    come in, those that no peer activated excepted and as far as they fit; else the |n| with the least go,
    as far as every layer keeps its active ones.

    Args:
        held: The client's sets.
        wanted: p-hat [M] of each layer.
        peer_experts: How many experts each peer holds, over all layers.
        room: What fits.
    """
    sets = [own.clone() for own in held]
    mean = sum(peer_experts) / len(peer_experts)
    change = int(mean + 0.5) - sum(int(own.sum()) for own in sets)
    ranked = [(float(wanted[layer][e]), layer, e) for layer, own in enumerate(sets) for e in range(len(own))]
    if change > 0:
        outside = [place for place in ranked if not sets[place[1]][place[2]] and place[0] > 0]
        for _, layer, expert in sorted(outside, key=lambda place: (-place[0], *place[1:]))[:change]:
            counts = [int(own.sum()) for own in sets]
            counts[layer] += 1
            sets[layer][expert] = room.used(counts) <= room.limit
    for _, layer, expert in sorted(place for place in ranked if sets[place[1]][place[2]]):
        if change < 0 and int(sets[layer].sum()) > room.least[layer]:
            sets[layer][expert] = False
            change += 1
    return sets
