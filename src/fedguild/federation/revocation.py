"""The clients whose keys were revoked, on disk, where a run in progress looks for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from fedguild.core.files import PRIVATE_FILE, make_folder, write_json

REVOKED = "revoked.json"
UNKNOWN = "no key is registered under this name"
"""What `fedguild.federation.flower.enrolment` says of a client whose key Flower does not know."""
SPENT = "Flower takes a public key once, so make a new one with `fedguild federation key`"
"""What it says of one that Flower has had and lets in no more, or knows as another client's."""


class Revocations:
    """The names of the clients whose keys were revoked."""

    def __init__(self, state: Path) -> None:
        self.path = state / REVOKED
        self._read: tuple[tuple[int, int], frozenset[str]] | None = None

    def names(self) -> frozenset[str]:
        """Returns the names; cheap enough to call at every poll."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return frozenset()
        stamp = (status.st_mtime_ns, status.st_ino)
        if self._read is None or self._read[0] != stamp:
            self._read = (stamp, frozenset(json.loads(self.path.read_text("utf-8"))))
        return self._read[1]

    def add(self, name: str) -> None:
        self._change(lambda names: names | {name})

    def remove(self, name: str) -> None:
        """Removes the name of a client whose new key was registered."""
        if name in self.names():
            self._change(lambda names: names - {name})

    def _change(self, changed: Callable[[frozenset[str]], frozenset[str]]) -> None:
        make_folder(self.path.parent)
        with FileLock(self.path.with_name(f".{REVOKED}.lock"), mode=PRIVATE_FILE):
            write_json(self.path, sorted(changed(self.names())))
