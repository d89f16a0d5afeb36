"""The audit log of a federation: who joined, and what was asked, accepted, rejected, revoked and delivered.

Append-only JSON lines, hash-chained (`fedguild.core.chained`): `fedguild federation audit` finds a line that was
changed, removed or moved. The chain shows that the log was edited, not by whom. Anyone who can write the file can also
rewrite all of it, so an operator who is accountable for it should copy the last seal elsewhere from time to time:
`fedguild federation audit --seal` holds the log against it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedguild.core import chained
from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.files import PRIVATE_FILE, make_folder
from fedguild.core.layout import AUDIT


class AuditLog:
    """The audit log in a server's state folder; several processes may append to it.

    Args:
        state: The folder; created by the first entry.
    """

    def __init__(self, state: Path) -> None:
        self.path = state / AUDIT

    def append(self, event: str, **values: Any) -> None:
        """Writes an entry with the time, and waits until it is on disk.

        Args:
            event: `started`, `joined`, `refused`, `accepted` (after a refusal), `size`, `weight`, `round`, `session`
                (of a secure aggregation), `scored`, `stopped`, `delivered`, `ended`, `registered`, `revoked`, or
                `foreign`, a run of another app.
            values: Details of the event, as JSON values.
        """
        self.extend(event, [values])

    def extend(self, event: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """Writes entries of one event with the same time, and waits once until all are on disk.

        Args:
            event: As for `append`.
            entries: The details of each.

        Raises:
            FedGuildError: they cannot be written; the log is as before.
        """
        if not entries:
            return
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        details = ({"time": time, "event": event, **values} for values in entries)
        try:
            make_folder(self.path.parent)
            with (
                FileLock(self.path.with_name(f".{AUDIT}.lock"), mode=PRIVATE_FILE),
                open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE_FILE), "r+b", buffering=0) as log,
            ):
                chained.append(log, (json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in details))
        except OSError as error:
            raise FedGuildError(
                f"Cannot write {self.path}: {error.strerror or error}.",
                "The entries before are untouched; free some space or check the permissions.",
            ) from error

    @property
    def seal(self) -> str:
        """The seal of the last entry, which stands for the whole log."""
        return chained.seal_of(self.path)

    def read(self) -> list[dict[str, Any]]:
        """Returns all entries, each with its `seal`; none if there is no log.

        Raises:
            CheckpointError: the chain is broken; the message names the first line that does not fit.
        """
        entries, before = [], chained.START
        content = self.path.read_bytes() if self.path.is_file() else b""
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
            try:
                _, before = chained.unsealed(line, before)
                entries.append(json.loads(line))
            except ValueError as error:
                raise CheckpointError(
                    f"{self.path}, line {number} is not what was written: {error}.",
                    "The lines before it are as they were; those after it prove nothing.",
                ) from error
        return entries
