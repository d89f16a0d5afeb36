"""Ends a process group when the process that started it is gone, even after SIGKILL, on any POSIX system.

The watchdog is a small process that holds the reading end of a pipe whose only writing end the parent holds. When the
parent dies, the system closes that end. A byte says instead that the group has ended and nothing is to be done. On
Linux the direct child also gets a signal from the kernel, in case the watchdog is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

_PROGRAM = """
import os, signal, sys
group = int(sys.argv[1])
while True:
    try:
        word = os.read(0, 1)
        break
    except InterruptedError:
        pass
if not word:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            break
        if number == signal.SIGTERM:
            import time
            time.sleep(2)
"""
_LOOK_SECONDS = 0.25
_SET_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""


class Watchdog:
    """Watches over one process group on behalf of this process."""

    def __init__(self, group: int) -> None:
        reading, self._writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, str(group)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(reading)

    def dismiss(self) -> None:
        """Ends the watch without ending the group."""
        with suppress(BrokenPipeError):
            os.write(self._writing, b".")
        os.close(self._writing)
        self._process.wait()


def dying_with_parent() -> Callable[[], None] | None:
    """Returns what a new child runs before its program, so that it ends when its parent does; None if not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def arm() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return arm


def end_with_ancestors(programs: Sequence[str], last_words: Callable[[str], None]) -> None:
    """Ends this process as soon as one of its ancestors has ended, however that happened.

    For a process that others start in a separate session, which no signal to a group reaches: Flower starts the round
    loop this way, and it would hold the run folder's lock until its next message fails.

    Args:
        programs: The ancestors to watch: those with one of these programs in their command line.
        last_words: Called with the ancestor's program before the process ends.
    """
    watched: dict[psutil.Process, str] = {}
    for ancestor in psutil.Process().parents():
        with suppress(psutil.Error):
            names = {os.path.basename(word) for word in ancestor.cmdline()}
            if found := names.intersection(programs):
                watched[ancestor] = min(found)

    def watch() -> None:
        while True:
            for ancestor, program in watched.items():
                if not _is_alive(ancestor):
                    try:
                        last_words(program)
                    finally:
                        os._exit(1)
            time.sleep(_LOOK_SECONDS)

    if watched:
        threading.Thread(target=watch, name="ancestors", daemon=True).start()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
