from __future__ import annotations

import math

import pytest

from fedguild.core.errors import DataError
from fedguild.measuring.scores.statistics import paired_difference, spread


def test_spread_is_the_sample_deviation():
    result = spread([1.0, 2.0, 4.0])
    assert result.mean == pytest.approx(7 / 3)
    assert result.std == pytest.approx(math.sqrt(((4 / 3) ** 2 + (1 / 3) ** 2 + (5 / 3) ** 2) / 2))
    assert result.count == 3
    assert spread([0.25]).std == 0.0
    with pytest.raises(DataError, match="at least one seed"):
        spread([])


def test_the_spread_of_an_infinite_value_is_unknown():
    """As of the perplexity of a model that has diverged."""
    for values, mean in (([math.inf, 3.0], math.inf), ([math.inf, -math.inf], math.nan), ([math.nan], math.nan)):
        found = spread(values)
        assert found.mean == pytest.approx(mean, nan_ok=True)
        assert (math.isnan(found.std), found.count) == (True, len(values))


def test_paired_difference_cancels_the_seed():
    difference = paired_difference({1: 0.9, 0: 0.4}, {0: 0.3, 1: 0.8})
    assert difference.mean == pytest.approx(0.1)
    assert difference.std == pytest.approx(0.0, abs=1e-12)
    assert paired_difference({0: 1.0, 1: 0.5}, {0: 0.25, 2: 1.0}) == spread([0.75])
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
