"""Processes that are started together, watched, and ended together; each writes a log of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedguild.errors import FedGuildError

END_SECONDS = 8.0
WATCH_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 10.0
GOOD_RUN_SECONDS = 60.0
"""After a life this long, a process that ends is started again without a longer pause."""
USER_ERROR = 2
"""The exit status of our own commands for a fault that only the user can mend."""


class Child:
    """A process of ours, in a group of its own, so that it ends with all that it started.

    Args:
        name: What it is, for messages.
        command: Its program and arguments.
        environment: Its environment.
        log: The file that its output is appended to.
        folder: Where it runs.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path
    ) -> None:
        self.name, self.log = name, log
        self._command, self._environment, self._folder = list(command), dict(environment), folder
        self._started = 0.0
        self._pause = 0.5
        self._due: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Starts it."""
        self._started, self._due = time.monotonic(), None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ended(self) -> int | None:
        """Returns its exit status; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start_again(self) -> float | None:
        """Starts it again after a pause that doubles each time; returns the pause when it begins, else None."""
        now = time.monotonic()
        if self._due is None:
            self.end()
            self._pause = 1.0 if now - self._started > GOOD_RUN_SECONDS else min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._due = now + self._pause
            return self._pause
        if now >= self._due:
            self.start()
        return None

    def end(self) -> None:
        """Ends it and all that it started: politely, then not."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def last_words(self, lines: int = 5) -> str:
        """Returns the last lines of its log, each on a line of its own."""
        if not self.log.is_file():
            return ""
        said = self.log.read_text("utf-8", errors="replace").splitlines()
        return "".join(f"\n  {line}" for line in said[-lines:])

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def watch(
    children: Sequence[Child],
    tell: Callable[[str], None],
    *,
    restart: bool,
    explain: Callable[[Child], str] = lambda child: child.last_words(1),
) -> None:
    """Waits until Ctrl-C or the signal to end; then ends all.

    Args:
        children: Processes, started.
        tell: Prints a line.
        restart: Whether a child that ends is started again; otherwise that is an error.
        explain: Returns why a child may have ended, on lines of its own.

    Raises:
        FedGuildError: a child ended, and is not started again, or says that only its user can help.
    """
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not stopped:
            time.sleep(WATCH_SECONDS)
            for child in children:
                status = child.ended()
                if status is None or stopped:
                    continue
                if not restart or status == USER_ERROR:
                    raise FedGuildError(
                        f"The {child.name} ended with status {status}.{child.last_words()}", f"Its log is {child.log}."
                    )
                pause = child.start_again()
                if pause is not None:
                    why = explain(child)
                    tell(f"The {child.name} ended with status {status}; it is started again in {pause:g} s.{why}")
    finally:
        for child in reversed(children):
            child.end()
        for number, handler in before.items():
            signal.signal(number, handler)
