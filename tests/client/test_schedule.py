"""Examples and learning rate of a client at each step, counted by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fedguild.client.schedule import examples_in_round, learning_rate, plan_steps
from fedguild.config import load_config
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import DataError
from fedguild.core.seeding import numpy_rng
from tests.oracles.schedule import annealed_rates


def sizes(examples: int, **settings) -> list[list[int]]:
    """Sizes of the batches of every step."""
    plan = plan_steps(examples, TrainingSettings(**settings), numpy_rng(0, "test"))
    return [[len(batch) for batch in step] for step in plan]


@pytest.mark.parametrize(
    ("examples", "settings", "expected"),
    [
        (5, {"epochs": 1, "batch_size": 2}, [[2], [2], [1]]),
        (5, {"epochs": 2, "batch_size": 2}, [[2], [2], [1]] * 2),
        (5, {"epochs": 1, "batch_size": 2, "gradient_accumulation_steps": 2}, [[2, 2], [1]]),
        (7, {"epochs": 1, "batch_size": 2, "gradient_accumulation_steps": 3}, [[2, 2, 2], [1]]),
        (5, {"epochs": 1, "batch_size": 8, "gradient_accumulation_steps": 4}, [[5]]),
        (8, {"epochs": 1.5, "batch_size": 2}, [[2]] * 6),
        (8, {"epochs": 0.25, "batch_size": 2}, [[2]]),
        (8, {"epochs": 0.01, "batch_size": 2}, [[2]]),
        (3, {"steps": 4, "batch_size": 2}, [[2], [1], [2], [1]]),
        (3, {"steps": 3, "batch_size": 2, "gradient_accumulation_steps": 2}, [[2, 1]] * 3),
        (1, {"steps": 2, "batch_size": 4}, [[1], [1]]),
    ],
)
def test_steps_and_batches(examples, settings, expected):
    assert sizes(examples, **settings) == expected
    assert examples_in_round(examples, TrainingSettings(**settings)) == sum(map(sum, expected))


def test_every_epoch_sees_every_example_once_in_another_order():
    plan = plan_steps(9, TrainingSettings(epochs=3, batch_size=2, gradient_accumulation_steps=2), numpy_rng(1, "test"))
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
        ({"lr_scheduler": "linear"}, [8.0, 6.0, 4.0, 2.0]),
        ({"lr_scheduler": "cosine"}, [8.0, 4 + 4 * 0.5**0.5, 4.0, 4 - 4 * 0.5**0.5]),
        ({"warmup": 0.5}, [4.0, 8.0, 8.0, 8.0]),
        ({"warmup": 0.5, "lr_scheduler": "linear"}, [4.0, 8.0, 8.0, 4.0]),
        ({"warmup": 0.3, "lr_scheduler": "cosine"}, [4.0, 8.0, 8.0, 4.0]),
        ({"warmup": 0.9}, [2.0, 4.0, 6.0, 8.0]),
    ],
)
def test_learning_rates_of_four_steps(settings, expected):
    training = TrainingSettings(steps=4, learning_rate=8.0, **settings)
    assert [learning_rate(training, step, 4, 1) for step in range(4)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("rounds", "warmup", "final"), [(1, 0, 0.1), (2, 0, 0.5), (9, 0, 0.1), (9, 3, 0.2), (4, 4, 1)])
def test_the_rate_anneals_over_rounds_as_torchs_schedulers_do(schedule, rounds, warmup, final):
    settings = {"round_schedule": schedule, "round_warmup": warmup, "round_final": final, "round_horizon": rounds}
    training = TrainingSettings(steps=1, learning_rate=8.0, **settings)
    rates = [learning_rate(training, 0, 1, number) for number in range(1, rounds + 4)]
    oracle = annealed_rates(8.0, schedule, rounds, warmup, final)
    assert rates[:rounds] == pytest.approx(oracle, rel=1e-12)
    assert rates[rounds:] == pytest.approx([8.0 if schedule == "constant" else 8.0 * final] * 3)


def test_the_factors_of_the_round_and_of_the_step_multiply():
    training = TrainingSettings(
        steps=4, learning_rate=8.0, lr_scheduler="linear", round_decay=0.5, round_schedule="linear", round_horizon=3
    )
    assert learning_rate(training, 1, 4, 2) == pytest.approx(8.0 * 0.5 * 0.55 * 0.75)


def test_a_rate_without_a_horizon_is_refused():
    training = TrainingSettings(steps=1, round_schedule="cosine")
    with pytest.raises(ValueError, match="round_horizon is not set"):
        learning_rate(training, 0, 1, 2)


def test_a_config_anneals_over_all_its_rounds_unless_it_says_otherwise():
    config = load_config("flame/tiny-tasks", ["federation.rounds=7", "training.round_schedule=linear"])
    assert config.local_training.round_horizon == 7
    assert load_config(config, ["training.round_horizon=3"]).local_training.round_horizon == 3
    assert config.training.round_horizon is None
    assert config.local_training.model_copy(update={"round_horizon": None}) == config.training


def test_the_schedule_over_rounds_is_part_of_a_runs_fingerprint():
    plain = load_config("flame/tiny-tasks")
    assert load_config("flame/tiny-tasks", ["training.round_schedule=constant"]).fingerprint() == plain.fingerprint()
    for changed in ("round_schedule=cosine", "round_warmup=1", "round_final=0.5", "round_horizon=9"):
        assert load_config("flame/tiny-tasks", [f"training.{changed}"]).fingerprint() != plain.fingerprint()
