"""A tracker in memory, and events of a run whose log is there already, as the round loop sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from fedguild.config import Config, load_config
from fedguild.core.plugins import Found
from fedguild.measuring.log.records import RunLog
from fedguild.runs.callbacks import Delivery
from fedguild.runs.tracking import TRACKERS, Begun, TrackedRun, Tracker
from fedguild.runs.tracking.sending import Tracking

Series = dict[str, dict[int, float]]
"""Name -> round -> value."""


class Memory:
    """A tracker that keeps runs in a class variable, and refuses a round that it has."""

    PACKAGE: ClassVar[str] = "json"
    EXTRA: ClassVar[str] = ""
    TAKES_BACK: ClassVar[bool] = False
    runs: ClassVar[dict[str, Series]] = {}
    seen: ClassVar[list[TrackedRun]] = []
    ended: ClassVar[list[bool]] = []

    def begin(self, run: TrackedRun) -> Begun:
        self.seen.append(run)
        self.id = run.id or f"run {len(self.runs)}"
        self.runs.setdefault(self.id, {})
        return Begun(self.id)

    def add(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            series = self.runs[self.id].setdefault(name, {})
            assert round not in series
            series[round] = value

    def finish(self, *, failed: bool) -> None:
        self.ended.append(failed)


def offer(monkeypatch: pytest.MonkeyPatch, *kinds: type[Tracker]) -> None:
    found = tuple(Found(kind.__name__.lower(), "", "tests", f"{kind.__module__}:{kind.__name__}") for kind in kinds)
    usual = type(TRACKERS).found
    monkeypatch.setattr(type(TRACKERS), "found", lambda self: found if self is TRACKERS else usual(self))
    for kept in (Memory.runs, Memory.seen, Memory.ended):
        kept.clear()  # type: ignore[attr-defined]


class InterruptedRunError(Exception):
    """The run was killed."""


def config_of(trackers: Sequence[str], *more: str) -> Config:
    return load_config("flame/tiny-tasks", [f"tracking=[{', '.join(trackers)}]", "tracking.project=guild", *more])


def play(
    folder: Path,
    source: Path,
    config: Config,
    first: int,
    last: int,
    *,
    killed: bool = False,
    tell: Callable[[str], None] = print,
) -> None:
    """Runs the rounds `first` to `last` of a run, whose records are those of the log in `source`.

    A run that is `killed` has written and sent the records of `last`, but not saved them.
    """
    records = RunLog(source).read()
    log = RunLog(folder)
    with log.truncating_after(first - 1):
        pass
    if first == 1:
        log.append(*[record for record in records if record.round == 0])
    try:
        with Tracking(config, tell) as tracking:
            delivery = Delivery([tracking], folder, last, [])
            if first > 1:
                delivery.saved(first - 1)
            for number in range(first, last + 1):
                delivery.round_started(number)
                members = [record for record in records if record.round == number]
                log.append(*members)
                delivery.recorded(number, members)
                if killed and number == last:
                    raise InterruptedRunError
                delivery.saved(number)
    except InterruptedRunError:
        pass
