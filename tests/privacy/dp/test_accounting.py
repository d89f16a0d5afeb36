"""The account is the library's: the same events, composed one by one, cost the same."""

from __future__ import annotations

import math
import sys

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from scipy.optimize import brentq
from scipy.stats import norm

from fedguild.core.errors import ConfigError
from fedguild.privacy.dp.accounting import (
    COARSER_BELOW,
    GRID,
    SOLVED_TO,
    Release,
    epsilon,
    event_of,
    noise_for,
    require_library,
)

DELTA = 1e-5


def one_by_one(accountant: dp_accounting.PrivacyAccountant, *events: dp_accounting.DpEvent) -> float:
    for event in events:
        accountant.compose(event)
    return float(accountant.get_epsilon(DELTA))


def test_gaussian_noise_costs_what_the_library_says() -> None:
    expected = one_by_one(
        pld.PLDAccountant(value_discretization_interval=GRID), *[dp_accounting.GaussianDpEvent(8.0)] * 3
    )
    assert epsilon([Release(8.0, 3)], DELTA) == pytest.approx(expected, rel=1e-3)
    assert epsilon([Release(8.0), Release(8.0, 2)], DELTA) == epsilon([Release(8.0, 3)], DELTA)


def test_a_release_without_noise_has_no_finite_epsilon() -> None:
    assert epsilon([Release(1.0), Release(0.0)], DELTA) == math.inf
    assert one_by_one(pld.PLDAccountant(), event_of(Release(0.0, 3))) == math.inf


def test_poisson_sampling_costs_what_the_library_says() -> None:
    step = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(4.0))
    whole = dp_accounting.GaussianDpEvent(9.0)
    expected = one_by_one(pld.PLDAccountant(value_discretization_interval=GRID), step, step, step, whole)
    found = epsilon([Release(4.0, 3, 0.1), Release(9.0)], DELTA)
    assert found == pytest.approx(expected, rel=1e-3)
    assert found < epsilon([Release(4.0, 3), Release(9.0)], DELTA)


def test_sampling_without_replacement_costs_what_the_library_says() -> None:
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    round_ = dp_accounting.SampledWithoutReplacementDpEvent(20, 4, dp_accounting.GaussianDpEvent(3.0))
    expected = one_by_one(rdp.RdpAccountant(neighboring_relation=relation), round_, round_)
    assert epsilon([Release(3.0, 2, drawn=4, drawn_from=20)], DELTA) == pytest.approx(expected, rel=1e-9)
    all_of_them = epsilon([Release(3.0, 2, drawn=20, drawn_from=20)], DELTA)
    assert all_of_them == epsilon([Release(3.0, 2)], DELTA)
    assert all_of_them < one_by_one(rdp.RdpAccountant(), *[dp_accounting.GaussianDpEvent(3.0)] * 2)


@pytest.mark.long
@pytest.mark.parametrize("probability", [1.0, 0.1])
def test_little_noise_is_accounted_on_a_coarser_grid(probability: float) -> None:
    """It is within a ten-thousandth of what the grid of larger noise gives."""
    noise = COARSER_BELOW / 2
    fine = one_by_one(
        pld.PLDAccountant(value_discretization_interval=GRID), *[event_of(Release(noise, 3, probability))]
    )
    assert epsilon([Release(noise, 3, probability)], DELTA) == pytest.approx(fine, rel=1e-4)


@pytest.mark.long
def test_a_target_of_little_noise_is_solved_on_the_coarser_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """No accountant of the search has the fine grid, and the epsilon that is then reported keeps the target."""
    grids = []
    library = pld.PLDAccountant
    monkeypatch.setattr(pld, "PLDAccountant", lambda **given: grids.append(given) or library(**given))
    noise = noise_for(1500, DELTA, lambda sigma: Release(sigma, 5))
    searched = [given["value_discretization_interval"] for given in grids]
    assert noise < COARSER_BELOW
    assert searched[-1] > 2 * GRID
    assert epsilon([Release(noise, 5)], DELTA) <= 1500


def test_the_grid_has_no_more_points_for_less_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1e-3 it would have forty million points at a noise multiplier of 0.01, and take more than a minute."""
    grids = []
    library = pld.PLDAccountant
    monkeypatch.setattr(pld, "PLDAccountant", lambda **given: grids.append(given) or library(**given))
    exact = gaussian_epsilon(0.01)
    assert exact <= epsilon([Release(0.01)], DELTA) <= exact * (1 + 1e-3)
    epsilon([Release(0.01, 1), Release(8.0)], DELTA)
    epsilon([Release(7.0)], DELTA)
    assert [given["value_discretization_interval"] for given in grids] == pytest.approx([0.1, 0.1, GRID])


def gaussian_epsilon(noise: float) -> float:
    """Returns the exact epsilon of one Gaussian release (Balle and Wang, "Improving the Gaussian Mechanism for
    Differential Privacy", ICML 2018, theorem 8)."""

    def excess(value: float) -> float:
        first = norm.cdf(1 / (2 * noise) - value * noise)
        return float(first - math.exp(value + norm.logcdf(-1 / (2 * noise) - value * noise)) - DELTA)

    return float(brentq(excess, 0, 1 / noise**2))


def test_a_sample_costs_no_more_than_all() -> None:
    """Whose bound is the smaller one where nearly all are drawn."""
    every = epsilon([Release(0.5, 10)], 1e-5)
    assert epsilon([Release(0.5, 10, drawn=99, drawn_from=100)], 1e-5) == every
    assert epsilon([Release(0.5, 10, drawn=5, drawn_from=100)], 1e-5) < every / 3


@pytest.mark.parametrize("target", [9.45, *(pytest.param(each, marks=pytest.mark.long) for each in (7.6, 11.3, 20.0))])
def test_a_target_is_solved_by_the_smaller_bound(target: float) -> None:
    """At a noise multiplier of 2 that of the samples is 11.4 here, and that of all in their place 7.5."""
    noise = noise_for(target, 1e-5, lambda sigma: Release(sigma, 10, drawn=9, drawn_from=10))
    found = [epsilon([Release(each, 10, drawn=9, drawn_from=10)], 1e-5) for each in (noise, noise - 0.01)]
    assert found[0] <= target < found[1]


def test_many_releases_of_little_noise_are_accounted_as_one_of_less() -> None:
    """Gaussian noise n times costs what it does once at 1/√n; the grid is that of the latter, too."""
    often, once = (epsilon([release], 1e-5) for release in (Release(0.5, 100), Release(0.05)))
    assert often == pytest.approx(once, rel=1e-3)


def test_nothing_released_costs_nothing() -> None:
    assert epsilon([], DELTA) == 0.0
    assert epsilon([Release(1.0, 0)], DELTA) == 0.0


@pytest.mark.parametrize("target", [0.9, 12.0])
def test_a_target_is_reached_with_the_smallest_noise(target: float) -> None:
    noise = noise_for(target, DELTA, lambda sigma: Release(sigma, 5))
    assert epsilon([Release(noise, 5)], DELTA) <= target
    assert epsilon([Release(noise - 2 * SOLVED_TO, 5)], DELTA) > target


def test_a_target_out_of_reach_is_said() -> None:
    with pytest.raises(ConfigError, match="No noise multiplier"):
        noise_for(1e-9, DELTA, lambda sigma: Release(sigma, 5, drawn=2, drawn_from=2))


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"fedguild\[privacy\]"):
        require_library()
