"""Recorded tables in short: the score by column with what a client spends, and what a claim's rows cost."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedguild.config.table import Table
from tests.tools.records import cell_record
from tools.records.cells import CellRecord
from tools.records.claims import OLDER, claims_in_short
from tools.records.summary import cost_ratios, summary_grid


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
    scores = {"b1": score, "mean": score}
    spent = {"training_flops": {"b1": 3e9, "b2": 1e9}, "upload_bytes": 1e6, "download_bytes": 4e6}
    return cell_record(row, seed, column, **{"scores": scores, **spent, **changes})


def test_a_row_has_its_score_in_every_column_and_the_costs_of_the_last() -> None:
    records = [
        record("flame", 0, score=0.4),
        record("flame", 1, score=0.6),
        record("flame", 0, "long", 0.7, upload_bytes=2e6, training_flops={"b1": 6e9, "b2": 4e9}),
        record("fedit", 0, "long", 0.3, training_flops={}),
    ]
    grid = summary_grid(table(), records)
    assert grid is not None
    assert [cell.text for cell in grid.header] == ["row", "short", "long", "training FLOPs", "up", "down", "seeds"]
    assert [[cell.text for cell in row] for row in grid.rows] == [
        ["flame", "0.500 ± 0.141", "0.700", "5.00 G", "2.00 MB", "4.00 MB", "1 to 2"],
        ["fedit", "–", "0.300", "–", "1.00 MB", "4.00 MB", "0 to 1"],
    ]
    assert "in long" in grid.title


def test_the_mean_perplexity_of_the_same_models_stands_behind_a_score() -> None:
    """Over the budgets it is the geometric mean: 2 of 1 and 4, 6 of 4 and 9, so 4 over the seeds."""
    records = [
        record("flame", 0, scores={"b1": 0.3, "b2": 0.5, "mean": 0.4}, perplexity={"b1": 1.0, "b2": 4.0}),
        record("flame", 1, scores={"b1": 0.7, "b2": 0.5, "mean": 0.6}, perplexity={"b1": 4.0, "b2": 9.0}),
        record("fedit", 0, score=0.3),
    ]
    grid = summary_grid(table(), records)
    assert grid is not None
    assert [row[1].text for row in grid.rows] == ["0.500 ± 0.141 (4.00)", "0.300"]
    assert "(mean perplexity)" in grid.title
    bare = summary_grid(table(), [record("fedit")])
    assert bare is not None
    assert "perplexity" not in bare.title


def test_a_claims_costs_run_from_the_smallest_to_the_largest_multiple() -> None:
    """2 MB beside 1 and 4 MB up: half as much and twice; 8 G beside 2 and 4 G: two and four times."""
    rows = {
        "flame": [record("flame", upload_bytes=2e6, training_flops={"b1": 8e9})],
        "fedit": [record("fedit")],
        "trivial": [record("trivial", upload_bytes=4e6, training_flops={"b1": 4e9})],
    }
    assert cost_ratios([rows], "flame", ["fedit", "trivial"]) == "up × 0.50 to 2.00, down × 1.00, FLOPs × 2.00 to 4.00"
    assert cost_ratios([rows], "flame", ["trivial"]) == "up × 0.50, down × 1.00, FLOPs × 2.00"
    assert cost_ratios([rows], "flame", ["flame"]) == "equal"
    assert cost_ratios([rows], "flame", ["not recorded"]) == "–"
    columns = [{"flame": rows["flame"], "trivial": rows["flame"]}, rows, {}]
    assert cost_ratios(columns, "flame", ["trivial"]) == "up × 0.50 to 1.00, down × 1.00, FLOPs × 1.00 to 2.00"


def test_the_flops_of_a_claim_at_a_budget_are_that_budgets() -> None:
    """1 G beside 4 G at b4, 8 G beside 8 G at b1: a quarter at b4, and 4.5 G beside 6 G in the mean."""
    rows = {
        "flame": [record("flame", training_flops={"b1": 8e9, "b4": 1e9})],
        "fedit": [record("fedit", training_flops={"b1": 8e9, "b4": 4e9})],
    }
    assert cost_ratios([rows], "flame", ["fedit"], "b4") == "up × 1.00, down × 1.00, FLOPs × 0.25"
    assert cost_ratios([rows], "flame", ["fedit"]) == "up × 1.00, down × 1.00, FLOPs × 0.75"


def test_costs_are_of_the_seeds_that_all_rows_have() -> None:
    rows = {
        "flame": [record("flame", 0, upload_bytes=3e6), record("flame", 1, upload_bytes=9e6)],
        "fedit": [record("fedit", 0), record("fedit", 2, upload_bytes=9e6)],
    }
    assert cost_ratios([rows], "flame", ["fedit"]) == "up × 3.00, down × 1.00, FLOPs × 1.00"


def test_a_claim_in_short_has_the_difference_that_decides_it_by_score_and_by_nats() -> None:
    """Over fedit the lead is small and sure, over trivial large; in nats fedit loses less."""
    nats = {"flame": 1.0, "fedit": 0.8, "trivial": 2.0}
    scores = {"flame": 0.6, "fedit": 0.55, "trivial": 0.2}
    records = [
        record(row, seed, score=scores[row] + seed * 0.1, perplexity={"b1": math.exp(nats[row])})
        for row in nats
        for seed in range(3)
    ]
    claim = {"says": "FLAME leads", "higher": "flame", "lower": ["trivial", "fedit"], "columns": ["short"]}
    (line,) = claims_in_short(table(claims=[claim]), records)
    assert line == [
        "FLAME leads",
        "short: holds, +0.050 ± 0.000 (fedit)",
        "short: does not hold, −0.200 ± 0.000 (fedit)",
        "equal",
    ]
    (line,) = claims_in_short(table(claims=[claim]), [one for one in records if one.row != "trivial" or one.seed == 0])
    assert line[1] == "short: undecided, fewer than 3 seeds in common with trivial"
    (line,) = claims_in_short(table(claims=[claim]), records, unjudged=["fedit"])
    assert line[1] == "short: holds, +0.400 ± 0.000 (trivial)"
    (line,) = claims_in_short(table(claims=[claim]), records, unjudged=["flame"])
    assert line[1:] == ["short: no verdict", "short: no verdict", "–"]


@pytest.mark.parametrize("older", [True, False])
def test_a_claim_by_the_mean_perplexity_of_clients_is_marked(older: bool) -> None:
    nats = {} if older else {"trained": 1.0}
    records = [
        record(row, seed, scores={"trained": 0.5}, perplexity={"trained": 3.0}, nats=nats)
        for row in ("flame", "fedit")
        for seed in range(3)
    ]
    claim = {"says": "FLAME leads", "higher": "flame", "lower": ["fedit"], "columns": ["short"], "score": "trained"}
    (line,) = claims_in_short(table(claims=[claim]), records)
    assert line[2].endswith(OLDER) == older
    assert OLDER not in line[1]


def test_a_claim_in_short_names_columns_only_where_they_differ_and_leaves_out_those_without_a_record() -> None:
    leads = {"short": 0.1, "long": 0.2}
    records = [
        record(row, seed, column, score=0.5 + (leads[column] if row == "flame" else 0))
        for row in ("flame", "fedit")
        for column in leads
        for seed in range(3)
    ]
    claim = {"says": "FLAME leads", "higher": "flame", "lower": ["fedit"]}
    (line,) = claims_in_short(table(claims=[claim]), records)
    by_score = "short: holds, +0.100 ± 0.000 (fedit)<br>long: holds, +0.200 ± 0.000 (fedit)"
    assert line == ["FLAME leads", by_score, "not recorded", "equal"]
    assert claims_in_short(table(columns={"other": {}}, claims=[claim]), records) == []
