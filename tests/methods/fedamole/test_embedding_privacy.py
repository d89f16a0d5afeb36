"""The noise on embeddings: a Gamma radius in a uniform direction, and the clip."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedguild.core.seeding import numpy_rng
from fedguild.methods.fedamole.embedding_privacy import privatised

DRAWS = 4000
FREE = 1e9
"""A bound that clips nothing."""


def noise(width: int, eta: float, draws: int = DRAWS) -> Tensor:
    """[draws, width], what is added to embeddings before the clip."""
    embeddings = torch.ones(draws, width, dtype=torch.float64)
    return privatised(embeddings, eta, FREE, numpy_rng(0, "noise")) - embeddings


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("eta", [0.5, 5.0])
def test_radii_follow_gamma(width: int, eta: float) -> None:
    """Kolmogorov-Smirnov against Gamma(shape r, rate eta); a wrong shape or scale has a p-value of nearly 0."""
    radii = noise(width, eta).norm(dim=1).numpy()
    assert stats.kstest(radii, stats.gamma(a=width, scale=1 / eta).cdf).pvalue > 0.01
    assert stats.kstest(radii, stats.gamma(a=width + 1, scale=1 / eta).cdf).pvalue < 1e-6
    assert radii.mean() == pytest.approx(width / eta, rel=0.05)


@pytest.mark.parametrize("width", [2, 8])
def test_directions_are_uniform(width: int) -> None:
    """Mean 0 and covariance I / r; each coordinate, squared, is Beta(1/2, (r-1)/2) on the sphere."""
    drawn = noise(width, 2.0)
    directions = (drawn / drawn.norm(dim=1, keepdim=True)).numpy()
    assert np.abs(directions.mean(axis=0)).max() < 4 / np.sqrt(width * DRAWS)
    assert np.abs(directions.T @ directions / DRAWS - np.eye(width) / width).max() < 0.03
    for coordinate in directions.T:
        assert stats.kstest(coordinate**2, stats.beta(0.5, (width - 1) / 2).cdf).pvalue > 1e-3


def test_radius_and_direction_are_independent() -> None:
    drawn = noise(8, 2.0)
    radius = drawn.norm(dim=1)
    for coordinate in (drawn / radius[:, None]).T:
        assert abs(stats.spearmanr(radius.numpy(), coordinate.abs().numpy()).statistic) < 4 / np.sqrt(DRAWS)


def test_each_is_clipped_to_its_own_norm() -> None:
    """Strong noise is clipped, weak noise outward too, and what falls inside stays as it is."""
    embeddings = torch.randn(500, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    free = privatised(embeddings, 4.0, FREE, numpy_rng(3, "noise"))
    found = privatised(embeddings, 4.0, None, numpy_rng(3, "noise"))
    limit = embeddings.norm(dim=1)
    outside = free.norm(dim=1) > limit
    assert 0 < int(outside.sum()) < 500
    torch.testing.assert_close(found[~outside], free[~outside])
    torch.testing.assert_close(found[outside].norm(dim=1), limit[outside])
    torch.testing.assert_close(torch.cosine_similarity(found, free), torch.ones(500, dtype=torch.float64))


def test_a_given_bound_replaces_the_own_norm() -> None:
    found = privatised(torch.randn(200, 4), 0.1, 0.5, numpy_rng(0, "noise"))
    assert found.dtype is torch.float32
    assert float(found.norm(dim=1).max()) <= 0.5 * (1 + 1e-6)


def test_a_zero_embedding_stays_zero() -> None:
    """Its own norm is the bound; with a bound of its own it is noise alone."""
    assert privatised(torch.zeros(8), 1.0, None, numpy_rng(0, "noise")).tolist() == [0.0] * 8
    assert privatised(torch.zeros(8), 1.0, 2.0, numpy_rng(0, "noise")).norm() > 0
