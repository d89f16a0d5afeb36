"""Storage of uploads on disk until they are aggregated, so that the server holds one in memory at a time."""

from __future__ import annotations

from pathlib import Path

from fedguild.files import make_folder, write_bytes


class UploadStore:
    """A folder of uploads waiting to be aggregated; emptied when it is opened.

    Args:
        folder: The folder; created if absent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_folder(folder)
        for leftover in folder.iterdir():
            leftover.unlink()

    def put(self, round: int, client: int, content: bytes) -> Path:
        """Writes an upload and returns its path; one of the same round and client is replaced."""
        path = self._folder / f"round-{round:05d}-client-{client:05d}.upload"
        write_bytes(path, content)
        return path

    def take(self, path: Path) -> bytes:
        """Reads an upload and deletes its file."""
        content = path.read_bytes()
        path.unlink()
        return content
