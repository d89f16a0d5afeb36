"""Figures of a round of UB-SMoE against Eq. 62 and 63."""

from __future__ import annotations

import pytest
import torch

from fedguild.methods.ub_smoe.observations import correlation, evenness, following
from tests.oracles import ub_smoe as oracle
from tests.server.test_utilisation import RATES


@pytest.mark.parametrize("size", [2, 5, 64])
def test_correlation(size: int) -> None:
    rng = torch.Generator().manual_seed(size)
    phi, rate = torch.randn(2, size, generator=rng, dtype=torch.float64)
    rate[-1] = rate[0]
    x, y = rate.tolist(), phi.tolist()
    if size == 2:
        assert correlation(phi, rate) == correlation(phi, torch.zeros(2))
        return
    pearson, spearman, slope = correlation(phi, rate)
    assert pearson == pytest.approx(oracle.pearson(y, x), rel=1e-9)
    assert spearman == pytest.approx(oracle.pearson(oracle.ranks(y), oracle.ranks(x)), rel=1e-9)
    assert slope == pytest.approx(oracle.slope(x, y), rel=1e-9)


def test_correlation_of_what_does_not_vary_is_zero() -> None:
    still, moving = torch.zeros(4), torch.arange(4.0)
    for pair in ((still, moving), (moving, still), (moving[:1], moving[:1])):
        assert correlation(*pair) == (0.0, 0.0, 0.0)


def test_observations_have_a_row_for_each_layer() -> None:
    rates = [torch.tensor(rate) for rate in (RATES[0], RATES[3])]
    phi = [torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.tensor([-0.5, 0.2, 0.1, 0.3])]
    seen = evenness(rates, ["layer 0", "layer 1"])
    assert seen.values.shape == (2, len(seen.columns))
    assert seen.values[1].tolist() == pytest.approx(
        [oracle.entropy(RATES[3]), oracle.entropy([u / 2 for u in RATES[3]]), oracle.gini(RATES[3])], rel=1e-6
    )
    seen = following(list(zip(phi, rates, strict=True)), ["layer 0", "layer 1"])
    assert list(seen.rows) == ["layer 0", "layer 1", "all layers"]
    assert seen.values[0].tolist() == [0.0, 0.0, 0.0]
    x, y = [u for rate in (RATES[0], RATES[3]) for u in rate], torch.cat(phi).tolist()
    assert float(seen.values[2, 0]) == pytest.approx(oracle.pearson(x, y), rel=1e-5)
