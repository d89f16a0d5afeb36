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
        content = path.read_bytes() if path.exists() else b""
        *self.lines, torn = content.split(b"\n")
        self._torn = len(content) - len(torn) if torn else None

    def append(self, *lines: bytes) -> None:
        """Adds lines and waits until they are on disk.

        Raises:
            FedGuildError: they cannot be written; the next call removes what there is of them.
        """
        try:
            make_folder(self.path.parent)
            with open(self.path, "ab", opener=lambda path, flags: os.open(path, flags, PRIVATE_FILE)) as file:
                if self._torn is not None:
                    file.truncate(self._torn)
                self._torn = file.seek(0, os.SEEK_END)  # until all is there: a full disk may take a part of it
                file.writelines(line + b"\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
                self._torn = None
        except OSError as error:
            raise FedGuildError(
                f"Cannot write {self.path}: {error.strerror or error}.",
                "Nothing is released that it does not hold; free some space or check the permissions.",
            ) from error
