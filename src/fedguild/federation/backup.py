"""A copy of a server's folder while the server is up and its run goes on, for the copy to take its place later.

Files that are not logs are replaced whole, so each is copied whole. The order does the rest: the run's checkpoints and
memory, copied again until no round has ended meanwhile; then its log, which a run that resumes cuts back to its
checkpoint; then the keys that are registered; last Flower's database, which may know more keys than that, as after a
kill.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from fedguild.core.errors import FedGuildError
from fedguild.core.files import PRIVATE_FILE
from fedguild.core.layout import RUN, SPOOL, UPLOADS
from fedguild.federation.commands import DATABASE
from fedguild.federation.site import load_server

ATTEMPTS = 20
_PASSING = (".*.part", "*.lock", ".lock.json", UPLOADS, SPOOL)
_ignore_passing = shutil.ignore_patterns(*_PASSING)
_ignore_logs_too = shutil.ignore_patterns(*_PASSING, "*.jsonl")


def back_up(folder: Path, copy: Path) -> None:
    """Copies a server's folder.

    Args:
        copy: The copy's folder, which does not exist yet and is not in `folder`.

    Raises:
        ConfigError: it is not a server's folder.
        FedGuildError: `copy` exists or is in `folder`, a file cannot be read or written, or rounds end faster than
            they can be copied.
    """
    folder, copy, state = folder.resolve(), copy.resolve(), load_server(folder).state
    if copy.exists() or copy.is_relative_to(folder):
        raise FedGuildError(f"{copy} exists, or is in {folder}.", "Name a new folder elsewhere.")
    part = copy.with_name(f".{copy.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(folder, part, symlinks=True, ignore=lambda at, names: {state} if at == str(folder) else set())
        if (folder / state).is_dir():
            _copy_state(folder / state, part / state)
        os.replace(part, copy)
    except (OSError, sqlite3.Error) as error:  # shutil.Error too
        raise FedGuildError(f"Cannot copy {folder} to {copy}: {error}", "The folder itself is unchanged.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _copy_state(state: Path, copy: Path) -> None:
    run = state / RUN
    if run.is_dir():
        _copy_unchanging(run, copy / RUN)
        for log in run.rglob("*.jsonl"):
            shutil.copy2(log, copy / log.relative_to(state))

    def left_out(at: str, names: list[str]) -> set[str]:
        here = [name for name in names if name == RUN or name.startswith(DATABASE)] if at == str(state) else []
        return {*here, *_ignore_passing(at, names)}

    shutil.copytree(state, copy, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    if (state / DATABASE).is_file():
        with closing(sqlite3.connect(state / DATABASE)) as source, closing(sqlite3.connect(copy / DATABASE)) as target:
            source.backup(target)
        os.chmod(copy / DATABASE, PRIVATE_FILE)


def _copy_unchanging(run: Path, copy: Path) -> None:
    """Copies all of a run's folder but its logs, at a moment between the ends of two rounds."""
    for _ in range(ATTEMPTS):
        before = _files(run)
        try:
            shutil.copytree(run, copy, symlinks=True, ignore=_ignore_logs_too)
        except shutil.Error:
            if _files(run) == before:
                raise
        if _files(run) == before:
            return
        shutil.rmtree(copy)
    raise FedGuildError(
        f"The rounds of {run} end faster than they can be copied.", "Stop the run, copy the folder, and resume it."
    )


def _files(run: Path) -> set[tuple[str, ...]]:
    """Returns the names of what `_copy_unchanging` copies."""
    found = set[tuple[str, ...]]()
    for at, folders, files in os.walk(run):
        skipped = _ignore_logs_too(at, [*folders, *files])
        folders[:] = [name for name in folders if name not in skipped]
        found |= {(at, name) for name in files if name not in skipped}
    return found
