"""The content of a page as parts with named entries; a reader takes what changed since it last looked."""

from __future__ import annotations

import threading
from typing import Any


class Board:
    """Parts of a page, each a mapping from keys to JSON values; safe to use from several threads.

    Every change raises `version`. A reader that knows an earlier version gets the entries that changed since; one that
    knows another `epoch`, before the content was cleared, gets everything.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parts: dict[str, dict[str, tuple[int, Any]]] = {}
        self.version = 0
        self.epoch = 0
        self._closed = False

    def put(self, part: str, key: str | int, value: Any) -> None:
        """Sets an entry; a value that it already has is no change."""
        with self._changed:
            entries = self._parts.setdefault(part, {})
            known = entries.get(str(key))
            if known is None or known[1] != value:
                self.version += 1
                entries[str(key)] = (self.version, value)

    def get(self, part: str, key: str | int) -> Any:
        with self._changed:
            return self._parts.get(part, {}).get(str(key), (0, None))[1]

    def keep(self, part: str, number: int) -> None:
        """Drops a part's oldest entries beyond a number. Readers drop theirs on their own."""
        with self._changed:
            entries = self._parts.get(part, {})
            for key in list(entries)[: max(0, len(entries) - number)]:
                del entries[key]

    def clear(self) -> None:
        """Drops everything, so that readers begin anew."""
        with self._changed:
            self._parts.clear()
            self.version += 1
            self.epoch += 1

    def tell(self) -> None:
        """Wakes the readers that wait for changes."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def wait(self, version: int, seconds: float) -> bool:
        """Waits for a version newer than the given one; returns whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self.version != version, seconds) and (
                self.version != version
            )

    def since(self, epoch: int = -1, version: int = 0) -> dict[str, Any]:
        """Returns the changes since a version of an epoch: `epoch`, `version`, `reset` and `parts`."""
        with self._changed:
            reset = epoch != self.epoch
            after = 0 if reset else version
            parts = {
                part: {key: value for key, (changed, value) in entries.items() if changed > after}
                for part, entries in self._parts.items()
            }
            return {
                "epoch": self.epoch,
                "version": self.version,
                "reset": reset,
                "parts": {part: entries for part, entries in parts.items() if entries},
            }
