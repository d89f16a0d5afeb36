"""The table of one figure's entry over seeds and rounds."""

from __future__ import annotations

import dataclasses

import pytest

from fedguild.errors import ConfigError
from fedguild.report.stability import entry_over_seeds, stability_grids
from fedguild.runs.folder import Run
from fedguild.runs.log import ObservationRecord

FIGURE = "experts held"


def seeds(run: Run) -> list[Run]:
    """Two runs of seven and of six rounds; module m, client c holds 100 s + 10 m + c + round experts."""
    runs = []
    for seed, rounds in ((0, 7), (1, 6)):
        records = [
            ObservationRecord(
                round=number,
                name=FIGURE,
                rows=["q_proj", "v_proj"],
                columns=["client 0", "client 1"],
                values=[[100 * seed + 10 * module + client + number for client in range(2)] for module in range(2)],
            )
            for number in range(1, rounds + 1)
        ]
        runs.append(dataclasses.replace(run, config={"seed": seed}, observations=records))
    return runs


def test_the_last_rounds_that_all_seeds_have(run: Run) -> None:
    grid = entry_over_seeds(seeds(run), FIGURE, "v_proj", "client 1", rounds=3)
    assert grid.title == "experts held: v_proj, client 1"
    assert [cell.text for cell in grid.header] == ["Seed", "round 4", "round 5", "round 6"]
    assert [[cell.text for cell in row] for row in grid.rows] == [["0", "15", "16", "17"], ["1", "115", "116", "117"]]


def test_a_figure_with_one_value_in_a_row(run: Run) -> None:
    record = ObservationRecord(round=1, name="kept", rows=["q_proj"], values=[[0.25]])
    grid = entry_over_seeds([dataclasses.replace(run, config={"seed": 3}, observations=[record])], "kept", "q_proj")
    assert [[cell.text for cell in row] for row in grid.rows] == [["3", "0.25"]]


def test_counts_of_several_seeds_are_tables_of_the_comparison(run: Run) -> None:
    runs = seeds(run)
    counted = [
        dataclasses.replace(one, observations=[r.model_copy(update={"unit": "experts"}) for r in one.observations])
        for one in runs
    ]
    (grid,) = stability_grids({"fedamole": counted, "of one seed": counted[:1], "without a unit": runs})
    assert grid.title == "fedamole: experts held: q_proj, client 0"
    assert [cell.text for cell in grid.rows[1]] == ["1", "102", "103", "104", "105", "106"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("experts hold", "q_proj", "client 0"), r"no figure 'experts hold'\.\n.*'experts held'"),
        ((FIGURE, "k_proj", "client 0"), r"no row or column 'k_proj'\.\n.*q_proj"),
        ((FIGURE, "q_proj", "client 2"), r"no row or column 'client 2'"),
    ],
)
def test_what_is_not_there(asked: tuple[str, str, str], told: str, run: Run) -> None:
    with pytest.raises(ConfigError, match=told):
        entry_over_seeds(seeds(run), *asked)
