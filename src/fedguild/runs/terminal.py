"""A run's progress on stderr: a bar on a terminal, and one line per evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from rich import progress as bars
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn

from fedguild.core.progress import Progress

_STDERR = Console(stderr=True)


class TerminalProgress:
    """A `fedguild.core.progress.Progress` that writes to a console; use it in a `with` block."""

    def __init__(self, console: Console = _STDERR, title: str = "") -> None:
        self._console = console
        self._title = f"{title}: " if title else ""
        self._bar = bars.Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task(f"{self._title}starting", total=None, loss="")
        self._round = "round 0"
        self._started_seconds = time.perf_counter()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._title}{text}")
        if not self._console.is_terminal:
            self.message(text)

    def round_started(self, number: int, total: int) -> None:
        self._round = f"round {number}/{total}"
        self._bar.reset(self._task, description=f"{self._title}{self._round}", total=None, loss="")

    def step(self, done: int, total: int, loss: float) -> None:
        shown = "" if math.isnan(loss) else f"loss {loss:.3f}"
        self._bar.update(self._task, completed=done, total=total, loss=shown)

    def evaluated(self, scores: Mapping[str, float], metric: str) -> None:
        cells = "  ".join(f"{name} {score:.3f}" for name, score in scores.items())
        self.message(f"{self._round:<12} {metric}: {cells}  ({time.perf_counter() - self._started_seconds:.0f} s)")

    def message(self, text: str) -> None:
        self._console.print(f"{self._title}{text}", markup=False, highlight=False, soft_wrap=True)


def shown(progress: Progress | bool | None) -> AbstractContextManager[Progress | None]:
    """Returns the receiver of a run's progress that is meant: a `TerminalProgress` for True, none for False."""
    return TerminalProgress() if progress is True else nullcontext(progress or None)
