"""The callback that feeds trackers, and the file in a run's folder that records how far each has got.

A round's values are sent when the round is saved, so a tracker never has a round that a resumed run repeats. Values
that a killed run had not sent are read from its log and sent when it resumes, also to trackers that were added since.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedguild.config import Config
from fedguild.core.errors import in_one_line
from fedguild.core.files import write_json
from fedguild.measuring.log.records import Record, RunLog
from fedguild.runs.callbacks import Event, Recorded, RoundStarted, Saved
from fedguild.runs.tracking import TRACKERS, TrackedRun, Tracker, check_trackers
from fedguild.runs.tracking.points import points

TRACKING = "tracking.json"
"""The file in a run's folder with every tracker's id of the run, and the last round that it got."""
LONGEST_WAIT_SECONDS = 60.0
"""How long the end of a run waits for all its trackers together to take what they were sent."""

Values = Mapping[str, float]


def without_folders(settings: Any) -> Any:
    """Returns settings in which every path of this machine is the name of its file or folder alone."""
    if isinstance(settings, Mapping):
        return {key: without_folders(value) for key, value in settings.items()}
    if isinstance(settings, Sequence) and not isinstance(settings, str):
        return [without_folders(value) for value in settings]
    if isinstance(settings, str) and (settings.startswith("~") or Path(settings).is_absolute()):
        return Path(settings).name
    return settings


class Tracking:
    """Sends a run's records to the trackers of its config; a callback, and a context manager that ends them.

    Args:
        tell: Receives one sentence if a tracker fails; the run goes on without it.
        wait_seconds: How long to wait for the trackers at the end.

    Raises:
        ConfigError: a tracker is unknown, or its package is not installed.
    """

    def __init__(
        self, config: Config, tell: Callable[[str], None], *, wait_seconds: float = LONGEST_WAIT_SECONDS
    ) -> None:
        check_trackers(config.tracking.trackers)
        self._config, self._tell, self._wait_seconds = config, tell, wait_seconds
        self._senders: list[_Sender] = []
        self._recorded: tuple[int, Sequence[Record]] = (-1, ())
        self._begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        for sender in self._senders:
            sender.end(failed=kind is not None)
        left = self._wait_seconds
        for sender in self._senders:
            left = sender.wait(left)
            if sender.is_alive():
                self._tell(
                    f"{sender.name} has not taken all rounds after {self._wait_seconds:g} s; "
                    "`fedguild resume` on the run's folder sends the rest."
                )
        self._tell_failures()

    def __call__(self, event: Event) -> None:
        """Sends a round's values once it is saved; the first call also sends those of earlier rounds."""
        if not self._config.tracking.trackers:
            return
        if isinstance(event, (RoundStarted, Saved)) and not self._begun:
            self._begin(event.folder, event.round - isinstance(event, RoundStarted))
        if isinstance(event, Recorded):
            self._recorded = event.round, event.records
        elif isinstance(event, Saved) and self._recorded[0] == event.round:
            self._send(self._recorded[1])
        self._tell_failures()

    def _begin(self, folder: Path, round: int) -> None:
        """Starts the trackers and sends them the values up to `round` that they lack."""
        self._begun = True
        settings, ledger = self._config.tracking, _Ledger(folder / TRACKING)
        described = without_folders(self._config.model_dump(mode="json", exclude={"output", "tracking"}))
        run = TrackedRun(
            folder=folder,
            project=settings.project,
            name=settings.name or f"{self._config.name}-seed-{self._config.seed}",
            group=settings.group or "",
            tags=settings.tags,
            settings=described,
        )
        self._senders = [_Sender(name, TRACKERS.load(name), run, round, ledger) for name in settings.trackers]
        self._send([record for record in RunLog(folder).read() if record.round <= round])

    def _send(self, records: Sequence[Record]) -> None:
        by_round: dict[int, dict[str, float]] = {}
        for name, value, number in points(records, clients=self._config.tracking.clients):
            by_round.setdefault(number, {})[name] = value
        for number, values in by_round.items():
            for sender in self._senders:
                sender.send(number, values)

    def _tell_failures(self) -> None:
        """Reports trackers that failed since the last call; in the main thread, which shows progress."""
        for sender in self._senders:
            if sender.failure:
                self._tell(f"The tracker {sender.name} failed, and the run goes on without it: {sender.failure}")
                sender.failure = ""


class _Ledger:
    """Each tracker's id of the run and the last round that it received, in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            found = json.loads(path.read_text("utf-8"))
            self._entries = {name: (str(entry["id"]), int(entry["round"])) for name, entry in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._entries = {}

    def __getitem__(self, name: str) -> tuple[str, int]:
        return self._entries.get(name, ("", -1))

    def __setitem__(self, name: str, entry: tuple[str, int]) -> None:
        with self._lock:
            self._entries[name] = entry
            write_json(self._path, {each: {"id": id, "round": at} for each, (id, at) in sorted(self._entries.items())})


class _Sender(threading.Thread):
    """A tracker, and the thread that feeds it.

    Args:
        round: The last round that the run has; later rounds that the tracker has are obsolete.
    """

    def __init__(self, name: str, kind: type[Tracker], run: TrackedRun, round: int, ledger: _Ledger) -> None:
        super().__init__(name=name, daemon=True)
        self._ledger, self._tracker = ledger, kind()
        identity, last = ledger[name]
        if last > round:
            identity, last = (identity, round) if kind.TAKES_BACK else ("", -1)
        self._run_description = replace(run, id=identity, round=last)
        self._queue: queue.Queue[tuple[int, Values] | bool] = queue.Queue()
        self.failure = ""
        self._is_started = False

    def send(self, round: int, values: Values) -> None:
        """Queues the values of a round; ignores a round that the tracker already has."""
        if round <= self._run_description.round or not values:
            return
        if not self._is_started:
            self._is_started = True
            self.start()
        if self.is_alive():
            self._queue.put((round, values))

    def end(self, *, failed: bool) -> None:
        self._queue.put(failed)

    def wait(self, seconds: float) -> float:
        """Waits for the tracker to finish, and returns what is left of `seconds`."""
        started = time.monotonic()
        if self._is_started:
            self.join(seconds)
        return max(0.0, seconds - (time.monotonic() - started))

    def run(self) -> None:
        try:
            self._feed()
        except BaseException as error:  # also a SystemExit of a library, which would end the thread in silence
            self.failure = in_one_line(error)

    def _feed(self) -> None:
        begun = self._tracker.begin(self._run_description)
        had = self._run_description.round if begun.round is None else begun.round
        self._ledger[self.name] = begun.id, had
        while not isinstance(given := self._queue.get(), bool):
            number, values = given
            if number > had:  # the last round of a run that ends early comes twice, the second time with its scores
                self._tracker.add(number, values)
                self._ledger[self.name] = begun.id, number
        self._tracker.finish(failed=given)


def for_comparison(config: Config, group: str) -> Config:
    """Returns the config of one run of a comparison, with a group and a run name for the trackers."""
    tracking = config.tracking
    if not tracking.trackers:
        return config
    name = f"{tracking.name}-{config.name}-seed-{config.seed}" if tracking.name else None
    return config.model_copy(
        update={"tracking": tracking.model_copy(update={"group": tracking.group or group, "name": name})}
    )
