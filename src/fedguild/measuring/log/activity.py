"""Log of a run's activity: events with their times in `activity.jsonl`, for live views of the run.

The file is not part of the run's state. Nothing reads it to resume, results do not depend on it, and a run whose events
cannot be written goes on without them. What differential privacy withholds from the terminal is also withheld here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from fedguild.core.errors import FedGuildError, StoppedError
from fedguild.core.files import PRIVATE_FILE, write_bytes
from fedguild.core.progress import Note, Progress, Silent

STEP_SECONDS = 0.25
"""Training steps are written no more often than this."""
NOT_CONNECTED = "it is not connected"
"""Why a client was not asked, as the Flower engine says it and the watch page shows it."""
ENDINGS = ("ended", "stopped", "interrupted", "failed")
_LAST_BYTES = 1 << 16


class ActivityLog:
    """The events of a run's folder; the process that holds the run's lock writes them.

    `begun`, `stage`, `round`, `asked`, `training`, `step`, `delivered`, `withdrawn`, `phase`, `scores`,
    `checkpoint`, `message`, and one of `ended`, `stopped`, `interrupted` and `failed`; of real clients also `online`,
    `sent` and `answered`. A site's work folder has such a log of the requests that it was sent: `request`.

    Args:
        folder: The run's folder, which exists.
        most_bytes: A file that has grown beyond it loses its older half; None for a file that grows with the run.
    """

    FILE: ClassVar[str] = "activity.jsonl"

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        self.path, self.most_bytes = folder / self.FILE, most_bytes

    def append(self, event: str, **values: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), "event": event, **values}, ensure_ascii=False)
        with contextlib.suppress(OSError, FedGuildError):
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
            try:
                os.write(file, line.encode() + b"\n")
                size_bytes = os.fstat(file).st_size
            finally:
                os.close(file)
            if self.most_bytes is not None and size_bytes > self.most_bytes:
                write_bytes(self.path, self.path.read_bytes()[-self.most_bytes // 2 :].partition(b"\n")[2])

    def last_ending(self) -> tuple[str, str] | None:
        """Returns how the run last ended, with the reason; None if it has not ended, or the log does not say."""
        try:
            with open(self.path, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
                event = json.loads(file.read().rstrip(b"\n").rpartition(b"\n")[2])
            return (event["event"], str(event.get("reason", ""))) if event["event"] in ENDINGS else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def end_line(self) -> None:
        """Ends a line that a killed process left incomplete, so that the next event does not become part of it."""
        with contextlib.suppress(OSError), open(self.path, "r+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")


class NotedProgress:
    """A `Progress` that writes its calls as events, and passes them on."""

    def __init__(self, progress: Progress, note: Note) -> None:
        self._progress, self._note = progress, note
        self._next_step = 0.0

    def stage(self, text: str) -> None:
        self._note("stage", text=text)
        self._progress.stage(text)

    def round_started(self, number: int, total: int) -> None:
        self._note("round", round=number, rounds=total)
        self._progress.round_started(number, total)

    def step(self, done: int, total: int, loss: float) -> None:
        """Writes the step, unless the previous one was a moment ago."""
        now = time.monotonic()
        if now >= self._next_step or done == total:
            self._next_step = now + STEP_SECONDS
            self._note("step", done=done, total=total, loss=loss if math.isfinite(loss) else None)
        self._progress.step(done, total, loss)

    def evaluated(self, scores: Mapping[str, float], metric: str) -> None:
        finite = {name: score for name, score in scores.items() if math.isfinite(score)}
        self._note("scores", scores=finite, metric=metric)
        self._progress.evaluated(scores, metric)

    def message(self, text: str) -> None:
        self._note("message", text=text)
        self._progress.message(text)


@contextlib.contextmanager
def noted(folder: Path, progress: Progress | None, marker: str) -> Iterator[NotedProgress]:
    """Yields a run's progress that also writes its events; at the end writes how the run ended.

    Args:
        folder: The run's folder; its lock is held.
        progress: Receives all calls as well.
        marker: The file that marks the folder as a run's. If it is missing at the end, the events are removed.
    """
    log = ActivityLog(folder)
    log.end_line()
    log.append("begun", pid=os.getpid())
    try:
        yield NotedProgress(progress or Silent(), log.append)
        log.append("ended")
    except BaseException as error:
        log.append(_ending(error), reason=error.message if isinstance(error, FedGuildError) else _in_words(error))
        raise
    finally:
        if not (folder / marker).exists():
            log.path.unlink(missing_ok=True)


def _ending(error: BaseException) -> str:
    if isinstance(error, StoppedError):
        return "stopped"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _in_words(error: BaseException) -> str:
    return "" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
