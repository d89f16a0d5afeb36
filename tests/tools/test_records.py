"""Recorded cells: written and read again, and the page that follows from them alone, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from fedguild.config import Table, tables
from fedguild.core.errors import DataError
from fedguild.measuring.log.folder import load_run
from fedguild.measuring.log.records import ObservationRecord
from fedguild.measuring.scores.statistics import Spread, half_width, spread
from fedguild.report.costs import budget_costs
from tests.report.runs import write_run
from tools.records.cells import CellRecord, ChoiceRecord, read_records, record_of
from tools.records.claims import claims_markdown, verdict
from tools.records.pages import score_grid, table_page
from tools.records.tables import RECORDS

TABLE = Table.model_validate(
    {
        "preset": "flame/tiny-tasks",
        "reference": "ours",
        "rows": {"theirs": {}, "ours": {}, "unrun": {}},
        "claims": [
            {"says": "ours leads", "higher": "ours", "lower": ["theirs"]},
            {"says": "ours leads at b4", "higher": "ours", "lower": ["theirs"], "score": "b4"},
            {"says": "ours leads what was not run", "higher": "ours", "lower": ["unrun"]},
        ],
    }
)
SCORES = {"ours": [(0.5, 0.6), (0.6, 0.8), (0.7, 0.7)], "theirs": [(0.4, 0.7), (0.5, 0.7), (0.6, 0.7)]}
"""Row -> (mean, b4) of three seeds: means 0.1 apart in every seed, b4 by -0.1, +0.1 and 0."""


def records() -> list[CellRecord]:
    return [
        CellRecord(
            table="one/two",
            column="all",
            row=row,
            seed=seed,
            fingerprint="x",
            overrides=("evaluation.every=4",),
            fedguild="0.3.0",
            round=4,
            split="test",
            scores={"b1": mean, "b4": last, "mean": mean},
            perplexity={"b4": 3.0 + seed},
            training_flops={"b1": 2e9, "b4": 1e9},
            upload_bytes=2000.0,
            download_bytes=3000.0,
        )
        for row, scored in SCORES.items()
        for seed, (mean, last) in enumerate(scored)
    ]


def cells_of(line: str) -> list[str]:
    """The cells of a row of a table, as text."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_interval_is_students() -> None:
    """t(0.975, 2 degrees) = 4.302653: three seeds with a deviation of 0.1 give 0.248414."""
    assert half_width(Spread(0.0, 0.1, 3)) == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert half_width(spread([0.3])) == math.inf


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        ([[0.1, 0.1, 0.1]], "holds"),
        ([[0.1, 0.2, 0.3]], "undecided at this scale"),
        ([[0.19, 0.2, 0.21]], "holds"),
        ([[0.19, 0.2, 0.21], [0.1, 0.2, 0.3]], "undecided at this scale"),
        ([[0.19, 0.2, 0.21], [-0.19, -0.2, -0.21]], "does not hold"),
        ([[-0.19, -0.2, -0.21], [0.5]], "does not hold"),
        ([[-0.19, -0.2, -0.21], None], "does not hold"),
        ([[-0.2, -0.2], [0.19, 0.2, 0.21]], "undecided at this scale"),
        ([[0.19, 0.2, 0.21], None], "not recorded"),
        ([[0.0, 0.0, 0.0]], "undecided at this scale"),
        ([[0.5]], "undecided at this scale"),
        ([], "not recorded"),
    ],
)
def test_the_word_for_a_claim(gaps: list[list[float] | None], word: str) -> None:
    assert verdict([None if gap is None else spread(gap) for gap in gaps]) == word


def test_the_page_by_hand() -> None:
    page = table_page("one/two", "Two methods.", TABLE, records())
    lines = page.splitlines()
    compare = "`fedguild compare one/two evaluation.every=4 --seeds 0,1,2`"
    assert lines[:3] == ["# Two methods", "", f"`make tables TABLE=one/two`, or {compare}"]
    ours = next(line for line in lines if line.startswith("| ours |"))
    assert cells_of(ours) == [
        "ours",
        "**0.600 ± 0.100**",
        "**0.600 ± 0.100**",
        "**0.700 ± 0.100**",
        "1.50 G",
        "2.00 kB",
        "3.00 kB",
        "3",
    ]
    gaps = next(line for line in lines if line.startswith("| theirs − ours |"))
    assert cells_of(gaps)[1:] == ["−0.100 ± 0.000", "−0.100 ± 0.000", "0.000 ± 0.248"]
    assert "The differences are the same in every seed" in page
    assert "could show is" not in page
    assert "unrun |" not in page.partition("| claim |")[0]
    claims = claims_markdown(TABLE, records()).splitlines()[2:]
    holds, undecided = "**holds**, without any spread over the seeds", "**undecided at this scale**"
    assert claims == [
        f"| ours leads |  | {holds} | – | equal | 3 | − theirs: +0.100 ± 0.000 | – |",
        f"| ours leads at b4 |  | {undecided} | undecided | equal | 3 | − theirs: 0.000 ± 0.248 | 0.248 |",
        "| ours leads what was not run |  | **not recorded** | – | – | 0 | − unrun: – | – |",
    ]


def test_the_best_row_is_one_of_those_with_the_most_seeds() -> None:
    """`theirs` has a higher mean by one lucky seed, and is not bold; nor is a row with as many seeds as no other."""
    every = [one for one in records() if one.row == "ours"]
    lucky = [one.model_copy(update={"scores": {"mean": 0.9, "b4": 0.9}}) for one in records() if one.row == "theirs"]
    low = [one.model_copy(update={"scores": {"mean": 0.1, "b4": 0.1}}) for one in every]
    rows = {"ours": every, "theirs": lucky[:1], "unrun": low}
    bold = [[cell.strong for cell in row] for row in score_grid(rows, TABLE).rows]
    assert [any(row) for row in bold] == [True, False, False]
    bold = [[cell.strong for cell in row] for row in score_grid({"ours": every, "theirs": lucky[:1]}, TABLE).rows]
    assert not any(any(row) for row in bold)
    bold = [[cell.strong for cell in row] for row in score_grid({"ours": every, "theirs": lucky}, TABLE).rows]
    assert any(bold[1])
    assert not any(bold[0])


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    for record in records():
        assert record.write(tmp_path) == tmp_path / "one" / "two" / "all" / record.row / f"seed-{record.seed}.json"
    found = read_records(tmp_path)
    assert sorted(found, key=lambda record: (record.row, record.seed)) == sorted(
        records(), key=lambda record: (record.row, record.seed)
    )
    assert table_page("one/two", "Two.", TABLE, found) == table_page("one/two", "Two.", TABLE, records()[::-1])


def test_clients_nats_are_compared_by_one_quantity(tmp_path: Path) -> None:
    """Older records have the clients' mean perplexity alone, whose logarithm is more than the mean of their nats."""
    new = [one.model_copy(update={"perplexity": {"received": 5.0}, "nats": {"received": 1.2}}) for one in records()]
    for record in new:
        record.write(tmp_path)
    assert all(one.nats for one in read_records(tmp_path))
    new[0].model_copy(update={"nats": {}}).write(tmp_path)
    elsewhere = new[1].model_copy(update={"column": "other"})
    elsewhere.write(tmp_path)
    found = {one.column: one.nats for one in read_records(tmp_path)}
    assert found == {"all": {}, "other": {"received": 1.2}}


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = records()[0].write(tmp_path)
    moved = path.with_name("seed-9.json")
    path.rename(moved)
    with pytest.raises(DataError, match="is the record of one/two, all, ours, 0"):
        read_records(tmp_path)
    moved.write_text(json.dumps({"table": "one/two"}))
    with pytest.raises(DataError, match=r"seed-9\.json is not a record"):
        read_records(tmp_path)


def test_the_record_of_a_run(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "flame"))
    personal_run = load_run(write_run(tmp_path / "fedamole", name="fedamole", personal=True))
    found = record_of(run, "flame/one", "all", "flame", "abc", ["evaluation.every=2"])
    assert (found.seed, found.round, found.split, found.fingerprint) == (run.seed, run.last_round, "test", "abc")
    last = run.scored("budget", run.last_round)
    assert {name: found.scores[name] for name in last} == {name: record.score for name, record in last.items()}
    assert found.scores["mean"] == pytest.approx(sum(record.score for record in last.values()) / len(last))
    assert found.training_flops.keys() == last.keys()
    own = record_of(personal_run, "fedamole/one", "all", "fedamole", "abc")
    assert own.scores.keys() == {"mtal", "received"}
    use = {record.round: fmean(record.gini) for record in run.routing}
    assert found.observations["use of experts / Gini"] == pytest.approx(use, rel=1e-4) != {}
    assert found.observations["use of experts / entropy"].keys() == use.keys()
    assert own.upload_bytes
    assert own.training_flops == {name: cost.training_flops for name, cost in budget_costs(personal_run).items()} != {}


def observation(round: int, values: list[list[float]], columns: list[str]) -> ObservationRecord:
    rows = [f"layer {place}" for place in range(len(values))]
    return ObservationRecord(round=round, name="use", rows=rows, columns=columns, values=values)


def test_a_record_keeps_the_mean_of_each_column_of_a_figure_by_round(tmp_path: Path) -> None:
    """Columns that mean unlike things are never averaged; NaN and infinity count nowhere."""
    run = load_run(write_run(tmp_path / "flame"))
    seen = [
        observation(2, [[5.0, math.nan], [7.0, math.inf]], ["entropy", "Gini"]),
        observation(1, [[1.0, 0.25], [2.0, 0.5]], ["entropy", "Gini"]),
    ]
    found = record_of(replace(run, routing=[], observations=seen), "flame/one", "all", "flame", "abc").observations
    assert found == {"use / entropy": {1: 1.5, 2: 6.0}, "use / Gini": {1: 0.375}}
    plain = [observation(1, [[1.0], [2.0]], [])]
    rows = {"use / layer 0": {1: 1.0}, "use / layer 1": {1: 2.0}}
    assert record_of(replace(run, routing=[], observations=plain), "t", "all", "r", "f").observations == {
        "use": {1: 1.5},
        **rows,
    }


def choice(tried: dict[str, list[float]], **more: Any) -> ChoiceRecord:
    """A choice of `theirs` by one seed or several."""
    first = {value: scores[0] for value, scores in tried.items()}
    repeats = {
        value: {f"{value} {place}": score for place, score in enumerate(scores[1:])} for value, scores in tried.items()
    }
    settings = {"setting": "training.learning_rate", "column": "all", "seed": 100, "score": "mean", "fingerprints": {}}
    return ChoiceRecord(table="one/two", row="theirs", tried=first, repeats=repeats, **{**settings, **more})


def test_the_best_value_is_the_best_in_the_mean_over_the_seeds() -> None:
    assert choice({"1e-3": [0.5], "3e-3": [0.4]}).chosen == "1e-3"
    assert choice({"1e-3": [0.5, 0.2, 0.2], "3e-3": [0.4, 0.4, 0.4]}).chosen == "3e-3"


def test_a_rate_that_a_row_states_is_its_best_on_validation_examples() -> None:
    """By flame/rates-smollm2's records, all seeds at all rates; of three rows that is the presets', 2e-3."""
    shipped = {one.name: one.load() for one in tables()}
    grid = shipped["flame/rates-smollm2"]
    rates = {name: float(column.settings["training"]["learning_rate"]) for name, column in grid.columns.items()}
    scores: dict[str, dict[float, list[float]]] = {}
    for record in read_records(RECORDS):
        if record.table == "flame/rates-smollm2":
            scores.setdefault(record.row, {}).setdefault(rates[record.column], []).append(record.scores[grid.score])
    stated = {("flame", 2e-3), ("flexlora", 2e-3), ("ub-smoe-native", 2e-3)}
    for table in shipped.values():
        for name, row in table.rows.items():
            if "learning_rate" in row.settings.get("training", {}):
                stated.add((row.preset or name, float(row.settings["training"]["learning_rate"])))
    assert ("fedit", 3.5e-3) in stated
    for row, rate in stated:
        assert scores[row].keys() == set(rates.values()), row
        assert all(len(of_rate) == len(grid.seeds) for of_rate in scores[row].values()), row
        assert max(scores[row], key=lambda one: fmean(scores[row][one])) == rate, row
