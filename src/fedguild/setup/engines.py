"""The engine of a run, as its config names it."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedguild.activity import ActivityLog
from fedguild.engines.coded import CodedEngine
from fedguild.engines.cohorts import OnStep
from fedguild.engines.local import LocalEngine
from fedguild.engines.torchrun import TorchrunEngine, torchrun_ranks
from fedguild.errors import ConfigError
from fedguild.server.engine import Engine
from fedguild.setup.checks import require_start
from fedguild.setup.experiment import Experiment


def make_engine(experiment: Experiment) -> Engine:
    """Returns the engine that the config names; close it after the last round.

    Raises:
        ConfigError: it is that of real clients, its extra is not installed, or its settings do not fit this machine.
    """
    if experiment.remote is not None:
        return experiment.remote.engine
    require_start(experiment.config)
    federation = experiment.config.federation
    engine = _ENGINES[federation.engine.name](experiment)
    if experiment.privacy is not None:
        engine = experiment.privacy.simulated(engine)  # noise before anything else sees an upload
    if federation.secure:
        from fedguild.engines.secure import SecureEngine

        return SecureEngine(
            engine, experiment.budgets, federation.clients, federation.norm_limit, reported=experiment.privacy is None
        )
    return engine if federation.codec == "fp32" else CodedEngine(engine, federation.codec)


def _local_engine(experiment: Experiment) -> Engine:
    config = experiment.config
    if torchrun_ranks() > 1:
        return _torchrun_engine(experiment)
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


def _torchrun_engine(experiment: Experiment) -> Engine:
    config = experiment.config
    if config.model.load_in_4bit:
        raise ConfigError(
            "torchrun started several processes, but weights in 4 bit cannot be sharded.",
            "Set model.load_in_4bit=false, or start one process.",
        )
    engine = TorchrunEngine(
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
    experiment.scorer = engine
    return engine


def _on_step(experiment: Experiment) -> OnStep:
    """Returns what reports an optimizer step, without the loss where it is withheld for privacy."""
    step = experiment.progress.step
    return step if experiment.privacy is None else lambda done, total, _: step(done, total, math.nan)


def _ray_engine(experiment: Experiment) -> Engine:
    from fedguild.engines.ray import RayEngine

    config = experiment.config
    settings = config.federation.engine.ray
    engine = RayEngine(
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
    experiment.scorer = engine
    return engine


_ENGINES: dict[str, Callable[[Experiment], Engine]] = {
    "local": _local_engine,
    "ray": _ray_engine,
}
