"""Adjustment of a client's sets in FedMoE's stage 2, to those of the clients that use their experts alike.

Source: Mei et al., "FedMoE: Personalized Federated Learning via Heterogeneous Mixture of Experts", 2024,
Eq. 4 to 6. A layer's p [M] are the shares of its experts in the activations, and a set is a bool [M].
Ties go to the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedguild.methods.fedmoe.fitting import Limits


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
        client: The client whose peers are wanted.
        known: [n] bool, the clients that can be peers.
        count: K.
    """
    order = similarity[client].argsort(descending=True, stable=True).tolist()
    return [other for other in order if other != client and bool(known[other])][:count]


def recommendation(similarity: Tensor, activation: Tensor) -> Tensor | None:
    """Returns p-hat [D], the peers' p weighted by their similarity (Eq. 6); None if the weights sum to zero.

    Args:
        similarity: [K] similarity to each peer.
        activation: [K, D] the peers' p.
    """
    total = float(similarity.sum())
    return (similarity.double() @ activation.double()) / total if total > 0 else None


def adjusted_sets(
    held: Sequence[Tensor], wanted: Sequence[Tensor], peer_experts: Sequence[int], limits: Limits
) -> list[Tensor]:
    """Returns sets of about as many experts as the peers hold, by what they recommend.

    n = mean(n_peers) - n_own, rounded. Where n > 0 the n experts with the largest p-hat that are not held
    come in, except those that no peer activated, and as far as they fit; else the |n| with the smallest go,
    as long as every layer keeps enough experts for its active ones.

    Args:
        held: The client's sets.
        wanted: p-hat [M] of each layer.
        peer_experts: Number of experts that each peer holds, over all layers.
        limits: What the client can hold.
    """
    sets = [mask.clone() for mask in held]
    mean = sum(peer_experts) / len(peer_experts)
    change = int(mean + 0.5) - sum(int(mask.sum()) for mask in sets)
    ranked = [(float(wanted[layer][e]), layer, e) for layer, mask in enumerate(sets) for e in range(len(mask))]
    if change > 0:
        outside = [place for place in ranked if not sets[place[1]][place[2]] and place[0] > 0]
        for _, layer, expert in sorted(outside, key=lambda place: (-place[0], *place[1:]))[:change]:
            counts = [int(mask.sum()) for mask in sets]
            counts[layer] += 1
            sets[layer][expert] = limits.used(counts) <= limits.most
    for _, layer, expert in sorted(place for place in ranked if sets[place[1]][place[2]]):
        if change < 0 and int(sets[layer].sum()) > limits.least[layer]:
            sets[layer][expert] = False
            change += 1
    return sets
