"""Reader of a file to which another process appends lines."""

from __future__ import annotations

import os
from pathlib import Path

CHUNK_BYTES = 1 << 22


class Tail:
    """The complete lines of a growing file, each once; a line without its newline is left for later.

    A file that was replaced, or became shorter, is read again from its beginning; a removed one is first read to its
    end.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._place = 0
        self._rest = b""

    def read(self) -> tuple[list[bytes], bool]:
        """Returns the next lines, at most `CHUNK_BYTES` of them, and whether they belong to a new file.

        If they do, everything that was read before is void.
        """
        began = False
        if self._file is not None and self._is_replaced() and not self._unread():
            self.close()
        if self._file is None:
            try:
                self._file = os.open(self.path, os.O_RDONLY)
            except OSError:
                return [], False
            began = True
        content = os.pread(self._file, CHUNK_BYTES, self._place)
        self._place += len(content)
        whole, newline, self._rest = (self._rest + content).rpartition(b"\n")
        return whole.split(b"\n") if newline else [], began

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._place, self._rest = None, 0, b""

    def _unread(self) -> int:
        assert self._file is not None
        return max(0, os.fstat(self._file).st_size - self._place)

    def _is_replaced(self) -> bool:
        """Whether the path now leads to another file, or to the same file with less content than was read."""
        assert self._file is not None
        ours = os.fstat(self._file)
        try:
            found = os.stat(self.path)
        except OSError:
            return ours.st_nlink == 0
        return (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino) or found.st_size < self._place
