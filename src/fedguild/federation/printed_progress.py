"""A run's progress as plain lines on stdout, which Flower streams to followers of the run."""

from __future__ import annotations

from collections.abc import Mapping


class PrintedProgress:
    """A `fedguild.core.progress.Progress` that prints."""

    def stage(self, text: str) -> None:
        self.message(f"{text}.")

    def round_started(self, number: int, total: int) -> None:
        self.message(f"Round {number} of {total}.")

    def step(self, done: int, total: int, loss: float) -> None:
        """Ignores the steps: they are on the clients' machines."""

    def evaluated(self, scores: Mapping[str, float]) -> None:
        self.message("Scores: " + ", ".join(f"{name} {score:.3f}" for name, score in scores.items()) + ".")

    def message(self, text: str) -> None:
        print(text, flush=True)
