"""Ends a process group when the process that started it is gone, however it went: also by SIGKILL, on any POSIX system.

The watchdog is a small process that holds the reading end of a pipe, of which the parent holds the only writing end.
When the parent dies, the system closes that end. A byte says instead that the group has ended and nothing is to be
done. On Linux the direct child also gets a signal from the kernel, in case somebody kills the watchdog.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

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
_SET_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""


class Watchdog:
    """Watches over one process group on behalf of this process.

    Args:
        group: The process group's id.
    """

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
        """Ends the watch; the group is left as it is."""
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
