"""Folders that appear complete or not at all."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from safetensors import SafetensorError

from fedguild.core.errors import FedGuildError


def require_new(path: Path) -> None:
    """Raises FedGuildError if `path` is a file or a folder that is not empty."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise FedGuildError(f"{path} already exists.", "Choose a folder that is new or empty.")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder in the same place as `path`; on success it is renamed to `path`, else removed.

    Its files have the permissions that this process gives new files.

    Raises:
        FedGuildError: `path` exists and is not empty, or cannot be written (disk full, no permission).
    """
    require_new(path)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        prefix = f".{path.name}.{socket.gethostname()}.{os.getpid()}."
        temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=".part", dir=path.parent))
        mode = _mode_of_new_folders(temporary)
        yield temporary
        _give_modes(temporary, mode)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise FedGuildError(
            f"Cannot write {path}: {getattr(error, 'strerror', None) or error}.",
            "Nothing was left behind; free some space or check the permissions, then export again.",
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Removes what processes of this machine that were killed had begun to write."""
    mine = re.compile(rf"\..+\.{re.escape(socket.gethostname())}\.(\d+)\.[^.]+\.part")
    for path in folder.glob(".*.part"):
        found = mine.fullmatch(path.name)
        if found and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)


def _give_modes(folder: Path, mode: int) -> None:
    """Gives a folder and all in it the permissions of new ones, whatever wrote them; links are left as they are."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(mode if path.is_dir() else mode & 0o666)


def _mode_of_new_folders(folder: Path) -> int:
    """Returns the permissions that this process gives new folders; temporary folders always have 0700."""
    probe = folder / ".mode"
    probe.mkdir()
    mode = probe.stat().st_mode & 0o777
    probe.rmdir()
    return mode
