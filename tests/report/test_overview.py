"""The overview of a table: the score of each row, what the header says of it, and what is compared with what."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fedguild.measuring.log.folder import Run
from fedguild.measuring.log.records import EvaluationRecord
from fedguild.report.comparison import ComparisonTable, compare
from fedguild.report.grid import Cell, Grid
from fedguild.report.overview import adds_to, overview, write_tables

SCORES = {"flame": "pooled", "fedit-ranks": "mean"}
POOLED = (0.2, 0.4, 0.9)


def with_pooled(run: Run, score: float) -> Run:
    last = EvaluationRecord(round=6, scope="summary", name="pooled", split="test", score=score)
    return dataclasses.replace(run, evaluations=[*run.evaluations, last])


@pytest.fixture
def table(runs: dict[str, list[Run]]) -> ComparisonTable:
    """FLAME has a pooled score: 0.2, 0.4 and 0.9 over the seeds."""
    flame = [with_pooled(run, score) for run, score in zip(runs["flame"], POOLED, strict=True)]
    return compare({"flame": flame, "fedit-ranks": runs["fedit-ranks"]})


def test_every_row_shows_its_own_score_and_the_header_says_so(table: ComparisonTable) -> None:
    grid = overview({"a": table, "b": table}, SCORES, "mine")
    assert grid.title == (
        "mine: exact match, clients' models as received, on all data; fedit-ranks: global model, mean over budgets; "
        "mean ± sample deviation over 3 seeds; differences with their 95 % interval"
    )
    ranks = table.row("fedit-ranks").spread("mean")
    assert ranks is not None
    assert [cell.text for cell in grid.rows[0]] == ["flame", *["0.500 ± 0.361"] * 2]
    assert [cell.text for cell in grid.rows[1]] == ["fedit-ranks", *[f"{ranks.mean:.3f} ± {ranks.std:.3f}"] * 2]
    best = int(ranks.mean > 0.5)
    assert [row[1].strong for row in grid.rows[:2]] == [best == 0, best == 1]


def test_columns_with_unlike_metrics_say_which_is_theirs(table: ComparisonTable) -> None:
    grid = overview({"a": table, "b": dataclasses.replace(table, metric="accuracy")}, SCORES, "mine")
    assert [cell.text for cell in grid.header] == ["Method", "a (exact match)", "b (accuracy)"]
    assert grid.title.startswith("mine: clients' models")


def test_a_difference_is_between_each_rows_own_score_seed_by_seed(table: ComparisonTable) -> None:
    difference = table.difference("flame", "pooled", "mean")
    assert difference is not None
    theirs = table.row("fedit-ranks").scores["mean"]
    assert difference.mean == pytest.approx(sum(POOLED[seed] - theirs[seed] for seed in range(3)) / 3)
    grid = overview({"a": table}, SCORES, "mine")
    half = 4.302653 * difference.std / 3**0.5  # Student's t of two degrees of freedom
    expected = [difference.mean, difference.mean - half, difference.mean + half]
    assert grid.rows[2][1].text == "{:+.3f} [{:+.3f}, {:+.3f}]".format(*expected).replace("-", "\u2212")
    assert table.difference("flame", "pooled") is None


def test_one_column_has_an_overview_only_where_its_rows_have_unlike_scores(table, tmp_path):
    alike = dict.fromkeys(SCORES, "mean")
    assert not adds_to({"": table}, {**alike, "unused": "mtal"})
    assert adds_to({"a": table, "b": table}, alike)
    assert adds_to({"": table}, SCORES)
    assert "mine: " not in write_tables({"": table}, alike, "mine", tmp_path).read_text()
    text = write_tables({"": table}, SCORES, "mine", tmp_path).read_text()
    assert text.startswith("**mine: exact match, clients' models as received, on all data; fedit-ranks: global model")
    latex = (tmp_path / "table.tex").read_text()
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == latex.count(r"\toprule") == 4
    assert all(text in latex for text in (r"\textbf{", r"$\pm$", r"95 \% interval"))
    assert not re.search(r"(?<!\\)[%&_#](?! )", latex.partition("\n")[2])


def test_what_latex_would_read_as_commands_is_text() -> None:
    grid = Grid("a_b", (Cell("50%"), Cell("x", "a & b")), ((Cell("{c} \\ d"), Cell("−1 ± 2")),))
    body = grid.to_latex().splitlines()
    assert body[2] == r"\caption{a\_b}"
    assert body[5] == r"50\% & x (a \& b) \\"
    assert body[7] == r"\{c\} \textbackslash{} d & $-$1 $\pm$ 2 \\"
