"""FlexLoRA with whole matrices: ΔW = Σ p_c (α / r_c) B_c A_c and its singular value decomposition, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.oracles.low_rank import best_approximation, dense_sum


def aggregate(clients: Sequence[tuple[Tensor, Tensor]], examples: Sequence[int], alpha: float) -> Tensor:
    """ΔW [.., out, in] of clients' (A [.., r_c, in], B [.., out, r_c])."""
    weights = [n / sum(examples) * alpha / down.shape[-2] for n, (down, _) in zip(examples, clients, strict=True)]
    return dense_sum(clients, weights)


def redistribute(update: Tensor, rank: int, alpha: float) -> Tensor:
    """B_r A_r [.., out, in] as a client of a rank receives it: its LoRA scale alpha / r undone."""
    return best_approximation(update, rank) * rank / alpha


def orthonormal_rows(matrix: Tensor) -> bool:
    """Whether A Aᵀ = 1."""
    product = matrix.double() @ matrix.double().mT
    return torch.allclose(product, torch.eye(product.shape[-1], dtype=torch.float64).expand_as(product), atol=1e-5)
