"""The engine of a run, as its config names it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedguild.config import Config
from fedguild.core.errors import ConfigError
from fedguild.core.torchrun import torchrun_ranks
from fedguild.engines.cohorts import OnStep
from fedguild.engines.local import LocalEngine
from fedguild.engines.torchrun import TorchrunEngine
from fedguild.measuring.log.activity import ActivityLog
from fedguild.runs.setup.checks import require_start
from fedguild.runs.setup.experiment import Experiment, Scorer
from fedguild.runs.setup.protection import protected
from fedguild.server.engine import Engine

if TYPE_CHECKING:
    from fedguild.engines.ray import RayEngine


def make_engine(experiment: Experiment) -> tuple[Engine, Scorer | None]:
    """Makes the engine that the config names; close it after the last round.

    Returns:
        The engine; and what scores models instead of this process (`Experiment.scorer`), None if nothing does.

    Raises:
        ConfigError: it is that of real clients, its extra is not installed, or its settings do not fit this machine.
    """
    if experiment.remote is not None:
        return experiment.remote.engine, None
    config = experiment.config
    require_start(config)
    if holds_backbone(config):
        make = _ray_engine if config.federation.engine.name == "ray" else _torchrun_engine
        workers = make(experiment)
        return protected(workers, experiment), workers
    return protected(_local_engine(experiment), experiment), None


def holds_backbone(config: Config) -> bool:
    """Whether the processes of the config's engine hold the backbone, and score models, instead of this one."""
    return config.federation.engine.name == "ray" or torchrun_ranks() > 1


def _local_engine(experiment: Experiment) -> LocalEngine:
    config = experiment.config
    return LocalEngine(
        experiment.backbone,
        experiment.encoded,
        config.local_training,
        experiment.memory,
        cohort_size=config.federation.cohort_size,
        seed=config.seed,
        on_step=_on_step(experiment),
        private=None if experiment.privacy is None else experiment.privacy.dp_sgd(),
        note=ActivityLog(experiment.folder).append,
    )


def _torchrun_engine(experiment: Experiment) -> TorchrunEngine:
    config = experiment.config
    if config.model.load_in_4bit:
        raise ConfigError(
            "torchrun started several processes, but weights in 4 bit cannot be sharded.",
            "Set model.load_in_4bit=false, or start one process.",
        )
    return TorchrunEngine(
        config.model.model_dump(),
        experiment.encoded,
        config.local_training,
        experiment.memory,
        cohort_size=config.federation.cohort_size,
        seed=config.seed,
        timeout_seconds=config.federation.engine.timeout_seconds,
        on_step=_on_step(experiment),
        private=None if experiment.privacy is None else experiment.privacy.dp_sgd(),
    )


def _ray_engine(experiment: Experiment) -> RayEngine:
    from fedguild.engines.ray import RayEngine

    config = experiment.config
    settings = config.federation.engine.ray
    return RayEngine(
        config.model.model_dump(),
        experiment.encoded,
        config.local_training,
        experiment.memory,
        cohort_size=config.federation.cohort_size,
        seed=config.seed,
        address=settings.address,
        actors=settings.actors,
        gpu_fraction=settings.gpu_fraction,
        cpus_per_actor=settings.cpus_per_actor,
        gpus_per_actor=settings.gpus_per_actor,
        timeout_seconds=config.federation.engine.timeout_seconds,
        on_step=_on_step(experiment),
        private=None if experiment.privacy is None else experiment.privacy.dp_sgd(),
        note=ActivityLog(experiment.folder).append,
    )


def _on_step(experiment: Experiment) -> OnStep:
    """Returns the callback for an optimizer step, which omits the loss if it is withheld for privacy."""
    step = experiment.progress.step
    return step if experiment.privacy is None else lambda done, total, _: step(done, total, math.nan)
