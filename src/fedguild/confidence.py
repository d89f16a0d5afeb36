"""Confidence interval of a mean of few values, by Student's t."""

from __future__ import annotations

import math

from scipy.special import stdtrit

CONFIDENCE = 0.95


def half_width(deviation: float, count: int) -> float:
    """Returns half the width of the 95 % confidence interval of a mean, by Student's t.

    Infinite for one value, which says nothing about the spread.

    Args:
        deviation: The sample standard deviation (divisor n - 1).
        count: The number of values n.
    """
    if count < 2:
        return math.inf
    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(count)
