"""Figures of recorded tables: what is drawn are the records' means and intervals, and nothing before all are there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from fedguild.config import Table, table_cells, tables
from fedguild.report import table_figures

TABLE: dict[str, Any] = {
    "preset": "flame/tiny-tasks",
    "reference": "t-0",
    "rows": {"t-0": {}, "t-2": {}, "t-2-by-k": {}},
    "columns": {"even": {}, "skewed": {}},
    "figure": {
        "x": "temperature t",
        "values": ["0", "2"],
        "panels": {
            "Even": {"as published": "t-{x} @ even", "by k": {"0": "t-0 @ even", "2": "t-2-by-k @ even"}},
            "Skewed": {"as published": "t-{x} @ skewed", "by k": {"0": "t-0 @ skewed", "2": "t-2-by-k @ skewed"}},
        },
    },
}
MEANS = {
    ("t-0", "even"): 0.5,
    ("t-2", "even"): 0.6,
    ("t-2-by-k", "even"): 0.7,
    ("t-0", "skewed"): 0.3,
    ("t-2", "skewed"): 0.2,
    ("t-2-by-k", "skewed"): 0.4,
}


def records(seeds: int = 3) -> list[table_figures.CellScores]:
    """Scores 0.1 below, at, and 0.1 above the mean; of one seed, at the mean."""
    return [
        table_figures.CellScores(
            column=column,
            row=row,
            seed=seed,
            scores={"mean": mean + 0.1 * (seed - 1 if seeds > 1 else 0), "b1": 0.0},
            observations={},
        )
        for (row, column), mean in MEANS.items()
        for seed in range(seeds)
    ]


def first_figure(table: Table, recorded: list[table_figures.CellScores]) -> table_figures.Drawing | None:
    return table_figures.drawings(table, recorded).get("")


def test_the_points_are_the_means_over_the_seeds() -> None:
    drawn = first_figure(Table.model_validate(TABLE), records())
    assert drawn is not None
    found = {
        (panel, line): [round(score.mean, 9) for score in scores]
        for panel, lines in drawn.panels.items()
        for line, scores in lines.items()
    }
    assert found == {
        ("Even", "as published"): [0.5, 0.6],
        ("Even", "by k"): [0.5, 0.7],
        ("Skewed", "as published"): [0.3, 0.2],
        ("Skewed", "by k"): [0.3, 0.4],
    }
    assert {score.count for lines in drawn.panels.values() for scores in lines.values() for score in scores} == {3}


def test_a_figure_of_nats_draws_the_loss_of_the_budgets() -> None:
    figure = {"x": "k", "values": ["8", "1"], "scores": {"8": "b1", "1": "b4"}, "nats": True}
    table = Table.model_validate({**TABLE, "figure": {**figure, "panels": {"Even": {"FLAME": "t-2 @ even"}}}})
    recorded = [replace(one, nats={"b1": 1.5, "b4": 2.0 + one.seed}) for one in records()]
    drawn = first_figure(table, recorded)
    assert drawn is not None
    assert (drawn.y, drawn.bounds) == ("nats per token", (0.0, math.inf))
    assert [one.mean for one in drawn.panels["Even"]["FLAME"]] == [1.5, 3.0]
    assert first_figure(table, records()) is None, "no nats are recorded"


GAINS: dict[str, Any] = {
    "x": "temperature t",
    "values": ["2", "2 again"],
    "panels": {
        "Even": {"as published": "t-2 @ even"},
        "Skewed": {"by k": {"2": "t-2-by-k @ skewed", "2 again": "t-2 @ skewed"}},
    },
    "minus": {"Even": "t-0 @ even", "Skewed": {"2": "t-0 @ skewed", "2 again": "t-0 @ skewed"}},
}


def test_gains_are_taken_seed_by_seed() -> None:
    """The scores of both cells spread by 0.1 over the seeds, their difference does not."""
    drawn = first_figure(Table.model_validate({**TABLE, "figure": GAINS}), records())
    assert drawn is not None
    told = {line: scores for lines in drawn.panels.values() for line, scores in lines.items()}
    assert [round(one.mean, 9) for one in told["as published"]] == [0.1, 0.1]
    assert [round(one.mean, 9) for one in told["by k"]] == [0.1, -0.1]
    assert max(one.std for scores in told.values() for one in scores) < 1e-12
    assert {one.count for scores in told.values() for one in scores} == {3}
    assert drawn.y == "gain in mean score"
    assert "Skewed, by k: +0.100 ± 0.000 at 2, -0.100 ± 0.000 at 2 again." in table_figures.description(drawn)
    axes = table_figures.draw(drawn).axes[0]
    assert any(list(line.get_ydata()) == [0.0, 0.0] for line in axes.lines), "the line at zero"


@pytest.mark.parametrize(
    ("minus", "told"),
    [
        ({"Even": "t-0 @ even"}, "takes scores from some panels alone; give 'minus' for each .Skewed"),
        ({"Even": "t-0 @ even", "Skewed": "t-9 @ skewed"}, "minus of 'Skewed' names t-9, no row or column"),
        ({"Even": "t-0 @ even", "Skewed": {"2": "t-0 @ skewed"}}, "minus of 'Skewed' has no cell for 2 again"),
    ],
)
def test_gains_over_what_is_unknown_are_refused(minus: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Table.model_validate({**TABLE, "figure": {**GAINS, "minus": minus}})


def test_nothing_is_drawn_before_every_cell_is_recorded() -> None:
    table = Table.model_validate(TABLE)
    assert first_figure(table.model_copy(update={"figure": None}), records()) is None
    for cell in MEANS:
        some = [record for record in records() if (record.row, record.column) != cell]
        assert first_figure(table, some) is None, cell
    other = [replace(record, scores={"b1": 0.5}) for record in records()]
    assert first_figure(table, other) is None, "the table's score is not among them"


ROUNDS = {"figure": "drift", "panels": {"Even": {"t = 0": "t-0 @ even", "t = 2": "t-2 @ even"}}}


def test_a_methods_own_figure_is_drawn_over_the_rounds() -> None:
    """Its means over the seeds; only where every record of a line has the same rounds."""
    table = Table.model_validate({**TABLE, "rounds": ROUNDS})
    reported = [
        replace(record, observations={"drift": {1: 2.0 + record.seed, 4: 10 * MEANS[record.row, "even"]}})
        for record in records()
    ]
    drawn = table_figures.over_rounds(table, reported)
    assert drawn is not None
    assert (drawn.x, drawn.values, list(drawn.panels)) == ("round", ("1", "4"), ["Even"])
    found = {line: [one.mean for one in spreads] for line, spreads in drawn.panels["Even"].items()}
    assert found == {"t = 0": pytest.approx([3.0, 5.0]), "t = 2": pytest.approx([3.0, 6.0])}
    told = table_figures.description(drawn)
    assert told.startswith("The drift by round. Even, t = 0: 3 ± 2.48 at 1, 5 ± 0 at 4.")
    (axes,) = table_figures.draw(drawn).axes
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("drift", "round")
    assert axes.get_ylim()[1] > 5.4
    assert list(table_figures.drawings(table, reported)) == ["", "rounds"]
    assert list(table_figures.drawings(table, records())) == [""]
    further = table.model_copy(update={"figures": {"again": table.figure}})
    assert list(table_figures.drawings(further, reported)) == ["", "again", "rounds"]
    for change in ({}, {"drift": {1: 2.0}}):
        others = [*reported[1:], replace(reported[0], observations=change)]
        assert table_figures.over_rounds(table, others) is None, change
    without = [record for record in reported if record.row != "t-2"]
    assert table_figures.over_rounds(table, without) is None


@pytest.mark.parametrize(
    ("panels", "told"),
    [
        ({"Even": {"as published": "t-{x} @ odd"}}, "line 'as published' names odd, no row or column"),
        ({"Even": {"as published": "u-{x} @ even"}}, "line 'as published' names u-0, no row or column"),
        ({"Even": {"as published": {"0": "t-0 @ even"}}}, "line 'as published' has no cell for 2"),
        ({"Even": {"as published": "t-{x}"}}, "line 'as published' names all, no row or column"),
    ],
)
def test_a_figure_of_unknown_cells_is_refused(panels: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Table.model_validate({**TABLE, "figure": {**TABLE["figure"], "panels": panels}})


def test_every_table_that_decides_has_a_figure_of_its_cells() -> None:
    deciding = [table for table in tables() if table.name.endswith("/decide-english")]
    assert len(deciding) == 4
    for shipped in deciding:
        table = shipped.load()
        assert table.figure is not None, shipped.name
        drawn = {
            cell
            for figure in table.drawn_scores.values()
            for panel, lines in figure.panels.items()
            for cells in (*(figure.cells(panel, line) for line in lines), figure.subtracted(panel))
            for cell in cells
        }
        cells = {(cell.row, cell.column) for cell in table_cells(shipped.name, table)}
        assert cells == drawn, shipped.name
        if table.rounds is not None:
            over_rounds = {
                table.rounds.cell(panel, line) for panel, lines in table.rounds.panels.items() for line in lines
            }
            assert cells == over_rounds, shipped.name
