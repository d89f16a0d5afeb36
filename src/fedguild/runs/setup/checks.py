"""Checks of a run's config and data that do not depend on the method."""

from __future__ import annotations

from importlib.util import find_spec
from typing import get_args

from fedguild.config import Config
from fedguild.core.errors import ConfigError
from fedguild.core.torchrun import torchrun_ranks
from fedguild.runs.setup.data import PreparedData, Split


def require_split(config: Config, split: Split) -> None:
    """Raises ConfigError if a split to be scored is unknown, or has no example."""
    if split not in get_args(Split):
        raise ConfigError(f"There is no split '{split}' to score.", f"Known: {', '.join(get_args(Split))}.")
    if split == "validation" and config.data.split.validation == 0:
        raise ConfigError(
            "The validation examples are to be scored, but data.split.validation is 0.",
            "Set data.split.validation=0.1, or evaluation.split=test.",
        )


def require_examples(data: PreparedData, split: Split) -> None:
    """Raises ConfigError if a split of data that is all on this machine has no example to score on."""
    if not data.pooled(split, 1, seed=0):
        held_out = "data.test=FILE, or data.split.test=0.1" if split == "test" else "data.split.validation=0.1"
        raise ConfigError(
            f"There is no {split} example to score on: the data has none of its own, and none is held out.",
            f"Give {held_out}.",
        )


def require_start(config: Config) -> None:
    """Checks what the rounds of a run on this machine need in addition to its method and model.

    Raises:
        ConfigError: the engine is that of real clients, or its extra is not installed, or its processes conflict with
            the rest of the config.
    """
    engine = config.federation.engine.name
    if engine == "flower":
        raise ConfigError(
            "federation.engine.name is flower, but a run with real clients cannot be started from here.",
            "`fedguild federation init` writes a federation, `fedguild federation run` runs it; to simulate the "
            "clients on this machine, set federation.engine.name=local.",
        )
    if engine == "ray" and find_spec("ray") is None:
        raise ConfigError(
            "federation.engine.name is ray, but the package 'ray' is not installed.",
            "Install the extra: pip install 'fedguild[ray]'.",
        )
    if engine == "ray" and torchrun_ranks() > 1:
        raise ConfigError(
            "federation.engine.name is ray, but torchrun started several processes.",
            "Start one process: federation.engine.ray.gpus_per_actor shards the backbone.",
        )
    if engine == "ray" and config.federation.engine.ray.gpus_per_actor > 1 and config.model.load_in_4bit:
        raise ConfigError(
            "federation.engine.ray.gpus_per_actor is above 1, but weights in 4 bit cannot be sharded.",
            "Set model.load_in_4bit=false, or gpus_per_actor=1.",
        )


def require_room(config: Config, *, generates: bool) -> None:
    """Raises ConfigError if answers are generated, and nothing of the longest sequence is left for their prompts."""
    longest, new = config.data.max_length, config.evaluation.max_new_tokens
    if generates and new >= longest:
        raise ConfigError(
            f"evaluation.max_new_tokens is {new}, which leaves no room for a prompt within data.max_length {longest}.",
            "Lower evaluation.max_new_tokens or raise data.max_length.",
        )
