"""Ledgers of the releases about each client's data: JSON lines, written before the release, never removed.

An entry has a key. The same client and key again is the same release, which costs nothing a second time: a round that a
simulation repeats with the same bits, or a request that a site answers as before.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.files import PRIVATE_FILE, make_folder
from fedguild.privacy.dp.accounting import Release

FILE = "privacy.jsonl"


class Ledger:
    """A ledger on disk.

    Args:
        path: The file; created by the first entry.

    Raises:
        CheckpointError: a complete line is not an entry.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Release]] = defaultdict(dict)
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        self._torn = bool(lines[-1])
        for number, line in enumerate(lines[:-1], start=1):  # the last one is empty, or was being written at a kill
            try:
                entry = json.loads(line)
                self._entries[entry["client"]][entry["key"]] = Release(**entry["release"])
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(
                    f"{path}, line {number} is not an entry of a privacy ledger.",
                    "Without it nobody knows what was released; restore the file.",
                ) from error

    def releases(self, client: str) -> dict[str, Release]:
        """Returns key -> release, for all releases about a client."""
        return dict(self._entries[client])

    def add(self, client: str, key: str, release: Release) -> None:
        """Writes a release and waits until it is on disk; does nothing if the ledger has it.

        Raises:
            CheckpointError: the ledger has another release under this key.
            FedGuildError: it cannot be written.
        """
        if (entered := self._entries[client].get(key)) is not None:
            if entered != release:
                raise CheckpointError(
                    f"{self.path} holds another release of {client} under '{key}' than the one that would follow.",
                    "The run's data or settings changed since: start a new run.",
                )
            return
        line = json.dumps({"client": client, "key": key, "release": asdict(release)}) + "\n"
        try:
            make_folder(self.path.parent)
            with open(self.path, "ab", opener=lambda path, flags: os.open(path, flags, PRIVATE_FILE)) as file:
                if self._torn:
                    file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
                    self._torn = False
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FedGuildError(
                f"Cannot write {self.path}: {error.strerror or error}.",
                "Nothing is released that the ledger does not hold; free some space or check the permissions.",
            ) from error
        self._entries[client][key] = release
