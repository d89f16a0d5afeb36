"""A thread that names the rank of a sharded backbone that is late, while this rank waits for its GPU.

On a GPU the gathers of layers are asynchronous. The host may wait in the middle of a layer for a result that never
comes, and NCCL ends the process after its own timeout, before the agreement of the ranks (`ranks`) can name anyone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

INTERVAL_SECONDS = 1.0
"""Time between two looks at the clock."""
_log = logging.getLogger("fedguild")


class RankWatch:
    """Watches this rank's passes, and names the ranks that are behind when none has begun for too long.

    Args:
        store: The ranks' store, on a separate connection.
        key: Prefix of a rank's number in the name under which the store has its passes.
        limit_seconds: Time after which it reports, once for each pass.
        clock: Seconds from any start.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        rank: int,
        size: int,
        limit_seconds: float,
        say: Callable[[str], object] = _log.error,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._key, self._rank, self._size = store, key, rank, size
        self._limit, self._say, self._clock = limit_seconds, say, clock
        self._began: tuple[int, float] | None = None
        self._told = 0
        self._ended = threading.Event()

    def begin(self, passes: int) -> None:
        self._began = passes, self._clock()

    def rest(self) -> None:
        """Records that this rank has nothing to compute, which may last."""
        self._began = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="fedguild rank watch", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def look(self) -> None:
        """Reports if the last pass began too long ago."""
        began = self._began
        if began is None or began[0] <= self._told or self._clock() - began[1] < self._limit:
            return
        self._told = began[0]
        try:
            reached = [int(self._store.get(f"{self._key}/{rank}")) for rank in range(self._size)]
        except RuntimeError:
            self._say(f"Rank {self._rank} of {self._size} waits, and rank 0, which has the store, does not answer.")
            return
        if self._began != began:
            return
        behind = ", ".join(str(rank) for rank, passes in enumerate(reached) if passes < began[0])
        told = f"Rank {self._rank} of {self._size} has been in pass {began[0]} of the backbone for {self._limit:g} s"
        if behind:
            self._say(f"{told}: rank {behind} did not come to it and hangs, is out of memory or has ended.")
        else:
            self._say(f"{told}, as have all others: one of them hangs within a layer.")

    def _run(self) -> None:
        while not self._ended.wait(min(INTERVAL_SECONDS, self._limit / 4)):
            self.look()
