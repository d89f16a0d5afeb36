"""Clients that hold up the others again and again: they are waited for less and less often."""

from __future__ import annotations

ALLOWED = 3
"""A client may hold up the others this often in a row."""
MOST_SKIPPED = 64
"""It is waited for again after 1, 2, 4 rounds and so on, and at the latest after this many."""


class Lateness:
    """How often each client has held up the others, and when it is waited for again.

    A client that never answers is waited for in 10 of the first 100 rounds, and then in every 65th; retries in a round
    count, and are waited for as long as it is allowed to be late. Each answer in time makes up for one that did not
    come.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._late: dict[int, tuple[int, int]] = {}

    def next_turn(self) -> None:
        """Begins another round."""
        self._turn += 1

    def note(self, client: int, *, late: bool) -> None:
        """Records whether a client held up the others or answered in time."""
        times = self._late.get(client, (0, 0))[0]
        if late:
            times, again = times + 1, self._turn
            if times >= ALLOWED:
                again += 1 + min(2 ** min(times - ALLOWED, 32), MOST_SKIPPED)
            self._late[client] = times, again
        elif times > 1:
            self._late[client] = times - 1, self._turn
        else:
            self._late.pop(client, None)

    def is_waited_for(self, client: int) -> bool:
        return self._turn >= self._late.get(client, (0, 0))[1]

    def reason(self, client: int) -> str:
        """Returns why a client is not waited for, as a clause."""
        times, turn = self._late[client]
        again = turn - self._turn
        return f"it held up the others {times} times and is waited for again in {again} round(s)"
