"""Ledgers of the releases about each client's data: JSON lines, written before the release, never removed.

An entry has a key. The same client and key again is the same release, which costs nothing a second time: a round that a
simulation repeats with the same bits, or a request that a site answers as before.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from fedguild.core.errors import CheckpointError
from fedguild.core.journal import Journal
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
        self._journal, self.path = Journal(path), path
        self._entries: dict[str, dict[str, Release]] = defaultdict(dict)
        for number, line in enumerate(self._journal.lines, start=1):
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
        self._journal.append(json.dumps({"client": client, "key": key, "release": asdict(release)}).encode())
        self._entries[client][key] = release
