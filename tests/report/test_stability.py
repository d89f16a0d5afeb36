"""The table of one figure's entry over seeds and rounds."""

from __future__ import annotations

import dataclasses

import pytest

from fedguild.errors import ConfigError
from fedguild.report.record import Run
from fedguild.report.stability import entry_over_seeds
from fedguild.server.record import ObservationRecord

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
