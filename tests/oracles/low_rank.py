"""Sums of low-rank products as dense matrices in fp64, one matrix after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_product(down: Tensor, up: Tensor) -> Tensor:
    """[.., out, in]: entry (i, j) is Σ_r up[i, r] down[r, j]."""
    down, up = down.double(), up.double()
    product = torch.zeros(*up.shape[:-1], down.shape[-1], dtype=torch.float64)
    for rank in range(down.shape[-2]):
        product += up[..., :, rank, None] * down[..., None, rank, :]
    return product


def dense_sum(parts: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float]) -> Tensor:
    """[.., out, in] of Σ_c w_c up_c down_c, from (down, up) pairs."""
    return torch.stack([w * dense_product(down, up) for (down, up), w in zip(parts, weights, strict=True)]).sum(0)


def best_approximation(dense: Tensor, rank: int) -> Tensor:
    """The nearest matrix of a rank, by the singular value decomposition of each whole matrix."""
    flat = dense.reshape(-1, *dense.shape[-2:])
    nearest = []
    for matrix in flat:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        nearest.append(sum(s[i] * torch.outer(u[:, i], vh[i]) for i in range(min(rank, len(s)))))
    return torch.stack(nearest).reshape(dense.shape)


def frobenius(dense: Tensor) -> Tensor:
    """[..], √Σ_ij x_ij²."""
    return dense.double().square().flatten(-2).sum(-1).sqrt()
