"""Child processes that are started, watched and terminated together; each writes its own log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedguild.core.errors import USER_ERROR, FedGuildError
from fedguild.core.files import PRIVATE_FILE, make_folder
from fedguild.core.text import without_colour, without_control
from fedguild.federation.watchdog import Watchdog, dying_with_parent

TERMINATE_SECONDS = 8.0
WATCH_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 10.0
GOOD_RUN_SECONDS = 60.0
"""A process that ran this long is restarted after the shortest pause."""
PRIVATE_UMASK = 0o077


class Child:
    """A child process in its own process group, so that it is terminated with everything it started.

    It also ends when this process does, however that happens (`fedguild.federation.watchdog`). Only the user can read
    its output.

    Args:
        log: The file that its output is appended to.

    Attributes:
        starts: How often it was started.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path
    ) -> None:
        self.name, self.log = name, log
        self._command, self._environment, self._folder = list(command), dict(environment), folder
        self._started = 0.0
        self.starts = 0
        self._pause = 0.5
        self._restart_at: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        self._started, self._restart_at = time.monotonic(), None
        self.starts += 1
        self._dismiss_watchdog()
        make_folder(self.log.parent)
        with open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE), "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=PRIVATE_UMASK,
                preexec_fn=dying_with_parent(),
            )
        self._watchdog = Watchdog(self.pid)

    def exit_status(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def restart(self) -> float | None:
        """Restarts it after a pause that doubles each time; returns the pause when it begins, else None."""
        now = time.monotonic()
        if self._restart_at is None:
            self.terminate()
            self._pause = 1.0 if now - self._started > GOOD_RUN_SECONDS else min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._restart_at = now + self._pause
            return self._pause
        if now >= self._restart_at:
            self.start()
        return None

    def terminate(self) -> None:
        """Terminates it and everything it started; kills what does not stop in time."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TERMINATE_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._dismiss_watchdog()

    def _dismiss_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.dismiss()
            self._watchdog = None

    def log_tail(self, lines: int = 5) -> str:
        """Returns the last lines of its log, each on a line of its own."""
        if not self.log.is_file():
            return ""
        output = without_control(without_colour(self.log.read_text("utf-8", errors="replace"))).splitlines()
        return "".join(f"\n  {line}" for line in output[-lines:])

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def watch(
    children: Sequence[Child],
    echo: Callable[[str], None],
    *,
    restart: bool,
    explain: Callable[[Child], str] = lambda child: child.log_tail(1),
) -> None:
    """Waits until Ctrl-C or SIGTERM; then terminates all.

    Args:
        children: Processes that have been started.
        echo: Prints a line for the user.
        restart: Whether a child that ends is restarted; otherwise that is an error.
        explain: Returns why a child may have ended, as one or more lines.

    Raises:
        FedGuildError: a child ended and is not restarted, or its status says that only the user can fix the fault.
    """
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not stopped:
            time.sleep(WATCH_SECONDS)
            for child in children:
                status = child.exit_status()
                if status is None or stopped:
                    continue
                if not restart or status == USER_ERROR:
                    raise FedGuildError(
                        f"The {child.name} ended with status {status}.{child.log_tail()}", f"Its log is {child.log}."
                    )
                pause = child.restart()
                if pause is not None:
                    reason = explain(child)
                    echo(f"The {child.name} ended with status {status}; it will be restarted in {pause:g} s.{reason}")
    finally:
        for child in reversed(children):
            child.terminate()
        for number, handler in previous.items():
            signal.signal(number, handler)
