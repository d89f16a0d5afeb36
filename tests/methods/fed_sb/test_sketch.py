"""Matrices rebuilt from their sketches, and leading singular vectors, against torch's full decompositions."""

from __future__ import annotations

import pytest
import torch

from fedguild.core.seeding import torch_rng
from fedguild.methods.fed_sb.singular_vectors import leading
from fedguild.methods.fed_sb.sketch import reconstructed


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch_rng(seed, "normal"), dtype=torch.float64)


def sketched(matrix: torch.Tensor, size: int) -> torch.Tensor:
    omega = normal(matrix.shape[-1], size, seed=1).sign()
    psi = normal(2 * size + 1, matrix.shape[-2], seed=2).sign()
    found = reconstructed(matrix @ omega, psi @ matrix, psi)
    assert found.rank == min(size, matrix.shape[-2])
    return found.up @ found.down


@pytest.mark.parametrize(("outputs", "inputs"), [(9, 14), (14, 9), (12, 12)])
@pytest.mark.parametrize("rank", [1, 4])
def test_a_matrix_of_low_rank_comes_back_exactly(outputs, inputs, rank):
    """Also where the sketch is wider than the rank, and for several matrices at once."""
    matrix = normal(3, outputs, rank, seed=3) @ normal(3, rank, inputs, seed=4)
    for size in (rank, rank + 3):
        torch.testing.assert_close(sketched(matrix, size), matrix, rtol=1e-9, atol=1e-9)


def test_a_sketch_as_wide_as_the_matrix_loses_nothing():
    matrix = normal(7, 5)
    torch.testing.assert_close(sketched(matrix, 9), matrix, rtol=1e-9, atol=1e-9)


def test_rows_and_columns_of_zeros_stay_zero_bit_by_bit():
    """Of units that never were active, in a matrix of a lower rank than the sketch: not rounding, which has a sign."""
    matrix = (normal(2, 30, 4, seed=3) @ normal(2, 4, 25, seed=4)).float()
    matrix[0, 3], matrix[1, :, 7] = 0.0, 0.0
    omega, psi = normal(25, 9, seed=1).sign().float(), normal(19, 30, seed=2).sign().float()
    found = reconstructed(matrix @ omega, psi @ matrix, psi)
    product = found.up @ found.down
    assert torch.equal(product.sign(), matrix.sign())
    assert not product[0, 3].any()
    assert not product[1, :, 7].any()


def test_the_error_is_near_that_of_the_best_approximation():
    """Of half the rank: 8 times its square at most on average (Tropp et al., Theorem 4.3, for l = 2 k + 1)."""
    u, _ = torch.linalg.qr(normal(60, 60, seed=5))
    v, _ = torch.linalg.qr(normal(40, 40, seed=6))
    s = torch.logspace(0, -3, 40, dtype=torch.float64)
    matrix = u[:, :40] * s @ v.T
    errors = [float((sketched(matrix, size) - matrix).norm()) for size in (6, 12, 24)]
    least = [float(s[size // 2 :].norm()) for size in (6, 12, 24)]
    assert all(error < 8**0.5 * best for error, best in zip(errors, least, strict=True))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (40, 40), (3, 20, 25)])
def test_the_leading_singular_vectors_are_torchs(shape):
    """Of matrices whose spectrum falls; signs are fixed, and vectors orthonormal."""
    u, s, vh = torch.linalg.svd(normal(*shape), full_matrices=False)
    s = s * 0.6 ** torch.arange(s.shape[-1])
    matrix = u * s[..., None, :] @ vh
    found = leading(matrix, 4, torch_rng(0, "start"))
    torch.testing.assert_close(found.s, s[..., :4], rtol=1e-8, atol=1e-8)
    best = u[..., :4] * s[..., None, :4] @ vh[..., :4, :]
    torch.testing.assert_close(found.u * found.s[..., None, :] @ found.vh, best, rtol=1e-7, atol=1e-7)
    eye = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(found.u.mT @ found.u, eye.expand(*shape[:-2], 4, 4))
    torch.testing.assert_close(found.vh @ found.vh.mT, eye.expand(*shape[:-2], 4, 4))
    assert bool((found.u.gather(-2, found.u.abs().argmax(-2, keepdim=True)) > 0).all())
