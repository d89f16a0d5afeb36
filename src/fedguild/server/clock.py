"""Wall time by phase, each second counted once."""

from __future__ import annotations

import time

import torch


class Clock:
    """Adds up wall time by phase; a phase inside another is not counted in the outer one.

    Args:
        seconds: Phase -> seconds so far; added to in place.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._inner = [0.0]

    def phase(self, name: str) -> _Phase:
        """Returns a context that adds its wall time to a phase."""
        return _Phase(self, name)


class _Phase:
    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._clock._inner.append(0.0)

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        whole = time.perf_counter() - self._started
        exclusive = whole - self._clock._inner.pop()
        self._clock._inner[-1] += whole
        self._clock._seconds[self._name] = self._clock._seconds.get(self._name, 0.0) + exclusive
