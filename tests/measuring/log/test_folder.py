from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fedguild.core.errors import CheckpointError
from fedguild.measuring.log.folder import Run, load_run
from fedguild.measuring.log.records import EvaluationRecord, RunLog
from fedguild.report.costs import client_totals, mean_cost, phase_seconds
from tests.report.conftest import REFUSED
from tests.report.runs import START, write_run


def test_what_a_run_folder_says(run: Run) -> None:
    assert (run.name, run.method, run.seed, run.split, run.last_round) == ("flame", "flame", 0, "test", 6)
    assert [(b.name, b.active_experts, b.rank) for b in run.budgets()] == [
        ("b1", 8, 20),
        ("b2", 4, 12),
        ("b3", 2, 8),
        ("b4", 1, 6),
    ]
    assert run.curve("budget", "b4")[0] == (0, START["b4"])
    assert [round for round, _ in run.curve("budget", "b4")] == list(range(7))
    assert run.rejections() == [REFUSED]
    assert run.last_routing is not None
    assert run.last_routing.round == 6
    assert run.setting("data", "partition", "alpha") == 0.5
    assert run.setting("data", "partition", "beta", default="none") == "none"


def test_active_experts_come_from_the_config_only_where_it_decides_them(run: Run) -> None:
    silent = [e.model_copy(update={"active_experts": None}) for e in run.evaluations]
    unsaid = dataclasses.replace(run, evaluations=silent)
    assert [budget.active_experts for budget in unsaid.budgets()] == [8, 4, 2, 1]
    by_method = dataclasses.replace(unsaid, config={**run.config, "evaluation": {"active_experts": "method"}})
    assert [budget.active_experts for budget in by_method.budgets()] == [None] * 4


def test_the_shown_split_is_validation_where_no_test_was_scored(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: tiny\n")
    score = EvaluationRecord(round=2, scope="budget", name="all", split="validation", score=0.25)
    RunLog(folder).append(score)
    run = load_run(folder)
    assert (run.split, run.last_round, run.seed) == ("validation", 2, 0)
    assert [budget.name for budget in run.budgets()] == ["all"]


def test_totals_of_a_client_are_sums_over_its_rounds(run: Run) -> None:
    totals = client_totals(run)
    mine = [record for record in run.clients if record.client == 3]
    row = totals.loc[3]
    assert (row["budget"], row["active_experts"], row["rounds"], row["steps"]) == ("b4", 1, 6, 150)
    assert row["tokens"] == sum(record.tokens for record in mine)
    assert row["train_loss"] == mine[-1].train_loss
    assert row["upload_bytes"] == sum(record.upload_bytes for record in mine)
    assert row["peak_memory_bytes"] == max(record.peak_memory_bytes or 0 for record in mine)
    pair = mean_cost(totals.loc[[0, 3]])
    assert pair is not None
    assert pair.training_flops == (totals["training_flops"][0] + totals["training_flops"][3]) / 2
    assert mean_cost(totals[:0]) is None


def test_what_a_client_withholds_once_is_missing_in_its_totals_and_in_the_mean(run: Run) -> None:
    withheld = run.clients[3].model_copy(update={"training_flops": None, "seconds": None, "peak_memory_bytes": None})
    totals = client_totals(dataclasses.replace(run, clients=[withheld, *run.clients[4:]]))
    assert totals["training_flops"].isna().tolist() == [index == withheld.client for index in totals.index]
    assert totals["peak_memory_bytes"].notna().all()
    cost = mean_cost(totals)
    assert cost is not None
    assert (cost.training_flops, cost.seconds) == (None, None)
    assert cost.upload_bytes == pytest.approx(totals["upload_bytes"].mean())
    assert client_totals(dataclasses.replace(run, clients=[])).empty


def test_phases_cover_the_wall_time(run: Run) -> None:
    phases = phase_seconds(run)
    assert list(phases)[:2] == ["train", "evaluate"]
    assert list(phases)[-1] == "other"
    assert sum(phases.values()) == pytest.approx(6 * 4.6)
    assert phases["other"] == pytest.approx(6 * (4.6 - 4.43))


def test_a_run_until_a_round_is_what_a_shorter_one_would_be(run: Run) -> None:
    early = run.until(3)
    assert (early.last_round, len(early.rounds), early.config) == (3, 3, run.config)
    assert early.curve("budget", "b4") == run.curve("budget", "b4")[:4]
    for records in (early.clients, early.routing, early.evaluations):
        assert max(record.round for record in records) == 3
    assert client_totals(early)["rounds"][3] == 3
    assert run.until(6) == run
    unscored = dataclasses.replace(run, evaluations=[one for one in run.evaluations if one.round % 2 == 0])
    with pytest.raises(CheckpointError, match="was not evaluated after round 3"):
        unscored.until(3)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.yaml"):
        load_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", "a: [1", "cannot be read"),
        ("config.yaml", "- 1", "holds a list"),
        ("environment.json", "{", "cannot be read"),
        ("partition.json", json.dumps({"labels": ["a"], "counts": [[1, 2]]}), "2 counts for 1 labels"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    folder = write_run(tmp_path / "run", rounds=1)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_run(folder)
    assert str(folder / name) in str(caught.value)
