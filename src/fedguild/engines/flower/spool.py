"""Uploads that arrived before their turn, on disk, so that the server holds one at a time."""

from __future__ import annotations

from pathlib import Path

from fedguild.files import write_bytes


class Spool:
    """A folder of uploads on their way into the aggregation; emptied when it is opened.

    Args:
        folder: Where; made if absent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():
            leftover.unlink()

    def put(self, round: int, client: int, content: bytes) -> Path:
        """Keeps an upload; one of the same round and client is replaced."""
        path = self._folder / f"round-{round:05d}-client-{client:05d}.upload"
        write_bytes(path, content)
        return path

    def take(self, path: Path) -> bytes:
        """Returns an upload and forgets it."""
        content = path.read_bytes()
        path.unlink()
        return content
