from __future__ import annotations

import dataclasses
import io
import json
from statistics import fmean

import pytest
from rich.console import Console

from fedguild.report.costs import client_totals
from fedguild.report.grid import Cell, Grid
from fedguild.report.record import Run
from fedguild.report.tables import client_grid, own_scores, routing_grid, run_table, task_grid
from tests.report.runs import START


def printed(grid: Grid, width: int = 200) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, no_color=True).print(grid.to_rich())
    return stream.getvalue()


def test_the_run_table_holds_the_last_round(run: Run) -> None:
    table = run_table(run)
    last = run.scored("budget", 6)
    assert [row.score for row in table.rows] == [last[name].score for name in ("b1", "b2", "b3", "b4")]
    assert table.mean == fmean(row.score for row in table.rows)
    assert table.mean_before == pytest.approx(fmean(START.values()))
    assert table.mtal == pytest.approx(0.5 + 0.035 + 0.12)
    assert table.smallest is table.rows[3]
    assert table.rows[3].clients == 2
    assert table.rows[3].cost is not None
    flops = sum(record.training_flops for record in run.clients if record.budget == "b4") / 2
    assert table.rows[3].cost.training_flops == pytest.approx(flops)


def test_the_recorded_mtal_wins_over_our_own_mean(run: Run) -> None:
    recorded = run.evaluations[-1].model_copy(update={"scope": "summary", "name": "mtal", "score": 0.125})
    assert run_table(dataclasses.replace(run, evaluations=[*run.evaluations, recorded])).mtal == 0.125


def test_a_client_without_examples_has_no_score(run: Run) -> None:
    empty = [e.model_copy(update={"examples": 0}) if e.name == "client-007" else e for e in run.evaluations]
    without = dataclasses.replace(run, evaluations=empty)
    assert sorted(own_scores(without)) == list(range(7))
    assert run_table(without).mtal == pytest.approx(0.5 + 0.03 + 0.12)


def test_a_run_that_scores_clients_only_has_no_budgets(run: Run) -> None:
    own = dataclasses.replace(run, evaluations=[e for e in run.evaluations if e.scope == "client"])
    table = run_table(own)
    assert (table.rows, table.mean, table.smallest) == ((), None, None)
    assert "Mean over clients, own data" in printed(table.grid())


def test_the_table_prints_the_same_numbers_everywhere(run: Run) -> None:
    table = run_table(run)
    score = f"{table.rows[3].score:.3f}"
    markdown = table.grid().to_markdown()
    line = next(line for line in markdown.splitlines() if line.startswith("| b4 "))
    assert line.split(" | ")[:4] == ["| b4", "1", "0.142", score]
    terminal = next(line for line in printed(table.grid()).splitlines() if "b4" in line)
    assert terminal.split()[:4] == ["b4", "1", "0.142", score]
    assert json.loads(json.dumps(table.to_json()))["rows"][3]["score"] == table.rows[3].score


def test_a_metric_that_is_the_score_itself_is_not_shown_twice(run: Run) -> None:
    titles = [cell.text for cell in run_table(run).grid().header]
    assert "Exact match" not in titles
    assert "Perplexity" in titles


def test_the_other_tables_of_a_run(run: Run) -> None:
    clients = client_grid(client_totals(run), {0: 0.5})
    assert len(clients.rows) == 8
    assert all(len(row) == len(clients.header) for row in clients.rows)
    assert "Own score" not in [cell.text for cell in client_grid(client_totals(run), {}).header]
    tasks = task_grid(run)
    assert tasks is not None
    add = run.scored("budget", 6)["b1"].by_task["add"]
    assert [cell.text for cell in tasks.rows[0][:2]] == ["add", f"{add:.3f}"]
    assert run.last_routing is not None
    assert [cell.text for cell in routing_grid(run.last_routing).rows[1]][3] == f"{run.last_routing.gini[1]:.3f}"


def test_a_grid_in_markdown() -> None:
    grid = Grid("T", (Cell("a"), Cell("b", "note")), ((Cell("x|y"), Cell("1", strong=True)),))
    assert grid.to_markdown() == "**T**\n\n| a | b (note) |\n| :--- | ---: |\n| x\\|y | **1** |\n"


def test_text_with_brackets_is_not_markup() -> None:
    assert "[red]run[/red]" in printed(Grid("T", (Cell("a"),), ((Cell("[red]run[/red]"),),)))
