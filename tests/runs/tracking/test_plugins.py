"""A tracker of another package, found by its entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedguild.core.errors import ConfigError
from fedguild.runs.tracking import TRACKERS, check_trackers
from tests.plugins import install
from tests.report.runs import write_run
from tests.runs.tracking.runs import config_of, play

SOURCE = '''
"""Rounds in a plain file."""

from fedguild.runs.tracking import Begun


class Diary:
    PACKAGE = "diary"
    EXTRA = ""
    TAKES_BACK = False

    def begin(self, run):
        self.path = run.folder / "diary.txt"
        return Begun("the diary")

    def add(self, round, values):
        with open(self.path, "a") as file:
            print(round, values["round_seconds"] if round else "", file=file)

    def finish(self, *, failed):
        pass


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


def test_it_gets_the_rounds_of_a_run(tmp_path: Path) -> None:
    (found,) = [plugin for plugin in TRACKERS.found() if plugin.name == "diary"]
    assert (found.origin, found.title) == ("a-diary 1.2", "Rounds in a plain file")
    source = write_run(tmp_path / "source", rounds=2, clients=2, layers=1)
    play(tmp_path / "run", source, config_of(["diary"]), 1, 2)
    assert (tmp_path / "run/diary.txt").read_text().split() == ["0", "1", "4.6", "2", "4.6"]


def test_one_that_is_no_tracker_is_refused_with_its_package() -> None:
    with pytest.raises(
        ConfigError, match=r"half \(a-diary 1.2\) cannot be used: TypeError: a tracker has PACKAGE"
    ) as it:
        check_trackers(["half"])
    assert it.value.hint == "Repair or uninstall a-diary 1.2."
