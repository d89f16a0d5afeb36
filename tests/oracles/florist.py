"""FLoRIST with whole matrices: singular values one by one, until their squares reach the threshold."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_ranks(matrix: Tensor, threshold: float) -> int:
    """p = min{k : sum_{j<=k} sigma_j^2 / sum_j sigma_j^2 >= tau} of one matrix [out, in]; 1 of zeros."""
    values = torch.linalg.svdvals(matrix.double()).tolist()
    whole = sum(value**2 for value in values)
    held = 0.0
    for count, value in enumerate(values, 1):
        held += value**2
        if whole == 0 or held / whole >= threshold:
            return count
    return len(values)


def cut(matrix: Tensor, threshold: float) -> Tensor:
    """B_g A_g, the first p terms sigma_j u_j v_j of one matrix."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    total = torch.zeros_like(matrix, dtype=torch.float64)
    for index in range(kept_ranks(matrix, threshold)):
        total += s[index] * torch.outer(u[:, index], vh[index])
    return total


def by_the_papers_route(downs: list[Tensor], ups: list[Tensor]) -> Tensor:
    """Singular values of the stacked product as in lines 5 and 6: by P = S_B V_B U_A S_A, in fp64."""
    stacked_up, stacked_down = torch.cat(ups, dim=1).double(), torch.cat(downs, dim=0).double()
    _, s_b, v_b = torch.linalg.svd(stacked_up, full_matrices=False)
    u_a, s_a, _ = torch.linalg.svd(stacked_down, full_matrices=False)
    return torch.linalg.svdvals(s_b.diag() @ v_b @ u_a @ s_a.diag())
