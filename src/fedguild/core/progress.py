"""Progress of a long run: the protocol through which it reports to its caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Progress(Protocol):
    """Callbacks of a run, in the order in which they come."""

    def stage(self, text: str) -> None:
        """A stage that takes a while begins, for example loading the model."""
        ...

    def round_started(self, number: int, total: int) -> None:
        """Round `number` of `total` begins; rounds count from 1."""
        ...

    def step(self, done: int, total: int, loss: float) -> None:
        """`done` of the current cohort's `total` steps are over; `loss` is its clients' mean, NaN if withheld."""
        ...

    def evaluated(self, scores: Mapping[str, float], metric: str) -> None:
        """The models were scored: name of a budget or of a mean over clients -> score, and what it is, in words."""
        ...

    def message(self, text: str) -> None:
        """Something worth a line, for example a rejected upload."""
        ...


class Silent:
    """A `Progress` that ignores everything."""

    def stage(self, text: str) -> None:
        """Does nothing."""

    def round_started(self, number: int, total: int) -> None:
        """Does nothing."""

    def step(self, done: int, total: int, loss: float) -> None:
        """Does nothing."""

    def evaluated(self, scores: Mapping[str, float], metric: str) -> None:
        """Does nothing."""

    def message(self, text: str) -> None:
        """Does nothing."""


class Note(Protocol):
    """Takes an event and what is known about it, as JSON values."""

    def __call__(self, event: str, **values: Any) -> None:
        """Records an event."""
        ...


def unnoted(event: object, **values: Any) -> None:
    """A `Note` that ignores everything, also the facts of a secure session."""
