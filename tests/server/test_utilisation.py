"""Utilisation and modulation against Eq. 12-14, 62 and 63."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedguild.server.utilisation import (
    UtilisationRate,
    correlation,
    evenness,
    following,
    gini,
    next_modulation,
    rate_entropy,
    share_entropy,
    target_modulation,
)
from tests.oracles import ub_smoe as oracle

SHARES = [[0.5, 1.0, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
"""Three clients with 2, 1 and 1 active experts; the third saw no token."""
RATES = [
    [0.25, 0.25, 0.25, 0.25],
    [2.0, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0],
    [0.9, 0.3, 0.4, 0.4],
    [1.0, 0.5, 0.0],
    [0.7],
]


def rate_of(shares: list[list[float]], examples: list[int]) -> dict[str, Tensor]:
    running = UtilisationRate()
    for share, count in zip(shares, examples, strict=True):
        running.add({"layer": torch.tensor(share)}, count)
    return running.result()


def test_the_rate_by_hand() -> None:
    """p = (1/4, 3/4) of the two clients with tokens: 1/4 · 0.5 + 3/4 · 1 = 0.875, 0.25, 0, 0.125."""
    assert rate_of(SHARES, [10, 30, 60])["layer"].tolist() == pytest.approx([0.875, 0.25, 0.0, 0.125])


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_the_rate_is_equation_12s(clients: int) -> None:
    examples = [7, 2, 9][:clients]
    expected = oracle.utilisation(SHARES[:clients], examples)
    torch.testing.assert_close(rate_of(SHARES[:clients], examples)["layer"], torch.tensor(expected), rtol=1e-6, atol=0)


def test_a_layer_that_no_token_reached_has_no_rate() -> None:
    assert rate_of([SHARES[2]], [5]) == {}
    assert oracle.utilisation([SHARES[2]], [5]) is None
    assert rate_of([], []) == {}


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("zeta", [0.0, 0.9, 1.0])
def test_modulation_is_equations_13_and_14(rate: list[float], zeta: float) -> None:
    phi = torch.linspace(-0.9, 0.8, len(rate), dtype=torch.float64)
    target = target_modulation(torch.tensor(rate, dtype=torch.float64), 1.5, 1e-6)
    expected = oracle.modulation(phi.tolist(), rate, 1.5, zeta, 1e-6)
    found = next_modulation(phi, target, zeta)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert target.abs().max() <= 1


def test_modulation_by_hand() -> None:
    """M = 4, K-bar = 1: u* = 1/4; a rate of 1/2 gives tanh(-1/2), 1/4 gives 0, an unused expert nearly 1."""
    target = target_modulation(torch.tensor([0.5, 0.25, 0.0, 0.25]), 1.0, 1e-9)
    assert target.tolist() == pytest.approx([math.tanh(-0.5), 0.0, 1.0, 0.0], abs=1e-6)
    assert next_modulation(torch.tensor([0.5]), torch.tensor([1.0]), 0.9).tolist() == pytest.approx([0.55])


@pytest.mark.parametrize("rate", RATES)
def test_entropy_and_gini(rate: list[float]) -> None:
    tensor, total = torch.tensor(rate, dtype=torch.float64), sum(rate)
    shares = [u / total for u in rate] if total else rate
    assert float(rate_entropy(tensor)) == pytest.approx(oracle.entropy(rate), abs=1e-12)
    assert float(share_entropy(tensor)) == pytest.approx(oracle.entropy(shares), abs=1e-12)
    assert float(gini(tensor)) == pytest.approx(oracle.gini(rate), abs=1e-12)


@pytest.mark.parametrize("size", [2, 5, 64])
def test_correlation(size: int) -> None:
    rng = torch.Generator().manual_seed(size)
    phi, rate = torch.randn(2, size, generator=rng, dtype=torch.float64)
    rate[-1] = rate[0]
    x, y = rate.tolist(), phi.tolist()
    if size == 2:
        assert correlation(phi, rate) == correlation(phi, torch.zeros(2))
        return
    found = correlation(phi, rate)
    assert found.pearson == pytest.approx(oracle.pearson(y, x), rel=1e-9)
    assert found.spearman == pytest.approx(oracle.pearson(oracle.ranks(y), oracle.ranks(x)), rel=1e-9)
    assert found.slope == pytest.approx(oracle.slope(x, y), rel=1e-9)


def test_correlation_of_what_does_not_vary_is_zero() -> None:
    still, moving = torch.zeros(4), torch.arange(4.0)
    for pair in ((still, moving), (moving, still), (moving[:1], moving[:1])):
        found = correlation(*pair)
        assert (found.pearson, found.spearman, found.slope) == (0.0, 0.0, 0.0)


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
