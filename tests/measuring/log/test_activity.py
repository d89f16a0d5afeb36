"""The events of a run: what is written, and that writing them never disturbs the run."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fedguild.core.errors import DataError, StoppedError
from fedguild.core.progress import Silent
from fedguild.measuring.log.activity import ActivityLog, NotedProgress, noted


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / ActivityLog.FILE).read_text().splitlines()]


def test_what_is_told_is_written_and_passed_on(tmp_path: Path) -> None:
    told = []

    class Heard(Silent):
        def message(self, text: str) -> None:
            told.append(text)

    (tmp_path / "marker").touch()
    with noted(tmp_path, Heard(), "marker") as progress:
        progress.stage("Loading")
        progress.round_started(1, 3)
        progress.step(1, 2, math.nan)
        progress.step(2, 2, 0.5)
        progress.evaluated({"b1": 0.5, "b2": math.nan}, "accuracy")
        progress.message("Hello")
    found = events(tmp_path)
    names = ["begun", "stage", "round", "step", "step", "scores", "message", "ended"]
    assert [event["event"] for event in found] == names
    assert found[3]["loss"] is None
    assert (found[5]["scores"], found[5]["metric"]) == ({"b1": 0.5}, "accuracy")
    assert told == ["Hello"]


def test_steps_that_follow_at_once_are_left_out_but_the_last(tmp_path: Path) -> None:
    progress = NotedProgress(Silent(), ActivityLog(tmp_path).append)
    for done in range(1, 101):
        progress.step(done, 100, 1.0)
    assert [event["done"] for event in events(tmp_path)] == [1, 100]


@pytest.mark.parametrize(
    ("error", "event", "reason"),
    [
        (KeyboardInterrupt(), "interrupted", ""),
        (StoppedError("The operator stopped it.", "hint"), "stopped", "The operator stopped it."),
        (DataError("No rows.", "hint"), "failed", "No rows."),
        (ValueError("odd"), "failed", "ValueError: odd"),
    ],
)
def test_the_ending_says_why(tmp_path: Path, error: BaseException, event: str, reason: str) -> None:
    (tmp_path / "marker").touch()
    with pytest.raises(type(error)), noted(tmp_path, None, "marker"):
        raise error
    assert (events(tmp_path)[-1]["event"], events(tmp_path)[-1]["reason"]) == (event, reason)


def test_a_line_of_a_killed_process_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / "marker").touch()
    (tmp_path / ActivityLog.FILE).write_text('{"time": 1, "event": "st')
    with noted(tmp_path, None, "marker"):
        pass
    lines = (tmp_path / ActivityLog.FILE).read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines[1:]] == ["begun", "ended"]


def test_events_that_cannot_be_written_disturb_nobody(tmp_path: Path) -> None:
    (tmp_path / ActivityLog.FILE).mkdir()
    ActivityLog(tmp_path).append("stage", text="Loading")
    ActivityLog(tmp_path / "absent").append("stage", text="Loading")


def test_a_log_that_cannot_be_shortened_on_a_full_disk_disturbs_nobody(tmp_path, monkeypatch):
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkstemp", full)
    log = ActivityLog(tmp_path, most_bytes=100)
    for _ in range(2):
        log.append("request", kind="x" * 90)
    assert len(events(tmp_path)) == 2
