"""Recorded tables in short: the score by column with what a client spends, and what a claim's rows cost."""

from __future__ import annotations

from typing import Any

import pytest

from fedguild.config.table import Table
from fedguild.report.recorded import CellRecord
from fedguild.report.recorded_claims import claims_markdown
from fedguild.report.recorded_summary import cost_ratios, summary_grid


def table(**changes: Any) -> Table:
    return Table.model_validate(
        {
            "preset": "{row}/tiny-tasks",
            "rows": {"flame": {}, "fedit": {}, "trivial": {}},
            "columns": {"short": {}, "long": {}},
            "reference": "fedit",
            **changes,
        }
    )


def record(row: str, seed: int = 0, column: str = "short", score: float = 0.5, **changes: Any) -> CellRecord:
    given: dict[str, Any] = {
        "table": "flame/table-2-tiny",
        "column": column,
        "row": row,
        "seed": seed,
        "fingerprint": "x",
        "fedguild": "0.3.0",
        "round": 4,
        "split": "test",
        "scores": {"b1": score, "mean": score},
        "training_flops": {"b1": 3e9, "b2": 1e9},
        "upload_bytes": 1e6,
        "download_bytes": 4e6,
    }
    return CellRecord(**{**given, **changes})


def test_a_row_has_its_score_in_every_column_and_the_costs_of_the_last() -> None:
    records = [
        record("flame", 0, score=0.4),
        record("flame", 1, score=0.6),
        record("flame", 0, "long", 0.7, upload_bytes=2e6, training_flops={"b1": 6e9, "b2": 4e9}),
        record("fedit", 0, "long", 0.3, training_flops={}),
    ]
    grid = summary_grid(table(), records)
    assert [cell.text for cell in grid.header] == ["row", "short", "long", "training FLOPs", "up", "down", "seeds"]
    assert [[cell.text for cell in row] for row in grid.rows] == [
        ["flame", "0.500 ± 0.141", "0.700", "5.00 G", "2.00 MB", "4.00 MB", "1 to 2"],
        ["fedit", "–", "0.300", "–", "1.00 MB", "4.00 MB", "0 to 1"],
    ]
    assert "in long" in grid.title


def test_one_column_has_the_scores_name_and_no_column_is_named() -> None:
    grid = summary_grid(table(columns={"all": {}}), [record("flame", column="all")])
    assert grid.header[1].text == "mean"
    assert " in " not in grid.title


def test_a_claims_costs_are_the_largest_multiples() -> None:
    """2 MB beside 1 and 4 MB up: at most twice; 8 G beside 2 and 4 G: at most four times."""
    rows = {
        "flame": [record("flame", upload_bytes=2e6, training_flops={"b1": 8e9})],
        "fedit": [record("fedit")],
        "trivial": [record("trivial", upload_bytes=4e6, training_flops={"b1": 4e9})],
    }
    assert cost_ratios(rows, "flame", ["fedit", "trivial"]) == "up × 2.00, down × 1.00, FLOPs × 4.00"
    assert cost_ratios(rows, "flame", ["trivial"]) == "up × 0.50, down × 1.00, FLOPs × 2.00"
    assert cost_ratios(rows, "flame", ["flame"]) == "equal"
    assert cost_ratios(rows, "flame", ["not recorded"]) == "–"


def test_what_one_row_does_not_know_is_left_out() -> None:
    rows = {
        "flame": [record("flame", upload_bytes=2.5e7)],
        "fedit": [record("fedit", training_flops={}, download_bytes=None)],
        "trivial": [record("trivial")],
    }
    assert cost_ratios(rows, "flame", ["fedit", "trivial"]) == "up × 25"


@pytest.mark.parametrize(("over", "expected"), [(None, "up × 3.00, down × 1.00, FLOPs × 1.00"), ("b1", "–")])
def test_claims_show_them_unless_they_are_about_one_row(over: str | None, expected: str) -> None:
    claim = {"says": "it leads", "higher": "flame", "lower": ["fedit"], "over": over}
    records = [record("flame", upload_bytes=3e6), record("fedit")]
    lines = claims_markdown(table(claims=[claim]), records).splitlines()
    assert f" {lines[0].split('|')[5].strip()} " == " costs "
    assert lines[2].split("|")[5].strip() == expected
