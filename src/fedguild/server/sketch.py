"""A large matrix known by two narrow products, and its leading singular vectors.

Source: J. A. Tropp, A. Yurtsever, M. Udell, V. Cevher, "Practical Sketching Algorithms for Low-Rank
Matrix Approximation", SIAM J. Matrix Anal. Appl., 2017, Algorithms 1, 4 and 7. G [out, in] is seen as
G Ω [out, k] and Ψ G [l, in] with random Ω and Ψ (`fedguild.client.gradients` takes them). Both are
linear in G, so that the mean of several clients' sketches is the sketch of their mean. Where G's rank
is at most k, nothing is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedguild.server.low_rank import Factors, Svd, decompose

OVERSAMPLING = 10
"""Columns beyond the rank with which the range of a matrix is looked for."""


def reconstructed(left: Tensor, right: Tensor, psi: Tensor) -> Factors:
    """Returns the matrix that two sketches stand for, as Q X with Q = orth(G Ω) and X = (Ψ Q)⁺ Ψ G.

    Rows and columns of zeros come back as zeros, not as what rounding makes of them.

    Args:
        left: G Ω, [.., out, k].
        right: Ψ G, [.., l, in].
        psi: Ψ, [l, out], l ≥ k.
    """
    basis, _ = torch.linalg.qr(left)
    down = torch.linalg.lstsq(psi.to(basis) @ basis, right.to(basis)).solution
    return Factors(down * right.any(-2, keepdim=True), basis * left.any(-1, keepdim=True))


def leading(matrix: Tensor, rank: int, rng: torch.Generator, iterations: int = 10) -> Svd:
    """Returns the leading singular values and vectors, found by subspace iteration from a random start.

    Exact where rank + 10 reaches the smaller side of the matrix.

    Args:
        matrix: [.., out, in].
        rank: How many; at most the smaller side.
        rng: Draws the start.
        iterations: Products with the matrix and its transpose, after the first.
    """
    outputs, inputs = matrix.shape[-2:]
    start = torch.randn(inputs, min(rank + OVERSAMPLING, outputs, inputs), generator=rng).to(matrix)
    basis, _ = torch.linalg.qr(matrix @ start)
    for _ in range(iterations):
        basis, _ = torch.linalg.qr(matrix.mT @ basis)
        basis, _ = torch.linalg.qr(matrix @ basis)
    found = decompose(Factors(down=basis.mT @ matrix, up=basis))
    return Svd(found.u[..., :rank], found.s[..., :rank], found.vh[..., :rank, :])


def random_orthonormal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Returns [.., rows, columns] with random orthonormal columns, rows ≥ columns."""
    basis: Tensor = torch.linalg.qr(torch.randn(shape, generator=rng)).Q
    return basis
