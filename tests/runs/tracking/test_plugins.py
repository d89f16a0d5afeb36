"""A tracker of another package, found by its entry point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedguild.core.errors import ConfigError
from fedguild.measuring.log.records import RunLog
from fedguild.runs.tracking import TRACKERS, check_trackers
from fedguild.runs.tracking.points import points
from tests.plugins import install
from tests.report.runs import write_run
from tests.runs.tracking.runs import Series, config_of, play

SOURCE = '''
"""Rounds in a plain file."""

import json

from fedguild.runs.tracking import Begun


class Diary:
    """A line for every round, in the run's folder."""

    PACKAGE = "diary"
    EXTRA = ""
    TAKES_BACK = False

    def begin(self, run):
        self.path = run.folder / "diary.jsonl"
        self.write({"name": run.name, "project": run.project, "seed": run.settings["seed"], "continues": run.id})
        return Begun("the diary")

    def add(self, round, values):
        self.write({"round": round, **values})

    def finish(self, *, failed):
        self.write({"failed": failed})

    def write(self, entry):
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\\n")


TRACKER = Diary
NOTHING = object()
'''
ENTRIES = """
[fedguild.trackers]
diary = diary
half = diary:NOTHING
"""


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path / "package", "a-diary", entry_points=ENTRIES, modules={"diary.py": SOURCE})


def test_it_gets_the_rounds_of_a_run_that_is_killed_and_continued(tmp_path: Path) -> None:
    assert "diary" in TRACKERS
    (found,) = [plugin for plugin in TRACKERS.found() if plugin.name == "diary"]
    assert (found.origin, found.title) == ("a-diary 1.2", "Rounds in a plain file")
    source, config = write_run(tmp_path / "source", rounds=3, clients=2, layers=1), config_of(["diary"], "seed=4")
    told: list[str] = []
    play(tmp_path / "run", source, config, 1, 2, killed=True, tell=told.append)
    play(tmp_path / "run", source, config, 2, 3, tell=told.append)
    assert told == []
    entries = [json.loads(line) for line in (tmp_path / "run/diary.jsonl").read_text().splitlines()]
    begun, rounds = [entry for entry in entries if "name" in entry], [entry for entry in entries if "round" in entry]
    common = {"name": "flame-tiny-tasks-seed-4", "project": "guild", "seed": 4}
    assert begun == [{**common, "continues": ""}, {**common, "continues": "the diary"}]
    assert [entry["failed"] for entry in entries if "failed" in entry] == [True, False]
    held: Series = {}
    for entry in rounds:
        for name, value in entry.items():
            assert entry["round"] not in held.setdefault(name, {})
            held[name][entry["round"]] = value
    held.pop("round")
    expected: Series = {}
    for name, value, number in points(RunLog(source).read()):
        expected.setdefault(name, {})[number] = value
    assert held == expected


def test_one_that_is_no_tracker_is_refused_with_its_package() -> None:
    with pytest.raises(
        ConfigError, match=r"half \(a-diary 1.2\) cannot be used: TypeError: a tracker has PACKAGE"
    ) as it:
        check_trackers(["half"])
    assert it.value.hint == "Repair or uninstall a-diary 1.2."
