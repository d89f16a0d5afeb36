"""Low-rank factors against dense products and dense singular value decompositions in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedguild.methods.hetlora import product_norm
from fedguild.server.low_rank import Factors, by_module, decompose, stack, truncate
from tests.oracles.low_rank import best_approximation, dense_product, dense_sum, frobenius

SIZES = [
    pytest.param((), 7, 5, id="a linear layer"),
    pytest.param((3,), 6, 9, id="experts"),
    pytest.param((2, 3), 4, 4, id="two leading dimensions"),
    pytest.param((1,), 1, 8, id="one output"),
    pytest.param((), 8, 1, id="one input"),
]
RANKS = [[1], [2, 3, 5], [1, 1], [4, 20], [3, 0, 2]]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


def random_factors(lead: tuple[int, ...], out: int, inputs: int, rank: int, seed: int, dtype=torch.float64) -> Factors:
    rng = torch.Generator().manual_seed(seed)
    down, up = (torch.randn(*lead, *size, generator=rng, dtype=torch.float64) for size in ((rank, inputs), (out, rank)))
    return Factors(down.to(dtype), up.to(dtype))


def clients(lead, out, inputs, ranks, dtype) -> tuple[list[Factors], list[float]]:
    parts = [random_factors(lead, out, inputs, rank, seed, dtype) for seed, rank in enumerate(ranks)]
    return parts, [0.3 + 0.4 * index for index in range(len(parts))]


def dense(factors: Factors) -> Tensor:
    return dense_product(factors.down, factors.up)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("lead", "out", "inputs"), SIZES)
def test_stacked_factors_are_the_weighted_sum(lead, out, inputs, ranks, dtype) -> None:
    parts, weights = clients(lead, out, inputs, ranks, dtype)
    found = stack(iter(zip(parts, weights, strict=True)))
    assert found.rank == sum(ranks)
    assert found.down.dtype == found.up.dtype == dtype
    close(dense(found), dense_sum([(part.down, part.up) for part in parts], weights), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("lead", "out", "inputs"), SIZES)
def test_a_decomposition_is_that_of_the_dense_sum(lead, out, inputs, ranks, dtype) -> None:
    parts, weights = clients(lead, out, inputs, ranks, dtype)
    expected = dense_sum([(part.down, part.up) for part in parts], weights)
    svd = decompose(stack(zip(parts, weights, strict=True)))
    size = min(sum(ranks), out, inputs)
    assert (svd.u.shape, svd.s.shape, svd.vh.shape) == ((*lead, out, size), (*lead, size), (*lead, size, inputs))
    assert svd.u.dtype == svd.s.dtype == svd.vh.dtype == dtype
    close(svd.u @ torch.diag_embed(svd.s) @ svd.vh, expected, dtype)
    close(svd.s, torch.linalg.svdvals(expected)[..., :size], dtype)
    close(svd.u.mT @ svd.u, torch.eye(size).expand(*lead, size, size), dtype)
    close(svd.vh @ svd.vh.mT, torch.eye(size).expand(*lead, size, size), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rank", [1, 2, 4, 50])
@pytest.mark.parametrize(("lead", "out", "inputs"), SIZES)
def test_a_truncation_is_the_nearest_matrix_of_its_rank(lead, out, inputs, rank, dtype) -> None:
    parts, weights = clients(lead, out, inputs, [2, 3, 5], dtype)
    expected = dense_sum([(part.down, part.up) for part in parts], weights)
    found = truncate(decompose(stack(zip(parts, weights, strict=True))), rank)
    assert found.rank == min(rank, out, inputs)
    close(dense(found), best_approximation(expected, rank), dtype)


@pytest.mark.parametrize("zero", ["down", "up", "both"])
def test_zero_factors_of_one_expert(zero: str) -> None:
    part = random_factors((3,), 6, 5, 2, 1)
    for side in (part.down, part.up) if zero == "both" else (getattr(part, zero),):
        side[1] = 0
    svd = decompose(part)
    assert (svd.s[1] == 0).all()
    assert (svd.s[0] > 0).all()
    close(svd.u.mT @ svd.u, torch.eye(2).expand(3, 2, 2), torch.float64)
    close(svd.vh @ svd.vh.mT, torch.eye(2).expand(3, 2, 2), torch.float64)
    close(dense(truncate(svd, 2)), dense(part), torch.float64)
    assert product_norm(part)[1] == 0


def test_the_sign_does_not_depend_on_that_of_the_factors() -> None:
    part = random_factors((4,), 6, 5, 3, 2)
    first, second = decompose(part), decompose(Factors(-part.down, -part.up))
    for found in (first, second):
        largest = found.u.gather(-2, found.u.abs().argmax(-2, keepdim=True))
        assert (largest > 0).all()
    close(second.u, first.u, torch.float64)
    close(second.vh, first.vh, torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rank", [1, 3, 20])
@pytest.mark.parametrize(("lead", "out", "inputs"), SIZES)
def test_the_norm_of_a_product(lead, out, inputs, rank, dtype) -> None:
    part = random_factors(lead, out, inputs, rank, 5, dtype)
    found = product_norm(part)
    assert found.shape == lead
    close(found, frobenius(dense(part)), dtype)


def test_a_product_that_cancels_has_no_negative_square() -> None:
    """Of 50 products that are zero, the sum of squares of some rounds to below it."""
    part = random_factors((50,), 30, 40, 3, 0, torch.float32)
    both = stack([(part, 1.0), (part, -1.0)])
    squares = ((both.up.mT @ both.up) * (both.down @ both.down.mT)).sum((-2, -1))
    assert (squares < 0).any()
    found = product_norm(both)
    assert ((found >= 0) & (found < 1e-1)).all()


def test_factors_that_make_no_product() -> None:
    for down, up in (((2, 5), (4, 3)), ((2, 5), (3, 4, 2)), ((5,), (4, 2)), ((3, 2, 5), (2, 4, 2))):
        with pytest.raises(ValueError, match="do not form a product"):
            Factors(torch.zeros(down), torch.zeros(up))


@pytest.mark.parametrize(("lead", "out", "inputs"), [((2,), 4, 3), ((), 5, 3), ((), 4, 2)])
def test_products_of_other_sizes(lead, out, inputs) -> None:
    with pytest.raises(ValueError, match="cannot be added"):
        stack([(random_factors((), 4, 3, 2, 0), 1.0), (random_factors(lead, out, inputs, 2, 0), 1.0)])


def test_a_lone_factor() -> None:
    with pytest.raises(ValueError, match=r"Only one of lora_A and lora_B is present for q_proj"):
        by_module(
            {"q_proj.lora_A": torch.zeros(2, 5), "k_proj.lora_A": torch.zeros(2, 5), "k_proj.lora_B": torch.zeros(4, 2)}
        )
