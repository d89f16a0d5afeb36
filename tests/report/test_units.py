from __future__ import annotations

import pytest

from fedguild.measuring.scores.statistics import spread
from fedguild.report import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (1536, "1.54 kB"),
        (12_345_678, "12.3 MB"),
        (999_600_000, "1.00 GB"),
        (0.5, "0.500 B"),
        (-2500, "-2.50 kB"),
        (float("inf"), "inf"),
        (None, "–"),
    ],
)
def test_three_digits_and_a_prefix(value: float | None, text: str) -> None:
    assert units.byte_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.421, "0.42 s"),
        (7.26, "7.3 s"),
        (59.96, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7_620, "2 h 07 min"),
        (None, "–"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text
    assert units.duration(None) == "–"


def test_scores_and_differences() -> None:
    assert units.score_spread(spread([0.5, 0.7])) == "0.600 ± 0.141"
    assert units.score_spread(spread([0.5])) == "0.500"
    assert units.score_spread(None) == "–"
    assert units.difference(spread([0.5, 0.7])) == "+0.600 [\u22120.671, +1.871]"
    assert units.difference(spread([-0.1])) == "\u22120.100"
    assert units.difference(None) == "–"
    assert units.signed(0.2034) == "+0.203"
    assert units.signed(-0.0002) == "0.000"
