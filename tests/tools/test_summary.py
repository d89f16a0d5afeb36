"""Recorded tables in short: the score by column with what a client spends, and what a claim's rows cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedguild.config.table import Table
from tests.tools.records import cell_record
from tools.records.cells import CellRecord
from tools.records.claims import claims_markdown
from tools.records.pages import summary_page
from tools.records.summary import cost_ratios, shown_grid, summary_grid


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


def test_what_methods_report_is_shown_by_column_and_row_from_the_first_to_the_last_round() -> None:
    shown = table(shows=["idle experts, below a tenth / of one client", "router drift"])
    records = [
        record("flame", 0, observations={shown.shows[0]: {1: 0.2, 4: 0.5}}),
        record("flame", 1, observations={shown.shows[0]: {1: 0.4, 4: 0.3}}),
        record("fedit", 0),
        record("fedit", 0, "long", observations={"router drift": {4: 0.25}}),
    ]
    grid = shown_grid(shown, records)
    assert grid is not None
    assert [cell.text for cell in grid.header] == ["column", "row", "idle experts / of one client", "router drift"]
    assert [[cell.text for cell in row] for row in grid.rows] == [
        ["short", "flame", "0.3 → 0.4", "–"],
        ["long", "fedit", "–", "0.25"],
    ]
    assert grid.to_markdown() in summary_page(shown, records)
    assert shown_grid(table(), records) is None
    assert shown_grid(shown, [record("trivial")]) is None
    alone = shown_grid(
        table(columns={"all": {}}, shows=["router drift"]),
        [record("flame", column="all", observations={"router drift": {4: 0.25}})],
    )
    assert alone is not None
    assert [cell.text for cell in alone.header] == ["row", "router drift"]


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
    assert "with the mean perplexity in brackets" in grid.title
    bare = summary_grid(table(), [record("fedit")])
    assert bare is not None
    assert "perplexity" not in bare.title


def test_one_column_has_the_scores_name_and_no_column_is_named() -> None:
    grid = summary_grid(table(columns={"all": {}}), [record("flame", column="all")])
    assert grid is not None
    assert grid.header[1].text == "mean"
    assert " in " not in grid.title
    assert grid.title.startswith("Mean score, ")


def test_a_title_leaves_the_capitals_of_a_score_alone_and_a_row_names_a_score_of_its_own() -> None:
    rows = {"flame": {}, "fedit": {"score": "trained"}}
    records = [
        record("flame", scores={"mtal": 0.4, "trained": 0.1}),
        record("fedit", scores={"mtal": 0.3, "trained": 0.2}),
    ]
    grid = summary_grid(table(rows=rows, score="mtal"), records)
    assert grid is not None
    assert grid.title.startswith("MTAL score, ")
    assert [row[0].text for row in grid.rows] == ["flame", "fedit (as trained)"]
    assert [row[1].text for row in grid.rows] == ["0.400", "0.200"]


def test_there_is_nothing_to_show_of_columns_that_the_table_no_longer_has() -> None:
    assert summary_grid(table(), [record("flame", column="gone")]) is None
    assert summary_page(table(), [record("flame", column="gone")]) == ""


def test_a_page_in_short_has_the_scores_the_claims_and_the_remark() -> None:
    claim = {"says": "it leads", "higher": "flame", "lower": ["fedit"]}
    text = summary_page(table(claims=[claim]), [record("flame"), record("fedit")], remark="It leads nowhere.\n")
    assert text.index("| flame | 0.500 |") < text.index("It leads nowhere.") < text.index("| it leads | short |")
    assert "<summary>Claims by column: undecided at this scale 1, not recorded 1</summary>\n\n| claim" in text
    assert text.endswith("\n</details>\n")


def test_a_page_in_short_says_what_the_seeds_of_each_column_could_have_shown() -> None:
    gaps = {"short": (0.1, 0.3), "long": (0.1, 0.2)}
    records = [record("fedit", seed, column) for column in gaps for seed in (0, 1)]
    records += [
        record("flame", seed, column, score=0.5 + gap) for column, pair in gaps.items() for seed, gap in enumerate(pair)
    ]
    said = "The smallest difference in the mean score that these seeds could have shown is"
    t_value = 12.7062
    half_widths = [t_value * np.std(pair, ddof=1) / np.sqrt(2) for pair in gaps.values()]
    assert f"\n{said} {half_widths[0]:.3f} (short), {half_widths[1]:.3f} (long).\n" in summary_page(table(), records)
    alone = table(columns={"all": {}})
    whole = [one.model_copy(update={"column": "all"}) for one in records if one.column == "short"]
    assert f"\n{said} {half_widths[0]:.3f}.\n" in summary_page(alone, whole)
    assert said not in summary_page(table(), [one for one in records if one.seed == 0])


def test_a_claims_costs_run_from_the_smallest_to_the_largest_multiple() -> None:
    """2 MB beside 1 and 4 MB up: half as much and twice; 8 G beside 2 and 4 G: two and four times."""
    rows = {
        "flame": [record("flame", upload_bytes=2e6, training_flops={"b1": 8e9})],
        "fedit": [record("fedit")],
        "trivial": [record("trivial", upload_bytes=4e6, training_flops={"b1": 4e9})],
    }
    assert cost_ratios(rows, "flame", ["fedit", "trivial"]) == "up × 0.50 to 2.00, down × 1.00, FLOPs × 2.00 to 4.00"
    assert cost_ratios(rows, "flame", ["trivial"]) == "up × 0.50, down × 1.00, FLOPs × 2.00"
    assert cost_ratios(rows, "flame", ["flame"]) == "equal"
    assert cost_ratios(rows, "flame", ["not recorded"]) == "–"


def test_costs_are_equal_only_where_all_are_known_and_none_is_below() -> None:
    rows = {"flame": [record("flame")], "fedit": [record("fedit", training_flops={})], "trivial": [record("trivial")]}
    assert cost_ratios(rows, "flame", ["fedit"]) == "up × 1.00, down × 1.00"
    assert cost_ratios(rows, "flame", ["trivial"]) == "equal"
    dearer = {**rows, "fedit": [record("fedit", upload_bytes=2e6)]}
    assert cost_ratios(dearer, "flame", ["trivial", "fedit"]) == "up × 0.50 to 1.00, down × 1.00, FLOPs × 1.00"


def test_costs_of_nothing_and_of_next_to_nothing() -> None:
    rows = {
        "flame": [record("flame", upload_bytes=0.0, download_bytes=1e4)],
        "fedit": [record("fedit", upload_bytes=0.0)],
        "trivial": [record("trivial")],
    }
    assert cost_ratios(rows, "flame", ["fedit"]) == "up × 1.00, down × 0.003, FLOPs × 1.00"
    assert cost_ratios(rows, "trivial", ["flame"]) == "up × ∞, down × 400, FLOPs × 1.00"
    assert cost_ratios(rows, "flame", ["trivial"]).startswith("up × 0.00, ")


def test_costs_are_of_the_seeds_that_all_rows_have() -> None:
    rows = {
        "flame": [record("flame", 0, upload_bytes=3e6), record("flame", 1, upload_bytes=9e6)],
        "fedit": [record("fedit", 0), record("fedit", 2, upload_bytes=9e6)],
    }
    assert cost_ratios(rows, "flame", ["fedit"]) == "up × 3.00, down × 1.00, FLOPs × 1.00"


def test_what_one_row_does_not_know_is_left_out() -> None:
    rows = {
        "flame": [record("flame", upload_bytes=2.5e7)],
        "fedit": [record("fedit", training_flops={}, download_bytes=None)],
        "trivial": [record("trivial")],
    }
    assert cost_ratios(rows, "flame", ["fedit", "trivial"]) == "up × 25"


@pytest.mark.parametrize(("lower", "expected"), [("fedit", "up × 3.00, down × 1.00, FLOPs × 1.00"), ("flame", "–")])
def test_claims_show_them_unless_they_are_about_one_row(lower: str, expected: str) -> None:
    claim = {"says": "it leads", "higher": "flame", "lower": [lower], "over": "b1"}
    records = [record("flame", upload_bytes=3e6), record("fedit")]
    lines = claims_markdown(table(claims=[claim]), records).splitlines()
    assert f" {lines[0].split('|')[5].strip()} " == " costs "
    assert lines[2].split("|")[5].strip() == expected
