"""Atomic file writes: a reader sees the old content or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedguild.core.errors import FedGuildError

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Permissions of what FedGuild writes: a run holds what clients uploaded and what was learned from their data."""


def make_folder(folder: Path) -> None:
    """Creates a folder and its missing parents, accessible to the user only.

    Raises:
        FedGuildError: one of them cannot be created (a file is in its place, no permission).
    """
    missing = [folder, *folder.parents]
    try:
        for each in reversed([each for each in missing if not each.exists()]):
            each.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise FedGuildError(
            f"Cannot create the folder {folder}: {error.strerror or error}.",
            "Name a folder that you can write to; no file may stand where it or a folder above it would be.",
        ) from error


def require_own(folder: Path) -> None:
    """Checks that no link in a folder leads out of it, for a folder in which files are appended to and removed.

    Raises:
        FedGuildError: one does.
    """
    own = folder.resolve()
    for at, folders, files in os.walk(folder):
        for path in (Path(at, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(own):
                raise FedGuildError(
                    f"{path} is a link to {os.readlink(path)}, outside of {folder}, where FedGuild writes and deletes.",
                    f"Put the files themselves in its place; to keep all of them elsewhere, make {folder} the link.",
                )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder as `path`; on success it is synced and renamed onto `path`.

    On any error the temporary file is removed and `path` keeps its content. The file, and folders created for it, are
    accessible to the user only.

    Raises:
        FedGuildError: the file cannot be written (disk full, no permission).
    """
    temporary: Path | None = None
    try:
        make_folder(path.parent)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, PRIVATE_FILE)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise FedGuildError(
            f"Cannot write {path}: {error.strerror or error}.",
            "The previous content is untouched; free some space or check the permissions, then resume.",
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
