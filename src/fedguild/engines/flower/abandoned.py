"""Requests whose answers nobody waits for any more: what comes of them is deleted, and not left in Flower's database.

Flower's server keeps an answer until somebody takes it. A client that answers what the server has given up would fill
its disk.
"""

from __future__ import annotations

import math
from collections import deque

from fedguild.engines.flower.transport import Transport

SWEEP_SECONDS = 30.0
"""Time between two looks at the requests that were given up."""
MOST, AT_ONCE = 8192, 64
"""Requests that are remembered, and those of them that one look asks for."""


class Abandoned:
    """The requests that were given up."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._ids: deque[str] = deque(maxlen=MOST)
        self._next = -math.inf

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, message_id: str) -> None:
        """Gives a request up; beyond `MOST`, the oldest is forgotten."""
        self._ids.append(message_id)

    def sweep(self, now: float) -> None:
        """Has the answers deleted that have come, if the last look is long enough ago.

        Args:
            now: The time in seconds.
        """
        if now < self._next:
            return
        self._next = now + SWEEP_SECONDS
        for _ in range(min(AT_ONCE, len(self._ids))):
            message_id = self._ids.popleft()
            if self._transport.poll(message_id, 0) is None:
                self._ids.append(message_id)
