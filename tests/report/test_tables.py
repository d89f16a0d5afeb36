from __future__ import annotations

import dataclasses
import io
import json
from statistics import fmean

import pytest
from rich.console import Console

from fedguild.measuring.log.folder import Run
from fedguild.report.costs import client_totals
from fedguild.report.grid import Cell, Grid
from fedguild.report.tables import routing_grid, run_table, task_grid, training_grid
from tests.report.runs import LABELS, START


def printed(grid: Grid, width: int = 200) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, no_color=True).print(grid.to_rich())
    return stream.getvalue()


def test_a_name_does_not_control_the_terminal() -> None:
    grid = Grid("a\x1b[2J[red]", [Cell("b\x9bc")], [[Cell("d\x1b]0;e\ng")]])
    shown = printed(grid)
    assert "[2J[red]" in shown
    assert "g" in shown
    assert not set("\x1b\x9b") & set(shown)


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


def test_a_run_that_scores_clients_only_has_no_budgets(run: Run) -> None:
    own = dataclasses.replace(run, evaluations=[e for e in run.evaluations if e.scope == "client"])
    table = run_table(own)
    assert (table.rows, table.mean, table.smallest) == ((), None, None)
    lines = [line.split() for line in printed(table.grid()).splitlines()]
    assert ["client-003", "b4", "–", "0.530", "0.650"] in lines
    assert ["Mean", "over", "clients", "0.535", "0.655", "±", "0.024"] in lines


def test_clients_that_know_nothing_before_training_score_0(personal_run: Run) -> None:
    """Their own models score 0 then, which is not a missing score: those received next do not stand for them."""
    before = [
        one.model_copy(update={"score": 0.0}) if (one.round, one.scope) == (0, "client") else one
        for one in personal_run.evaluations
        if one.round or one.scope != "summary"
    ]
    table = run_table(dataclasses.replace(personal_run, evaluations=before))
    assert table.clients_before == 0
    assert {row.before for row in table.clients} == {0}
    assert [cell.text for cell in table.grid().rows[-1]][3] == "0.000"


def test_own_models_and_those_received_next_stand_side_by_side(personal_run: Run) -> None:
    """The model received next scores 0.1 less than the client's own, as the fixture has it."""
    table = run_table(personal_run)
    assert table.received == pytest.approx(table.mtal - 0.1)
    assert table.clients_before == pytest.approx(0.5 + 0.035)
    grid = table.grid()
    assert [cell.text for cell in grid.header] == ["Client", "Budget", "Examples", "Before", "Own model", "As received"]
    assert [cell.text for cell in grid.rows[2]] == ["client-002", "b3", "–", "0.520", "0.640", "0.540"]
    last = [cell.text for cell in grid.rows[-1]]
    assert last == ["Mean over clients", "", "", "0.535", "0.655 ± 0.024", "0.555 ± 0.024"]
    shown = json.loads(json.dumps(table.to_json()))
    assert shown["clients"][2] == {
        "client": "client-002",
        "budget": "b3",
        "examples": None,
        "before": pytest.approx(0.52),
        "own": pytest.approx(0.64),
        "trained": None,
        "received": pytest.approx(0.54),
    }


def test_the_table_prints_the_same_numbers_everywhere(run: Run) -> None:
    table = run_table(run)
    score = f"{table.rows[3].score:.3f}"
    markdown = table.grid().to_markdown()
    line = next(line for line in markdown.splitlines() if line.startswith("| b4 "))
    assert line.split(" | ")[:4] == ["| b4", "1", "0.142", score]
    terminal = next(line for line in printed(table.grid()).splitlines() if "b4" in line)
    assert terminal.split()[:4] == ["b4", "1", "0.142", score]
    assert json.loads(json.dumps(table.to_json()))["rows"][3]["score"] == table.rows[3].score


def test_a_metric_that_equals_the_score_has_its_column_unless_it_is_the_score(run: Run) -> None:
    def scored(metric: str, *names: str) -> list[str]:
        evaluations = [
            one.model_copy(update={"metric": metric, "metrics": dict.fromkeys(names, one.score)})
            for one in run.evaluations
        ]
        header = run_table(dataclasses.replace(run, evaluations=evaluations)).grid().header
        return [cell.text for cell in header[3:-4]]

    assert scored("accuracy", "accuracy", "macro_f1") == ["Accuracy", "Macro F1"]
    assert scored("macro_f1", "accuracy", "macro_f1") == ["Macro F1", "Accuracy"]
    assert scored("", "accuracy") == ["Score"]


def test_tasks_with_unlike_metrics_say_which_is_theirs(run: Run) -> None:
    unlike = {label: "accuracy" if place else "rouge_l" for place, label in enumerate(LABELS)}
    scored = [record.model_copy(update={"task_metrics": unlike}) for record in run.evaluations]
    changed = dataclasses.replace(run, evaluations=scored)
    tasks = task_grid(changed)
    assert tasks is not None
    assert [row[0].text for row in tasks.rows][:2] == ["add (ROUGE\u2011L)", "choose (accuracy)"]
    assert dict(changed.frame("tasks")[["task", "metric"]].to_numpy().tolist()) == unlike


def test_the_other_tables_of_a_run(run: Run) -> None:
    clients = training_grid(client_totals(run))
    assert len(clients.rows) == 8
    assert all(len(row) == len(clients.header) for row in clients.rows)
    tasks = task_grid(run)
    assert tasks is not None
    add = run.scored("budget", 6)["b1"].by_task["add"]
    assert [cell.text for cell in tasks.rows[0][:2]] == ["add", f"{add:.3f}"]
    assert run.last_routing is not None
    assert [cell.text for cell in routing_grid(run.last_routing).rows[1]][3] == f"{run.last_routing.gini[1]:.3f}"
