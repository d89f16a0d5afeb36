"""Fed-SB's equations, written as loops over experts and clients, with torch's own full decomposition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Returns sum_c w_c x_c / sum_c w_c in fp64."""
    total = torch.zeros_like(values[0], dtype=torch.float64)
    for value, weight in zip(values, weights, strict=True):
        total += weight * value.double()
    return total / sum(weights)


def start(gradient: Tensor, rank: int, step_size: float) -> Tensor:
    """Returns the best approximation of rank r of -eta sign(G), of one matrix G [out, in]."""
    signs = torch.zeros_like(gradient, dtype=torch.float64)
    for row in range(gradient.shape[0]):
        for column in range(gradient.shape[1]):
            value = float(gradient[row, column])
            signs[row, column] = -step_size * (1.0 if value > 0 else -1.0 if value < 0 else 0.0)
    u, s, vh = torch.linalg.svd(signs)
    total = torch.zeros_like(signs)
    for index in range(rank):
        total += s[index] * torch.outer(u[:, index], vh[index])
    return total


def sketched_gradient(gradient: Tensor, omega: Tensor, psi: Tensor) -> Tensor:
    """Returns what is left of G after its two sketches: Q (Psi Q)^+ Psi G with Q an orthonormal basis of G Omega."""
    left, right = gradient.double() @ omega.double(), psi.double() @ gradient.double()
    u, s, _ = torch.linalg.svd(left, full_matrices=False)
    basis = u[:, s > 1e-9 * s.max()]
    return basis @ torch.linalg.pinv(psi.double() @ basis) @ right


def update(up: Tensor, middle: Tensor, down: Tensor) -> Tensor:
    """Returns B R A in fp64."""
    return up.double() @ middle.double() @ down.double()
