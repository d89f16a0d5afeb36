"""Exclusive use of a run's folder: one process at a time works on it, and others are told which.

The lock is the operating system's (`filelock`), so it is released when its process is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.files import PRIVATE_FILE, make_folder, require_own, write_json
from fedguild.core.sealed import remove_leftovers

LOCK, HOLDER = ".lock", ".lock.json"
ASKED_SECONDS = 0.5
"""Whoever asks who holds the lock has it for a moment (`holder`); whoever wants it waits that long."""


@dataclass(frozen=True)
class Holder:
    """The process that works on a run's folder.

    Attributes:
        host: The name of its machine.
        since: When it began, ISO 8601 with the time zone.
        command: Its program and arguments.
    """

    pid: int
    host: str
    since: str
    command: str

    @classmethod
    def this_process(cls) -> Holder:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(os.getpid(), socket.gethostname(), now, " ".join(_without_secrets(sys.argv))[:300])

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since} ({self.command})"


def _lock(folder: Path, timeout_seconds: float) -> FileLock:
    """Returns the folder's lock; where the system has none, it fails rather than to leave a file that stays locked."""
    return FileLock(folder / LOCK, timeout=timeout_seconds, mode=PRIVATE_FILE, fallback_to_soft=False)


def _without_secrets(words: list[str]) -> list[str]:
    """Masks the token that Flower gives a process in a command line."""
    return [words[0], *("***" if before == "--token" else word for before, word in itertools.pairwise(words))]


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Holds the exclusive lock of a run's folder, which is created if absent and removed again if it stays empty.

    Raises:
        CheckpointError: another process holds it; the message names it and says since when.
        FedGuildError: the lock cannot be had (a read-only folder, a file system without locks), or a link in the folder
            leads out of it.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    make_folder(folder)
    lock = _lock(folder, ASKED_SECONDS)
    try:
        lock.acquire(poll_interval=0.01)
    except Timeout as error:
        raise CheckpointError(
            f"{folder} is in use by {holder(folder) or 'another process'}.",
            "Wait until it has ended, or end it; two processes on one run would damage it.",
        ) from error
    except (OSError, RuntimeError) as error:  # filelock may not know a file system's answer
        raise FedGuildError(
            f"{folder} cannot be locked for this process: {folder / LOCK}: {getattr(error, 'strerror', '') or error}.",
            "The lock keeps two processes from one run. Choose a folder that you can write to, on a file system with "
            f"locks (a local disk), in which {LOCK} is a plain file or absent.",
        ) from error
    try:
        require_own(folder)
        remove_leftovers(folder)
        write_json(folder / HOLDER, asdict(Holder.this_process()))
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        if made and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            with contextlib.suppress(OSError):  # another process may have put something beside it
                for each in made:
                    each.rmdir()
        lock.release()


def holder(folder: Path) -> Holder | None:
    """Returns the process that works on a run's folder; None if there is none, or it left no description.

    Where the lock cannot be asked for, it is the one that the folder names.
    """
    if not (folder / LOCK).exists():
        return None
    lock = _lock(folder, 0)
    try:
        lock.acquire()
    except (OSError, RuntimeError) as error:
        if not isinstance(error, Timeout) and not (folder / HOLDER).is_file():
            return None
        try:
            return Holder(**json.loads((folder / HOLDER).read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return Holder(0, "unknown", "unknown", "unknown")
    lock.release()
    return None
