"""The measures of evaluation once more, slowly, as loops over their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence


def entropy(weights: Sequence[float]) -> float:
    """-Σ w ln w, terms with w = 0 left out."""
    total = 0.0
    for weight in weights:
        if weight > 0:
            total -= weight * math.log(weight)
    return total


def gini(rates: Sequence[float]) -> float:
    """UB-SMoE, Eq. 62: ΣΣ|u_i - u_j| / (2 M Σ u_i); 0 where nothing was used."""
    total = 0.0
    for one in rates:
        for other in rates:
            total += abs(one - other)
    return total / (2 * len(rates) * sum(rates)) if sum(rates) else 0.0
