"""The examples of a client's steps in a round, and their learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedguild.config.training import TrainingSettings
from fedguild.core.errors import DataError
from fedguild.data.batches import epoch_order


def steps_in_round(examples: int, settings: TrainingSettings) -> int:
    if settings.steps is not None:
        return settings.steps
    return max(1, round((settings.epochs or 0) * _steps_per_epoch(examples, settings)))


def examples_in_round(examples: int, settings: TrainingSettings) -> int:
    """Returns how many examples a round trains on, each counted as often as it is drawn."""
    epochs, more = divmod(steps_in_round(examples, settings), _steps_per_epoch(examples, settings))
    return epochs * examples + more * settings.batch_size * settings.gradient_accumulation_steps


def _steps_per_epoch(examples: int, settings: TrainingSettings) -> int:
    return math.ceil(math.ceil(examples / settings.batch_size) / settings.gradient_accumulation_steps)


def plan_steps(examples: int, settings: TrainingSettings, rng: np.random.Generator) -> list[list[list[int]]]:
    """Returns a round's optimizer steps, each a list of batches of example indices.

    Raises:
        DataError: there are no examples.
    """
    if examples < 1:
        raise DataError("A client without training examples cannot train.", "Give every client at least one example.")
    total = steps_in_round(examples, settings)
    steps: list[list[list[int]]] = []
    for batches in _epochs(examples, settings, rng):
        for start in range(0, len(batches), settings.gradient_accumulation_steps):
            if len(steps) == total:
                return steps
            steps.append(batches[start : start + settings.gradient_accumulation_steps])
    raise AssertionError("unreachable: the epochs never end")


def learning_rate(settings: TrainingSettings, step: int, total: int, round_index: int) -> float:
    """Returns the rate of a step (from 0, of `total`) in a round (from 1).

    It is `learning_rate` × `round_decay`^(round - 1) × `round_factor` × the factor of `lr_scheduler` and `warmup`
    within the round.

    Raises:
        ValueError: as `round_factor`.
    """
    peak = settings.learning_rate * settings.round_decay ** (round_index - 1) * round_factor(settings, round_index)
    warm = math.ceil(settings.warmup * total)
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, total - warm)
    if settings.lr_scheduler == "linear":
        return peak * (1 - done)
    if settings.lr_scheduler == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak


def round_factor(settings: TrainingSettings, round_index: int) -> float:
    """Returns the factor f(r) of a round's learning rate: a warm-up, then annealing from 1 to `round_final`.

    With W = `round_warmup`, R = `round_horizon`, φ = `round_final` and, after the warm-up, the progress d = min(1, (r -
    W - 1) / max(1, R - W - 1)):

        r ≤ W       f(r) = r / (W + 1)
        constant    f(r) = 1
        linear      f(r) = 1 - (1 - φ) d
        cosine      f(r) = φ + (1 - φ) (1 + cos(π d)) / 2       (Loshchilov & Hutter, ICLR 2017, Eq. 5, no restarts)

    Round W + 1 is the first at the full rate, round R the first at φ of it. At the defaults f is 1.

    Args:
        settings: The training settings, `round_horizon` set (`Config.local_training`).
        round_index: The round, from 1.

    Raises:
        ValueError: the rate anneals and `round_horizon` is not set.
    """
    warm = settings.round_warmup
    if round_index <= warm:
        return round_index / (warm + 1)
    if settings.round_schedule == "constant":
        return 1.0
    if settings.round_horizon is None:
        raise ValueError("training.round_horizon is not set: take the settings from Config.local_training")
    done = min(1.0, (round_index - warm - 1) / max(1, settings.round_horizon - warm - 1))
    left = 1 - done if settings.round_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.round_final + (1 - settings.round_final) * left


def _epochs(examples: int, settings: TrainingSettings, rng: np.random.Generator) -> Iterator[list[list[int]]]:
    while True:
        yield epoch_order(examples, settings.batch_size, rng)
