"""Journals: files of lines that are only ever added to, each on disk before anything is done that it records."""

from __future__ import annotations

import os
from pathlib import Path

from fedguild.core.errors import FedGuildError
from fedguild.core.files import PRIVATE_FILE, make_folder


class Journal:
    """A journal on disk.

    Args:
        path: The file; created by the first line.

    Attributes:
        lines: The complete lines found at the start, without their ends; one that was being written at a kill is not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        *self.lines, torn = path.read_bytes().split(b"\n") if path.exists() else [b""]
        self._torn = bool(torn)

    def append(self, line: bytes) -> None:
        """Adds a line and waits until it is on disk.

        Raises:
            FedGuildError: it cannot be written.
        """
        try:
            make_folder(self.path.parent)
            with open(self.path, "ab", opener=lambda path, flags: os.open(path, flags, PRIVATE_FILE)) as file:
                if self._torn:
                    file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
                self._torn = True  # until the whole line is there: a full disk may take a part of it
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._torn = False
        except OSError as error:
            raise FedGuildError(
                f"Cannot write {self.path}: {error.strerror or error}.",
                "Nothing is released that it does not hold; free some space or check the permissions.",
            ) from error
