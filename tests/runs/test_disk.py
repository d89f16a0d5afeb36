"""A disk that is full and files that are damaged: nothing that was written is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedguild.core.layout import CHECKPOINTS
from fedguild.measuring.log.records import RunLog
from fedguild.runs import experiment
from fedguild.server import checkpoint
from tests.runs.runs import Ended, assert_same, comparable, ended, says, small_config, small_settings

Complaint = Callable[..., str]
TASKS = "flame/tiny-tasks"


@pytest.fixture
def whole(recorded: Path) -> Ended:
    """The run that the following ones shall end as."""
    return ended(recorded)


def fill_up(patch: pytest.MonkeyPatch, folder: Path, name: str, after_round: int = -1) -> None:
    """Makes the disk full for files with a name, once a round's checkpoint is there."""
    sync = os.fsync

    def full(descriptor: int) -> None:
        written = os.fstat(descriptor).st_ino
        names = [path.name for path in folder.rglob("*") if path.lstat().st_ino == written]
        latest = checkpoint.latest(folder / CHECKPOINTS)
        if any(name in found for found in names) and (-1 if latest is None else latest) >= after_round:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    patch.setattr(os, "fsync", full)


@pytest.mark.parametrize(
    ("file", "after_round"),
    [
        ("metrics.jsonl", -1),
        pytest.param("round-00000.checkpoint", -1, marks=pytest.mark.long),
        pytest.param("round-00001.memory", 0, marks=pytest.mark.long),
        pytest.param("metrics.jsonl", 1, marks=pytest.mark.long),
        ("round-00002.checkpoint", 1),
        ("round-00003.memory", 2),
    ],
)
def test_a_full_disk_costs_nothing_that_was_written(complaint, olmoe_folder, whole, file, after_round):
    folder = Path("out")
    with pytest.MonkeyPatch.context() as patch:
        fill_up(patch, folder, file, after_round)
        told = complaint("run", TASKS, *small_settings(olmoe_folder), "--output", folder)
        says(told, "Cannot write out/", file, "No space left on device", "free some space", "then resume")
        if after_round > 0:
            says(complaint("resume", folder), "No space left on device")
    assert checkpoint.latest(folder / CHECKPOINTS) == (None if after_round < 0 else after_round)
    assert not list(folder.rglob("*.part"))
    complete = [record for record in whole.records if record["round"] <= after_round]
    assert comparable(RunLog(folder).read())[: len(complete)] == complete
    experiment.resume(folder)
    assert_same(ended(folder), whole)


@pytest.mark.parametrize("file", ["environment.json", "partition.json", "config.yaml"])
def test_a_disk_that_is_full_from_the_start_takes_the_same_command_again(complaint, olmoe_folder, whole, file):
    with pytest.MonkeyPatch.context() as patch:
        fill_up(patch, Path("out"), file)
        says(complaint("run", TASKS, *small_settings(olmoe_folder), "--output", "out"), f"Cannot write out/{file}")
    experiment.run(small_config(olmoe_folder), Path("out"))
    assert_same(ended(Path("out")), whole)


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"\0" * len(content)])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(command, recorded, whole, damage):
    shutil.copytree(recorded, "out")
    file = Path("out") / CHECKPOINTS / "round-00003.checkpoint"
    file.write_bytes(damage(file.read_bytes()))
    resumed = command("resume", "out", "--json")
    assert resumed.exit_code == 0, resumed.output
    says(" ".join(resumed.stderr.split()), f"{file} is damaged", "It is skipped for the checkpoint before it")
    assert json.loads(resumed.stdout)["folder"] == "out"
    assert_same(ended(Path("out")), whole)


def test_a_damaged_memory_is_named(complaint: Complaint, recorded: Path) -> None:
    shutil.copytree(recorded, "out")
    (Path("out") / CHECKPOINTS / "round-00003.checkpoint").unlink()
    file = Path("out/clients/client-001/round-00002.memory")
    file.write_bytes(file.read_bytes()[:-1])
    says(complaint("resume", "out"), f"{file} is damaged")
