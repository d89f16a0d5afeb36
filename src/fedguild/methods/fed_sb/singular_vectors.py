"""Leading singular vectors by subspace iteration, and random orthonormal ones (lines 3 and 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedguild.server.low_rank import Factors, Svd, decompose

OVERSAMPLING = 10
"""Number of extra columns, beyond the rank, in the search for the range of a matrix."""


def leading(matrix: Tensor, rank: int, rng: torch.Generator, iterations: int = 10) -> Svd:
    """Returns the leading singular values and vectors, found by subspace iteration from a random start.

    Exact if rank + 10 reaches the smaller side of the matrix.

    Args:
        matrix: [.., out, in].
        rank: Number of singular values; at most the smaller side.
        rng: Draws the start.
        iterations: Products with the matrix and its transpose, after the first.
    """
    outputs, inputs = matrix.shape[-2:]
    start = torch.randn(inputs, min(rank + OVERSAMPLING, outputs, inputs), generator=rng).to(matrix)
    basis, _ = torch.linalg.qr(matrix @ start)
    for _ in range(iterations):
        basis, _ = torch.linalg.qr(matrix.mT @ basis)
        basis, _ = torch.linalg.qr(matrix @ basis)
    svd = decompose(Factors(down=basis.mT @ matrix, up=basis))
    return Svd(svd.u[..., :rank], svd.s[..., :rank], svd.vh[..., :rank, :])


def random_orthonormal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Returns [.., rows, columns] with random orthonormal columns, rows ≥ columns."""
    basis: Tensor = torch.linalg.qr(torch.randn(shape, generator=rng)).Q
    return basis
