"""Sending of records to trackers: once each, whatever happens to the run, and never to the run's harm."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from fedguild.core.errors import ConfigError
from fedguild.measuring.log.records import RunLog
from fedguild.runs.tracking import Begun, TrackedRun, check_trackers
from fedguild.runs.tracking.points import points
from fedguild.runs.tracking.sending import TRACKING, Tracking, for_comparison
from tests.report.runs import write_run
from tests.runs.tracking.runs import Memory, Series, config_of, offer, play


class Failing(Memory):
    def add(self, round: int, values: Mapping[str, float]) -> None:
        if round == 2:
            raise OSError("no route to host\nand more")


class Exiting(Memory):
    def begin(self, run: TrackedRun) -> Begun:
        raise SystemExit(3)


class Hanging(Memory):
    def begin(self, run: TrackedRun) -> Begun:
        threading.Event().wait()
        raise AssertionError


class Informed(Memory):
    def begin(self, run: TrackedRun) -> Begun:
        begun = super().begin(run)
        return Begun(begun.id, max(self.runs[begun.id].get("round_seconds", {}), default=-1))


class Lacking(Memory):
    """One whose package is not installed."""

    PACKAGE: ClassVar[str] = "no_such_package"
    EXTRA: ClassVar[str] = "lacking"


@pytest.fixture(autouse=True)
def _trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Memory, Failing, Exiting, Hanging, Informed, Lacking)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_run(tmp_path / "source", rounds=4, clients=2, layers=1)


def expected(source: Path, last: int, **options: bool) -> Series:
    series: Series = {}
    for name, value, number in points(RunLog(source).read(), **options):
        if number <= last:
            series.setdefault(name, {})[number] = value
    return series


def test_no_tracker_learns_where_a_file_is(tmp_path: Path, source: Path) -> None:
    own = ["/home/alice/trial/patients.json", "~/more/*.json", "relative/own.json"]
    config = config_of(["memory"], "model.path=/home/alice/models/olmoe", f"data.train={own}")
    play(tmp_path / "run", source, config, 1, 1)
    (run,) = Memory.seen
    assert (run.settings["model"]["path"], run.settings["data"]["train"]) == (
        "olmoe",
        ["patients.json", "*.json", "relative/own.json"],
    )
    assert "alice" not in str(run.settings)


def test_all_rounds_arrive_with_round_0_and_the_settings(tmp_path: Path, source: Path) -> None:
    config = config_of(["memory"], "seed=7", "tracking.tags=[a, b]", "tracking.group=g", "output=somewhere")
    play(tmp_path / "run", source, config, 1, 4)
    assert Memory.runs == {"run 0": expected(source, 4)}
    assert Memory.ended == [False]
    (run,) = Memory.seen
    assert (run.project, run.name, run.group, run.tags) == ("guild", "flame-tiny-tasks-seed-7", "g", ("a", "b"))
    assert run.folder == tmp_path / "run"
    assert run.settings["seed"] == 7
    assert not {"output", "tracking"} & run.settings.keys()
    assert run.flat_settings()["method.name"] == "flame"


def test_a_killed_run_continues_its_tracked_run_without_a_point_twice(tmp_path: Path, source: Path) -> None:
    play(tmp_path / "run", source, config_of(["memory"]), 1, 2, killed=True)
    assert Memory.runs == {"run 0": expected(source, 1)}
    assert Memory.ended == [True]
    play(tmp_path / "run", source, config_of(["memory"]), 2, 4)
    assert Memory.runs == {"run 0": expected(source, 4)}
    assert [(run.id, run.round) for run in Memory.seen] == [("", -1), ("run 0", 1)]


def test_a_tracker_that_knows_what_it_holds_is_believed(tmp_path: Path, source: Path) -> None:
    """A process that died between a round's values and the note that they were sent."""
    play(tmp_path / "run", source, config_of(["informed"]), 1, 2)
    (tmp_path / "run" / TRACKING).write_text(json.dumps({"informed": {"id": "run 0", "round": 1}}))
    play(tmp_path / "run", source, config_of(["informed"]), 3, 4)
    assert Memory.runs == {"run 0": expected(source, 4)}


def test_a_run_that_goes_back_begins_a_new_tracked_run_with_all_its_rounds(tmp_path: Path, source: Path) -> None:
    play(tmp_path / "run", source, config_of(["memory"]), 1, 3)
    play(tmp_path / "run", source, config_of(["memory"]), 2, 4)
    assert Memory.runs == {"run 0": expected(source, 3), "run 1": expected(source, 4)}


def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(tmp_path: Path, source: Path) -> None:
    told: list[str] = []
    play(tmp_path / "run", source, config_of(["failing", "exiting", "memory"]), 1, 4, tell=told.append)
    assert sorted(told) == [
        "The tracker exiting failed, and the run goes on without it: SystemExit: 3",
        "The tracker failing failed, and the run goes on without it: OSError: no route to host",
    ]
    assert expected(source, 4) in Memory.runs.values()
    kept = json.loads((tmp_path / "run" / TRACKING).read_text())
    assert {name: entry["round"] for name, entry in kept.items()} == {"failing": 1, "memory": 4}


def test_a_tracker_that_hangs_holds_up_neither_the_rounds_nor_the_end(tmp_path: Path, source: Path) -> None:
    told: list[str] = []
    config = config_of(["memory", "hanging"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracking.__init__, "__kwdefaults__", {"wait_seconds": 0.5})
        play(tmp_path / "run", source, config, 1, 4, tell=told.append)
    assert told == [
        "hanging has not taken all rounds after 0.5 s; `fedguild resume` on the run's folder sends the rest."
    ]
    assert expected(source, 4) in Memory.runs.values()


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("lacking", "tracking: lacking needs the package no_such_package", "pip install 'fedguild[lacking]'"),
        ("memry", "There is no tracker 'memry'", "Did you mean 'memory'"),
    ],
)
def test_one_that_is_missing_or_unknown_is_an_error_at_once(name: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Tracking(config_of([name]), print)
    assert hint in caught.value.hint
    with pytest.raises(ConfigError, match=message):
        check_trackers([name])


def test_a_run_of_a_comparison_is_in_its_group_under_its_own_name() -> None:
    plain = config_of([])
    assert for_comparison(plain, "folder") is plain
    cell = for_comparison(config_of(["memory"], "seed=2"), "folder").tracking
    assert (cell.group, cell.name) == ("folder", None)
    named = for_comparison(config_of(["memory"], "tracking.name=mine", "tracking.group=ours"), "folder").tracking
    assert (named.group, named.name) == ("ours", "mine-flame-tiny-tasks-seed-0")
