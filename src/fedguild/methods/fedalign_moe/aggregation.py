"""FedAlign-MoE's server arithmetic: the reference of the routing, and the clients' weights in an expert.

Source: Fang et al., "Aggregation Alignment for Federated Learning with Mixture-of-Experts under
Data Heterogeneity", Eq. 4, 6, 7 and 13-18. Pure functions over N clients, in fp64.

No pair of whole updates has to be in memory: all cosines of an expert come from one Gram matrix
[n, n], added up over blocks of columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedguild.methods.fedalign_moe.parts import from_expert_vectors
from fedguild.methods.fedalign_moe.regulariser import SMALLEST

COLUMNS = 2**18
"""Columns of the updates that are multiplied at once."""


def overlap(routing: Tensor) -> Tensor:
    """Returns o [N, M], o_i(e) = p-bar_i(e) · mean_j p-bar_j(e) (Eq. 4), of p-bar [N, M]."""
    return routing * routing.mean(dim=0)


def consistency_weights(overlaps: Tensor, margins: Tensor) -> Tensor:
    """Returns omega [N, M], s = o · m over its sum by expert (Eq. 6).

    Args:
        overlaps: [N, M] o.
        margins: [N, M] m.

    Returns:
        Weights that sum to one for each expert: 1 / N where all s are zero.
    """
    scores = overlaps * margins
    totals = scores.sum(dim=0)
    return torch.where(totals > 0, scores / totals, 1 / len(scores))


def global_reference(routing: Tensor, weights: Tensor) -> Tensor:
    """Returns p_g [M] = sum_i omega_i p-bar_i (Eq. 7), scaled to sum to one: Eq. 7 alone need not.

    Args:
        routing: [N, M] p-bar; at least one row is not zero.
        weights: [N, M] omega.
    """
    mixed = (weights * routing).sum(dim=0)
    return mixed / mixed.sum()


def distances(routing: Tensor, reference: Tensor) -> Tensor:
    """Returns KL(p-bar_i || p_g) [N] over all experts, in nats: the distance of each client's gate to the reference.

    Args:
        routing: [N, M] p-bar.
        reference: [M] p_g; where it is 0, it counts as 1e-8.
    """
    ratio = routing.clamp(min=SMALLEST) / reference.clamp(min=SMALLEST)
    return (routing * ratio.log()).sum(dim=1)


def gram(rows: Tensor) -> Tensor:
    """Returns the products [n, n] in fp64 of the rows [n, P], without a copy of them in fp64."""
    total = rows.new_zeros(len(rows), len(rows), dtype=torch.float64)
    for block in rows.split(COLUMNS, dim=1):
        total.addmm_(block.double(), block.double().T)
    return total


def product_gram(updates: Tensor, before: Mapping[str, Tensor]) -> Tensor:
    """Returns the products [n, n] in fp64 of the changes of B A, which are never formed.

    With A' = A + dA and B' = B + dB, B' A' - B A = dB A' + B dA = U V, a product of rank 2 r, and
    the inner product of U_i V_i and U_j V_j is the sum over the ranks of (U_i^T U_j) * (V_i V_j^T).

    Args:
        updates: [n, P] the clients' expert vectors (`expert_vectors`) of dA and dB.
        before: Name -> A [r, in] and B [out, r] of each projection, as the clients received them.
    """
    changes = from_expert_vectors(updates, {name: value[None] for name, value in before.items()})
    total = updates.new_zeros(len(updates), len(updates), dtype=torch.float64)
    for name in before:
        if name.endswith("lora_A"):
            other = f"{name.removesuffix('lora_A')}lora_B"
            down, up = changes[name].double(), changes[other].double()
            left = torch.cat([up, before[other].double().expand_as(up)], dim=2)
            right = torch.cat([down + before[name].double(), down], dim=1)
            lefts = torch.einsum("ior,jos->ijrs", left, left)
            rights = torch.einsum("irk,jsk->ijrs", right, right)
            total += (lefts * rights).sum(dim=(2, 3))
    return total


def cosines(products: Tensor) -> Tensor:
    """Returns the cosines [n, n] of vectors with these inner products (Eq. 13); 0 where a norm is zero."""
    norms = products.diagonal().clamp(min=0).sqrt()
    scale = norms[:, None] * norms[None, :]
    return torch.where(scale > 0, products / scale, 0.0).clamp(-1, 1)


def adaptive_threshold(similarity: Tensor, tolerance: float) -> float:
    """Returns tau = M - beta · Sigma of the similarities [n, n], a client's with itself included (Eq. 16, 17)."""
    return float(similarity.mean() - tolerance * similarity.std(correction=0))


def pair_weights(similarity: Tensor, direction: Tensor | None, threshold: float, temperature: float = 1.0) -> Tensor:
    """Returns gamma [n, n] = sigmoid((S - tau) / temperature) · max(0, D) (Eq. 14 and 18 at temperature 1).

    Args:
        similarity: [n, n] S, cosines of the clients' input regions.
        direction: [n, n] D, cosines of their updates; None leaves the second factor out.
        threshold: tau.
        temperature: The temperature of the sigmoid.
    """
    gate = torch.sigmoid((similarity - threshold) / temperature)
    return gate if direction is None else gate * direction.clamp(min=0)


def client_weights(pairs: Tensor) -> Tensor:
    """Returns each client's weight [n] in the update of an expert (Eq. 15); all zero where all pairs are."""
    total = pairs.sum()
    return pairs.sum(dim=1) / total if total > 0 else pairs.new_zeros(len(pairs))


def combined(rows: Tensor, weights: Tensor) -> Tensor:
    """Returns sum_i w_i row_i [P] in fp32, of rows [n, P] and weights [n]."""
    blocks = [(weights @ block.double()).float() for block in rows.split(COLUMNS, dim=1)]
    return torch.cat(blocks)
