"""The examples of a client's steps in a round, and their learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedguild.config.training import TrainingSettings
from fedguild.data.batches import epoch_order
from fedguild.errors import DataError


def steps_in_round(examples: int, settings: TrainingSettings) -> int:
    """Returns the number of optimizer steps in a round of a client with this number of examples."""
    if settings.steps is not None:
        return settings.steps
    per_epoch = math.ceil(math.ceil(examples / settings.batch_size) / settings.accumulation)
    return max(1, round((settings.epochs or 0) * per_epoch))


def plan_steps(examples: int, settings: TrainingSettings, rng: np.random.Generator) -> list[list[list[int]]]:
    """Returns a round's optimizer steps, each a list of batches of example indices.

    Args:
        examples: Number of the client's training examples.
        settings: The training settings.
        rng: Shuffles each epoch.

    Raises:
        DataError: there are no examples.
    """
    if examples < 1:
        raise DataError("A client without training examples cannot train.", "Give every client at least one example.")
    total = steps_in_round(examples, settings)
    steps: list[list[list[int]]] = []
    for batches in _epochs(examples, settings, rng):
        for start in range(0, len(batches), settings.accumulation):
            if len(steps) == total:
                return steps
            steps.append(batches[start : start + settings.accumulation])
    raise AssertionError("unreachable: the epochs never end")


def learning_rate(settings: TrainingSettings, step: int, total: int, round_index: int) -> float:
    """Returns the rate of a step (from 0, of `total`) in a round (from 1)."""
    peak = settings.learning_rate * settings.round_decay ** (round_index - 1)
    warm = math.ceil(settings.warmup * total)
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, total - warm)
    if settings.schedule == "linear":
        return peak * (1 - done)
    if settings.schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak


def _epochs(examples: int, settings: TrainingSettings, rng: np.random.Generator) -> Iterator[list[list[int]]]:
    while True:
        yield epoch_order(examples, settings.batch_size, rng)
