"""Kill a run at any moment: `resume` gives the numbers of a run that was never stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedguild.config import Config, load_config
from fedguild.core.errors import CheckpointError
from fedguild.core.layout import CHECKPOINTS, MEMORY
from fedguild.core.progress import Progress
from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.records import RunLog
from fedguild.runs import experiment
from fedguild.runs.callbacks import Event, Saved
from fedguild.runs.experiment import RunResult
from fedguild.runs.setup.experiment import Experiment
from fedguild.server import checkpoint
from tests.runs.runs import Ended, Killed, assert_same, ended, kill_at, small_config, small_settings

ALL, HALF = "all clients", "half of the clients"
OVERRIDES = {
    ALL: ["federation.cohort_size=2", "evaluation.clients=true"],
    HALF: ["federation.client_fraction=0.5", "federation.rounds=4", "federation.cohort_size=1"],
}
STEPS_A_ROUND = 4
"""Two cohorts, two steps each, in either case."""
MOMENTS = {
    "while round 0 is scored": ("fedguild.runs.experiment.evaluate_state", 1, False),
    "before the first record": ("fedguild.measuring.log.records.RunLog.append", 1, False),
    "before the first checkpoint": ("fedguild.server.checkpoint.save", 1, False),
    "in the middle of the training of round 1": ("fedguild.client.optimizer.SlotOptimizer.step", 2, False),
    "in the middle of the training of round 2": ("fedguild.client.optimizer.SlotOptimizer.step", 7, False),
    "after a memory of round 2": ("fedguild.client.memory.ClientMemory.save", {ALL: 5, HALF: 3}, True),
    "while round 2 is scored": ("fedguild.runs.experiment.evaluate_state", 3, False),
    "before the records of round 2": ("fedguild.measuring.log.records.RunLog.append", 3, False),
    "after the records of round 2": ("fedguild.server.checkpoint.save", 3, False),
    "after the checkpoint of round 2": ("fedguild.client.memory.ClientMemory.forget", 3, False),
    "before the report": ("fedguild.runs.experiment.write_report", 1, False),
}


SOON = [moment for moment in MOMENTS if "round 2" in moment]
"""What runs in `make test`."""


@pytest.fixture(scope="module", params=[ALL, pytest.param(HALF, marks=pytest.mark.long)])
def config(request: pytest.FixtureRequest, olmoe_folder: Path) -> Config:
    return small_config(olmoe_folder, f"name={request.param.split()[0]}", *OVERRIDES[request.param])


@pytest.fixture(scope="module")
def finished(config: Config, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    return experiment.run(config, folder)


@pytest.fixture
def uninterrupted(finished: RunResult) -> Ended:
    return ended(finished.folder)


@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=() if moment in SOON else pytest.mark.long) for moment in MOMENTS]
)
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(config, uninterrupted, moment, tmp_path):
    target, call, after = MOMENTS[moment]
    number = call if isinstance(call, int) else call[HALF if config.federation.client_fraction < 1 else ALL]
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, target, number, after=after)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path)
    experiment.resume(tmp_path)
    assert_same(ended(tmp_path), uninterrupted)


def test_a_run_killed_again_and_again_resumes_to_the_same_bits(config, uninterrupted, tmp_path):
    """Every process gets through one round's training and dies in the next."""
    start: Callable[..., object] = experiment.run
    arguments: tuple[object, ...] = (config, tmp_path)
    for number in range(1, config.federation.rounds + 1):
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, "fedguild.client.optimizer.SlotOptimizer.step", STEPS_A_ROUND + 2)
            try:
                start(*arguments)
            except Killed:
                assert checkpoint.latest(tmp_path / CHECKPOINTS) == number
        start, arguments = experiment.resume, (tmp_path,)
    assert_same(ended(tmp_path), uninterrupted)


def test_a_line_that_was_cut_off_does_not_matter(config: Config, uninterrupted: Ended, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 2)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path)
    log = RunLog(tmp_path).path
    log.write_bytes(log.read_bytes()[:-20])
    experiment.resume(tmp_path)
    assert_same(ended(tmp_path), uninterrupted)


def test_a_damaged_line_after_the_last_checkpoint_does_not_matter(
    config: Config, uninterrupted: Ended, tmp_path: Path
) -> None:
    """Such as a power cut may leave of an append."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 3)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path)
    with open(RunLog(tmp_path).path, "ab") as log:
        log.write(b"\0" * 200 + b'"x":1}\n')
    experiment.resume(tmp_path)
    assert_same(ended(tmp_path), uninterrupted)


def test_what_the_clients_kept_is_part_of_the_run(config: Config, uninterrupted: Ended, tmp_path: Path) -> None:
    """Without the clients' rescalers a resumed run ends elsewhere: the tests above look at something."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 3, after=True)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path)
    shutil.rmtree(tmp_path / MEMORY)
    experiment.resume(tmp_path)
    found = ended(tmp_path)
    differing = [n for n, t in uninterrupted.state.tensors.items() if not torch.equal(found.state.tensors[n], t)]
    assert any("/rescaler/" in name for name in differing)


def test_resuming_a_finished_run_changes_nothing(finished: RunResult, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    (folder / "report.html").unlink()
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.client.cohort.Cohort.steps", 1)
        again = experiment.resume(folder)
    assert again == replace(finished, folder=folder, report=folder / finished.report.name)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after.pop(folder / "report.html") == b""
    events = folder / ActivityLog.FILE  # no part of the run's state: it tells that somebody resumed
    assert after.pop(events).startswith(files.pop(events))
    assert after == files


def test_a_run_without_its_checkpoints_keeps_its_records(finished: RunResult, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    shutil.rmtree(folder / CHECKPOINTS)
    log = (folder / RunLog.FILE).read_bytes()
    with pytest.raises(CheckpointError, match="has records of rounds, but no checkpoint"):
        experiment.resume(folder)
    assert (folder / RunLog.FILE).read_bytes() == log


def test_going_back_can_be_interrupted(config: Config, finished: RunResult, tmp_path: Path) -> None:
    """Between the removal of the later rounds' checkpoints and that of their records."""
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    last = checkpoint.latest(folder / CHECKPOINTS)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.measuring.log.records.write_bytes", 1)
        with pytest.raises(Killed):
            experiment.resume(folder, round=last - 1)
    assert checkpoint.latest(folder / CHECKPOINTS) == last - 1
    experiment.resume(folder)
    assert_same(ended(folder), ended(finished.folder))


def test_other_data_than_the_run_began_with_is_refused_before_anything_changes(
    finished: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    prepared = experiment.prepare

    def changed(config: Config, output: Path, progress: Progress | None = None) -> Experiment:
        found = prepared(config, output, progress)
        client = found.data.clients[1]
        train = (replace(client.train[0], response="other"), *client.train[1:])
        found.data.clients[1] = replace(client, train=train)
        return found

    monkeypatch.setattr("fedguild.runs.experiment.prepare", changed)
    with pytest.raises(CheckpointError, match="data are not those with which"):
        experiment.resume(folder, round=finished.rounds - 1)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [path.name for path, content in after.items() if files.get(path) != content] == [ActivityLog.FILE]


def test_a_run_that_goes_on_after_an_early_stop_and_is_killed_goes_on_again(
    config: Config, uninterrupted: Ended, tmp_path: Path
) -> None:
    """Nor is it taken for one that has ended: its report is gone."""

    def enough(event: Event) -> None:
        if isinstance(event, Saved):
            event.stop("enough")

    assert experiment.run(config, tmp_path, callbacks=[enough]).rounds == 1
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.client.optimizer.SlotOptimizer.step", 1)
        with pytest.raises(Killed):
            experiment.resume(tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert experiment.resume(tmp_path).stopped == ""
    assert ended(tmp_path).state.tensors.keys() == uninterrupted.state.tensors.keys()
    assert all(torch.equal(ended(tmp_path).state.tensors[n], t) for n, t in uninterrupted.state.tensors.items())


def test_dropout_and_an_unfinished_epoch_resume_to_the_same_bits(olmoe_folder: Path, tmp_path: Path) -> None:
    method = "method={name: fedit, rank: 3, targets: [q_proj, experts], dropout: 0.5}"
    config = small_config(
        olmoe_folder, method, "training.steps=null", "training.epochs=0.5", "training.lr_scheduler=cosine"
    )
    experiment.run(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.runs.experiment.evaluate_state", 3)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path / "cut")
    assert checkpoint.latest(tmp_path / "cut" / CHECKPOINTS) == 1
    experiment.resume(tmp_path / "cut")
    assert_same(ended(tmp_path / "cut"), ended(tmp_path / "whole"))


def test_the_config_survives_a_resume_that_fails_at_once(config: Config, uninterrupted: Ended, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 1)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.runs.experiment.prepare", 1)
        with pytest.raises(Killed):
            experiment.resume(tmp_path)
    experiment.resume(tmp_path)
    assert_same(ended(tmp_path), uninterrupted)


def test_a_checkpoint_of_other_settings_is_refused(config: Config, finished: RunResult, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    other = config.model_copy(update={"seed": config.seed + 1})
    (folder / "config.yaml").write_text(other.resolved_yaml())
    with pytest.raises(CheckpointError, match="was written with other settings than") as caught:
        experiment.resume(folder)
    assert config.fingerprint() in caught.value.message
    assert other.fingerprint() in caught.value.message
    assert "Resume with the config that the run began with" in caught.value.hint


@pytest.mark.long
def test_sigkill_before_the_first_checkpoint_and_in_the_middle_of_a_round(olmoe_folder: Path, tmp_path: Path) -> None:
    settings = small_settings(
        olmoe_folder,
        "federation.cohort_size=1",
        "federation.rounds=2",
        "training.steps=6",
        "evaluation.every=2",
        "evaluation.max_new_tokens=4",
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _kill_when(cut / "config.yaml", "run", "flame/tiny-tasks", *settings, "--output", str(cut))
    assert checkpoint.latest(cut / CHECKPOINTS) is None
    first_memory = cut / MEMORY / "client-000" / "round-00002.memory"
    _kill_when(first_memory, "resume", str(cut))
    assert checkpoint.latest(cut / CHECKPOINTS) == 1
    assert not (cut / MEMORY / "client-003" / "round-00002.memory").exists()
    experiment.resume(cut)
    experiment.run(load_config("flame/tiny-tasks", settings), whole)
    assert_same(ended(cut), ended(whole))


def _kill_when(path: Path, *arguments: str) -> None:
    """Runs `fedguild ARGUMENTS...` in a process of its own, and kills it as soon as a file is there."""
    command = [sys.executable, "-m", "fedguild", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        while not path.exists():
            if process.poll() is not None:
                assert process.stderr is not None
                pytest.fail(f"It ended before it wrote {path}:\n{process.stderr.read().decode()}")
            time.sleep(0.002)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
