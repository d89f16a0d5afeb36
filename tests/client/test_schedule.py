"""Which examples and which learning rate a client gets at each step, counted by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fedguild.client.schedule import learning_rate, plan_steps
from fedguild.config.training import TrainingSettings
from fedguild.errors import DataError
from fedguild.seeding import numpy_rng


def sizes(examples: int, **settings) -> list[list[int]]:
    """Sizes of the batches of every step."""
    plan = plan_steps(examples, TrainingSettings(**settings), numpy_rng(0, "test"))
    return [[len(batch) for batch in step] for step in plan]


@pytest.mark.parametrize(
    ("examples", "settings", "expected"),
    [
        (5, {"epochs": 1, "batch_size": 2}, [[2], [2], [1]]),
        (5, {"epochs": 2, "batch_size": 2}, [[2], [2], [1]] * 2),
        (5, {"epochs": 1, "batch_size": 2, "accumulation": 2}, [[2, 2], [1]]),
        (7, {"epochs": 1, "batch_size": 2, "accumulation": 3}, [[2, 2, 2], [1]]),
        (5, {"epochs": 1, "batch_size": 8, "accumulation": 4}, [[5]]),
        (8, {"epochs": 1.5, "batch_size": 2}, [[2]] * 6),
        (8, {"epochs": 0.25, "batch_size": 2}, [[2]]),
        (8, {"epochs": 0.01, "batch_size": 2}, [[2]]),
        (3, {"steps": 4, "batch_size": 2}, [[2], [1], [2], [1]]),
        (3, {"steps": 3, "batch_size": 2, "accumulation": 2}, [[2, 1]] * 3),
        (1, {"steps": 2, "batch_size": 4}, [[1], [1]]),
    ],
)
def test_steps_and_batches(examples, settings, expected):
    assert sizes(examples, **settings) == expected


def test_every_epoch_sees_every_example_once_in_another_order():
    plan = plan_steps(9, TrainingSettings(epochs=3, batch_size=2, accumulation=2), numpy_rng(1, "test"))
    order = [index for step in plan for batch in step for index in batch]
    epochs = [order[start : start + 9] for start in (0, 9, 18)]
    assert all(Counter(epoch) == Counter(range(9)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_generator_only():
    settings = TrainingSettings(epochs=2, batch_size=3)
    first = plan_steps(10, settings, numpy_rng(1, "batches", 2, 5))
    np.random.seed(3)
    assert first == plan_steps(10, settings, numpy_rng(1, "batches", 2, 5))
    assert first != plan_steps(10, settings, numpy_rng(1, "batches", 3, 5))
    assert first != plan_steps(10, settings, numpy_rng(1, "batches", 2, 6))


def test_a_client_without_examples_is_refused():
    for settings in (TrainingSettings(epochs=1), TrainingSettings(steps=1)):
        with pytest.raises(DataError, match="without training examples"):
            plan_steps(0, settings, numpy_rng(0, "test"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [8.0, 8.0, 8.0, 8.0]),
        ({"schedule": "linear"}, [8.0, 6.0, 4.0, 2.0]),
        ({"schedule": "cosine"}, [8.0, 4 + 4 * 0.5**0.5, 4.0, 4 - 4 * 0.5**0.5]),
        ({"warmup": 0.5}, [4.0, 8.0, 8.0, 8.0]),
        ({"warmup": 0.5, "schedule": "linear"}, [4.0, 8.0, 8.0, 4.0]),
        ({"warmup": 0.3, "schedule": "cosine"}, [4.0, 8.0, 8.0, 4.0]),
        ({"warmup": 0.9}, [2.0, 4.0, 6.0, 8.0]),
    ],
)
def test_learning_rates_of_four_steps(settings, expected):
    training = TrainingSettings(steps=4, learning_rate=8.0, **settings)
    assert [learning_rate(training, step, 4, 1) for step in range(4)] == pytest.approx(expected)


def test_the_rate_falls_from_round_to_round():
    training = TrainingSettings(steps=1, learning_rate=8.0, round_decay=0.5)
    assert [learning_rate(training, 0, 1, number) for number in (1, 2, 3)] == [8.0, 4.0, 2.0]
