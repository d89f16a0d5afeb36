"""Accounting of releases, by Google's `dp-accounting` alone.

A `Release` is translated into the library's events, and the library's accountants compute their cost. Gaussian noise,
alone or on a Poisson sample, goes to the PLD accountant, under addition or removal of one unit. The same event holds if
the number of units is fixed and one is replaced by one that contributes nothing ("zero-out": Kairouz et al., "Practical
and Private (Deep) Learning without Sampling or Shuffling", ICML 2021), because the sums have the same distribution.
`noise_multiplier` is the noise over the largest change that one unit makes to the sum under the neighbouring relation;
for one example replaced by another on a Poisson sample this event is no bound. Sampling without replacement is
supported by the RDP accountant only, under replacement of one unit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fedguild.core.errors import ConfigError

GRID = 1e-3
"""The PLD accountant's grid of privacy losses; it rounds up, so that any grid gives a bound."""
COARSER_BELOW = 0.1
"""Noise multiplier below which the grid grows as the losses do, with 1 / noise², so that it has no more points."""
SOLVED_TO = 1e-3
"""How far a solved noise multiplier may lie above the smallest that reaches the target."""
SMALLEST_NOISE, LARGEST_NOISE = 0.05, 1e4
"""Noise multipliers between which a target is solved."""


@dataclass(frozen=True, order=True)
class Release:
    """Gaussian noise on a sum over units, a number of times with the same parameters.

    Attributes:
        noise_multiplier: The noise's standard deviation over the sensitivity of the sum; 0 for no noise.
        times: Number of times.
        probability: Probability with which a unit enters the sum, independently of all others; 1 for always.
        drawn: Number of units that enter it, drawn without replacement; None for other sampling.
        drawn_from: Number of units that they are drawn from.
    """

    noise_multiplier: float
    times: int = 1
    probability: float = 1.0
    drawn: int | None = None
    drawn_from: int | None = None


IN_THE_CLEAR = Release(0.0)
"""A release without noise, after which no epsilon holds."""


def require_library() -> Any:
    """Returns the module `dp_accounting`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigError(
            f"privacy.unit needs dp-accounting, but the package '{error.name}' is not installed.",
            "Install the extra: pip install 'fedguild[privacy]'.",
        ) from error
    return dp_accounting


def event_of(release: Release) -> Any:
    """Converts a release to an event of the library (a `dp_accounting.DpEvent`)."""
    library = require_library()
    if release.noise_multiplier == 0:
        return library.NonPrivateDpEvent()
    event = library.GaussianDpEvent(release.noise_multiplier)
    if release.drawn is not None and release.drawn != release.drawn_from:
        event = library.SampledWithoutReplacementDpEvent(release.drawn_from, release.drawn, event)
    elif release.probability < 1:
        event = library.PoissonSampledDpEvent(release.probability, event)
    return library.SelfComposedDpEvent(event, release.times)


def epsilon(releases: Iterable[Release], delta: float) -> float:
    """Returns the epsilon of all releases together at a delta; 0 for none, infinite if one has no noise.

    Raises:
        ConfigError: the library is not installed.
    """
    times: Counter[Release] = Counter()
    for release in releases:
        times[replace(release, times=1)] += release.times
    merged = tuple(replace(release, times=count) for release, count in sorted(times.items(), key=str) if count)
    if any(release.noise_multiplier == 0 for release in merged):
        return math.inf
    return _epsilon(merged, delta) if merged else 0.0


def noise_for(target: float, delta: float, released: Callable[[float], Release]) -> float:
    """Returns the smallest noise multiplier, to within `SOLVED_TO`, that reaches a target epsilon.

    Args:
        target: epsilon.
        released: Noise multiplier -> everything that is released with it.

    Raises:
        ConfigError: the library is not installed, or no noise within its range reaches the target.
    """
    require_library()
    found = []
    bounds = [released]
    if released(1.0).drawn is not None:  # either bound holds, as in `epsilon`
        bounds.append(lambda noise: _of_all(released(noise)))
    for each in bounds:
        with suppress(ValueError):
            found.append(_solved(target, delta, each))
    if not found:
        raise ConfigError(
            f"No noise multiplier from {SMALLEST_NOISE:g} to {LARGEST_NOISE:g} gives an epsilon of {target:g}.",
            "Set privacy.noise_multiplier instead, or another privacy.target_epsilon.",
        )
    return min(found)


def _solved(target: float, delta: float, released: Callable[[float], Release]) -> float:
    """Returns the smallest noise multiplier by one bound.

    Raises:
        ValueError: there is none.
    """
    interval, kind = _bracket(target, delta, released), _kind((released(1.0),))
    return float(
        require_library().calibrate_dp_mechanism(
            lambda: _accountant(kind, interval.endpoint_1),
            lambda noise: event_of(released(noise)),
            target,
            delta,
            interval,
            tol=SOLVED_TO,
        )
    )


def _bracket(target: float, delta: float, released: Callable[[float], Release]) -> Any:
    """Returns an interval around the target whose ends differ by a factor of 2, the lower one first.

    Raises:
        ValueError: there is none.
    """
    noise = 1.0
    above = _bound((released(noise),), delta) > target
    while SMALLEST_NOISE <= noise <= LARGEST_NOISE:
        following = noise * 2 if above else noise / 2
        if (_bound((released(following),), delta) > target) != above:
            interval = require_library().ExplicitBracketInterval
            return interval(*sorted((noise, following)))
        noise = following
    raise ValueError("out of range")


def _of_all(release: Release) -> Release:
    """Returns the release if all units enter it, which costs no less than a sample of them."""
    return replace(release, drawn=None, drawn_from=None)


def _epsilon(releases: tuple[Release, ...], delta: float) -> float:
    """Returns the smaller of two bounds: that of the samples, and that of all units in their place."""
    return min(_bound(releases, delta), _bound(tuple(map(_of_all, releases)), delta))


@lru_cache(maxsize=4096)
def _bound(releases: tuple[Release, ...], delta: float) -> float:
    noise, kind = min(release.noise_multiplier for release in releases), _kind(releases)
    if kind == "pld" and all(release.probability == 1.0 for release in releases):
        noise = min(release.noise_multiplier / math.sqrt(release.times) for release in releases)  # as of one release
    accountant = _accountant(kind, noise)
    for release in releases:
        accountant.compose(event_of(release))
    return float(accountant.get_epsilon(delta))


def _kind(releases: Iterable[Release]) -> str:
    """Returns `rdp` if some are sampled without replacement, else `pld`."""
    return "rdp" if any(release.drawn is not None for release in releases) else "pld"


def _accountant(kind: str, noise: float = math.inf) -> Any:
    """Returns an accountant of a kind, whose grid is fine enough for noise multipliers from `noise` on."""
    library = require_library()
    if kind == "rdp":
        from dp_accounting import rdp

        return rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    from dp_accounting import pld

    return pld.PLDAccountant(value_discretization_interval=GRID * max(1.0, (COARSER_BELOW / noise) ** 2))
