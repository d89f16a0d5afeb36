"""Figures that methods report of their own: gathered by name, drawn, and compared over the seeds."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree

import pytest

from fedguild.core.errors import ConfigError
from fedguild.measuring.log.folder import Run
from fedguild.measuring.log.records import ObservationRecord
from fedguild.report.observation_figures import observation_figure, split_labels
from fedguild.report.observations import Series, entry_over_seeds, observation_grid, observed, stability_grids
from fedguild.report.style import FULL_WIDTH, NARROW_WIDTH
from tests.report.test_figures import SVG, texts


def series(*values: list[list[float]], rows: list[str], columns: list[str] | None = None, unit: str = "") -> Series:
    records = [
        ObservationRecord(round=1 + place, name="figure", rows=rows, columns=columns or [], values=value, unit=unit)
        for place, value in enumerate(values)
    ]
    return Series("figure", unit, tuple(records))


def test_figures_are_gathered_by_name_and_round(personal_run: Run) -> None:
    found = observed(personal_run)
    assert [(one.name, one.unit, one.is_matrix) for one in found] == [
        ("utilisation entropy", "nats", False),
        ("load", "", False),
        ("relevance", "", True),
    ]
    assert [record.round for record in found[0].records] == [1, 2, 3, 4, 5, 6]
    assert found[0].lines()["layer 3"] == [(n, pytest.approx(1.7 + 0.02 * n)) for n in range(1, 7)]
    assert found[2].last.values[4][2] == pytest.approx(((12 + 2 + 6) % 7) / 7)


def test_a_run_without_figures_has_none(run: Run) -> None:
    assert observed(run) == []
    assert observation_grid({"flame": [run]}) is None


def test_one_row_in_a_round_is_followed_over_the_rounds() -> None:
    """As the paper's Table 6 of FedAMoLE: the experts of a client, a round below the other."""
    columns = [f"expert {index}" for index in range(3)]
    held = series([[1.0, 0.0, 1.0]], [[1.0, 1.0, 0.0]], [[0.0, 1.0, 0.0]], rows=["client 0"], columns=columns)
    assert held.is_over_rounds
    assert held.matrix().rows == ["round 1", "round 2", "round 3"]
    assert held.matrix().values == [[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    svg = observation_figure(held, "k")
    assert {"round", "1", "2", "3", "expert", "0"} <= set(texts(svg))
    assert "of 3 rows and 3 columns" in svg


@pytest.mark.parametrize("width", [FULL_WIDTH, NARROW_WIDTH])
def test_long_names_below_a_heat_map_leave_room_for_it(width: float, recwarn: pytest.WarningsRecorder) -> None:
    """As the strength of FedAlign-MoE's alignment, whose names once left the map no height at all."""
    columns = ["least", "largest", "deviation between experts", "deviation between clients"]
    layers = [f"layer {layer}" for layer in range(4)]
    svg = observation_figure(series([[0.5, 0.5, 0.1, 0.01]] * 4, rows=layers, columns=columns), "k", width)
    assert not [warning for warning in recwarn if "collapsed" in str(warning.message)]
    named = [node for node in ElementTree.fromstring(svg).iter(f"{SVG}text") if node.text in ("0", "1", "2", "3")]
    rows = [float(node.get("y", "nan")) for node in named]
    assert len(rows) == 4
    assert max(rows) - min(rows) > 40


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["expert 0", "expert 1"], ("expert", ["0", "1"])),
        (["expert 10", "expert 11"], ("expert", ["10", "11"])),
        (["client-000", "client-001"], ("client", ["000", "001"])),
        (["layer 0", "all layers"], ("", ["layer 0", "all layers"])),
        (["all modules"], ("", ["all modules"])),
        (["a", "ab"], ("", ["a", "ab"])),
        ([], ("", [])),
    ],
)
def test_what_labels_share_names_the_axis(labels: list[str], expected: tuple[str, list[str]]) -> None:
    assert split_labels(labels) == expected


def test_seeds_are_compared_by_what_does_not_depend_on_the_order_of_experts(personal_run: Run) -> None:
    """Experts start anew under every seed: a permutation of the rows must not change the table."""
    turned = [record.model_copy(update={"values": record.values[::-1]}) for record in personal_run.observations]
    other = [
        record.model_copy(update={"values": [[value + 1 for value in row] for row in record.values]})
        for record in personal_run.observations
    ]
    runs = [personal_run, dataclasses.replace(personal_run, observations=other)]
    grid = observation_grid({"fedamole": runs})
    assert grid is not None
    load = [cell.text for cell in grid.rows[1]]
    assert load == ["fedamole", "load", "10.25 ± 0.71", "6.5 ± 0.71", "14 ± 0.71"]
    assert [cell.text for cell in grid.rows[0]][1] == "utilisation entropy (nats)"
    same = observation_grid({"fedamole": [dataclasses.replace(personal_run, observations=turned), runs[1]]})
    assert same == grid


FIGURE = "experts held"


def of_two_seeds(run: Run) -> list[Run]:
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


def test_a_figure_whose_first_entry_another_seed_lacks_is_left_out(run: Run) -> None:
    one, other = (
        dataclasses.replace(
            seed, observations=[record.model_copy(update={"unit": "experts"}) for record in seed.observations]
        )
        for seed in of_two_seeds(run)
    )
    assert len(stability_grids({"flame": [one, other]})) == 1
    renamed = [record.model_copy(update={"columns": ["client 3", "client 5"]}) for record in other.observations]
    assert stability_grids({"flame": [one, dataclasses.replace(other, observations=renamed)]}) == []


def test_the_last_rounds_that_all_seeds_have(run: Run) -> None:
    grid = entry_over_seeds(of_two_seeds(run), FIGURE, "v_proj", "client 1", rounds=3)
    assert grid.title == "experts held: v_proj, client 1"
    assert [cell.text for cell in grid.header] == ["Seed", "round 4", "round 5", "round 6"]
    assert [[cell.text for cell in row] for row in grid.rows] == [["0", "15", "16", "17"], ["1", "115", "116", "117"]]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("experts hold", "q_proj", "client 0"), r"no figure 'experts hold'\.\n.*'experts held'"),
        ((FIGURE, "k_proj", "client 0"), r"no row 'k_proj'\.\n.*q_proj"),
        ((FIGURE, "q_proj", "client 2"), r"no column 'client 2'"),
    ],
)
def test_what_is_not_there(asked: tuple[str, str, str], told: str, run: Run) -> None:
    with pytest.raises(ConfigError, match=told):
        entry_over_seeds(of_two_seeds(run), *asked)
