"""Runs whose initial state is not scored: the same as others in everything else, whatever happens to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedguild import EarlyStopping
from fedguild.config import Config
from fedguild.core import layout
from fedguild.core.errors import CheckpointError
from fedguild.measuring.log.index import RunSummary
from fedguild.measuring.log.records import EvaluationRecord, RunLog
from fedguild.report.html import write_comparison, write_report
from fedguild.report.watch.board import Board
from fedguild.report.watch.run_view import RunView
from fedguild.runs import experiment
from fedguild.runs.callbacks import Event, Saved
from fedguild.runs.results import load_run
from fedguild.server import checkpoint
from tests.runs.runs import Ended, Killed, assert_same, ended, kill_at, small_config

ROUNDS = ("federation.rounds=2", "training.steps=1", "evaluation.max_examples=4")
QUICK = (*ROUNDS, "evaluation.every=9", "evaluation.eval_on_start=false")
MOMENTS = {
    "before the first checkpoint": ("fedguild.server.checkpoint.save", 1, False),
    "after the first checkpoint": ("fedguild.server.checkpoint.save", 1, True),
    "before the first record": ("fedguild.measuring.log.records.RunLog.append", 1, False),
    "after the records of round 1": ("fedguild.server.checkpoint.save", 2, False),
    "while round 2 is scored": ("fedguild.runs.experiment.evaluate_state", 1, False),
}
SOON = ("before the first checkpoint", "while round 2 is scored")
"""What runs in `make test`."""


def scored_rounds(folder: Path) -> list[int]:
    return sorted({record.round for record in RunLog(folder).read() if isinstance(record, EvaluationRecord)})


@pytest.fixture(scope="module")
def config(olmoe_folder: Path) -> Config:
    return small_config(olmoe_folder, *QUICK)


@pytest.fixture(scope="module")
def uninterrupted(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    experiment.run(config, folder)
    assert scored_rounds(folder) == [2]
    return ended(folder)


def test_nothing_but_the_scores_of_round_0_is_missing(olmoe_folder: Path, tmp_path: Path) -> None:
    """Neither the state nor a record of the rounds depends on them, and every page does without."""
    results, found = {}, {}
    for name, initial in (("whole", "true"), ("quick", "false")):
        settings = (*ROUNDS, f"name={name}", "evaluation.clients=true", f"evaluation.eval_on_start={initial}")
        results[name] = experiment.run(small_config(olmoe_folder, *settings), tmp_path / name)
        found[name] = ended(tmp_path / name)
    assert (scored_rounds(tmp_path / "whole"), scored_rounds(tmp_path / "quick")) == ([0, 1, 2], [1, 2])
    later = [record for record in found["whole"].records if record["round"] > 0]
    assert {record["kind"] for record in found["whole"].records if record["round"] == 0} == {"evaluation"}
    assert_same(found["quick"], replace(found["whole"], records=later))
    assert results["quick"].summaries == results["whole"].summaries
    pages = {name: write_report(tmp_path / name).read_text("utf-8") for name in results}
    for said in (" before training.", "Round 0 is before training", ">before training<"):
        assert (said in pages["whole"], said in pages["quick"]) == (True, False), said
    assert RunSummary(tmp_path / "quick").before is None
    assert RunSummary(tmp_path / "quick").score == RunSummary(tmp_path / "whole").score
    write_comparison({name: [tmp_path / name] for name in results}, tmp_path)


@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=() if moment in SOON else pytest.mark.long) for moment in MOMENTS]
)
def test_a_killed_run_resumes_to_the_same_bits(config, uninterrupted, moment, tmp_path):
    target, call, after = MOMENTS[moment]
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, target, call, after=after)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path)
    experiment.resume(tmp_path)
    assert_same(ended(tmp_path), uninterrupted)


def test_before_the_first_evaluation_a_run_has_no_score_but_is_followed(config: Config, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 2, after=True)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path)
    with pytest.raises(CheckpointError, match="holds no score yet") as refused:
        load_run(tmp_path)
    assert "Wait for the first evaluation" in refused.value.hint
    assert (RunSummary(tmp_path).round, RunSummary(tmp_path).score) == (1, None)
    view = RunView(tmp_path, Board())
    view.refresh()
    view.close()
    assert {(row.rounds, row.score) for row in view.clients.values()} == {(1, None)}
    scores = experiment.evaluate(tmp_path, round=0).scores
    assert scores.keys() == {"large", "small"}, "the initial state is there, for whoever wants its score after all"


def test_a_run_that_is_stopped_before_its_first_evaluation_is_scored(config, uninterrupted, tmp_path):
    """Its report needs a score; early stopping waits for one."""

    def enough(event: Event) -> None:
        if isinstance(event, Saved):
            event.stop("enough")

    result = experiment.run(config, tmp_path, callbacks=[EarlyStopping(patience=1), enough])
    assert (result.rounds, result.stopped, scored_rounds(tmp_path)) == (1, "enough", [1])
    assert write_report(tmp_path).is_file()
    experiment.resume(tmp_path)
    assert scored_rounds(tmp_path) == [1, 2]
    went_on = ended(tmp_path)
    records = [one for one in went_on.records if (one["kind"], one["round"]) != ("evaluation", 1)]
    assert_same(replace(went_on, records=records), uninterrupted)


def test_a_run_killed_after_the_scores_of_its_early_end_resumes(config: Config, tmp_path: Path) -> None:
    """These scores are in the log before the checkpoint knows of them."""

    def enough(event: Event) -> None:
        if isinstance(event, Saved):
            event.stop("enough")

    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 3)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path, callbacks=[enough])
    assert (checkpoint.latest(tmp_path / layout.CHECKPOINTS), scored_rounds(tmp_path)) == (1, [1])
    result = experiment.resume(tmp_path, callbacks=[enough])
    assert (result.rounds, result.stopped, scored_rounds(tmp_path)) == (1, "enough", [1])
