"""Means over seeds, their spread, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

from fedguild.core.errors import DataError

CONFIDENCE = 0.95
FEWEST_SEEDS = 3
"""Of a difference that decides: two that agree by chance have a narrow interval."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over seeds with its sample standard deviation (divisor n - 1; 0 for one seed)."""

    mean: float
    std: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Returns mean and sample standard deviation of one value per seed.

    The deviation is unknown (NaN) where a value is infinite, as the perplexity of a model that has diverged.

    Raises:
        DataError: there is no value.
    """
    if not values:
        raise DataError("A mean over seeds needs at least one seed.")
    if not all(map(math.isfinite, values)):
        return Spread(sum(values) / len(values), math.nan, len(values))
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Returns the mean of those values that are known; None without one."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def half_width(values: Spread) -> float:
    """Returns half the width of the 95 % confidence interval of a mean over seeds, by Student's t.

    Infinite for one seed.
    """
    if values.count < 2:
        return math.inf
    return float(stdtrit(values.count - 1, (1 + CONFIDENCE) / 2)) * values.std / math.sqrt(values.count)


def interval(values: Spread) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a mean over seeds, by Student's t; infinite for one seed."""
    half = half_width(values)
    return values.mean - half, values.mean + half


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Spread | None:
    """Returns the spread of `values[seed] - reference[seed]`, which cancels what a seed does to both.

    Only seeds that both have count; None if there are none.
    """
    shared = sorted(values.keys() & reference.keys())
    return spread([values[seed] - reference[seed] for seed in shared]) if shared else None
