"""The cells of a comparison as tasks of a Ray cluster: each a separate run on one GPU, or on CPU cores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedguild.api.cells import Cell, Tell, hand_over, say_nothing, still_open
from fedguild.errors import ConfigError, FedGuildError
from fedguild.layout import CONFIG
from fedguild.results import divergence

TRIES = 3
"""Attempts at a cell whose process or machine died; each continues from its last complete round."""


def complete_on_ray(
    cells: Sequence[Cell], address: str | None, cores: int, tell: Tell = say_nothing, *, may_diverge: bool = False
) -> None:
    """Completes every cell on a Ray cluster, as many at a time as it has room for.

    Args:
        cells: The cells; their folders must be on storage that every machine of the cluster sees.
        address: The cluster's; None to start Ray on this machine.
        cores: CPU cores of each cell, and its threads; with GPUs each cell has one to itself.
        tell: Receives a line for each finished cell.
        may_diverge: As in `complete`.

    Raises:
        ConfigError: Ray is missing or cannot be reached, or has fewer cores than a cell needs.
        FedGuildError: a run failed; the others have been stopped and can be resumed.
    """
    open_cells = still_open(cells, tell, may_diverge=may_diverge)
    if not open_cells:
        return
    hand_over(open_cells)
    ray = _ray()
    from fedguild.engines.ray_cluster import connect

    started = connect(address, cores)
    try:
        resources = ray.cluster_resources()
        gpus = 1 if resources.get("GPU", 0.0) else 0
        if cores > resources.get("CPU", 0.0):
            raise ConfigError(f"cores is {cores}, but Ray has {resources.get('CPU', 0.0):g} CPU core(s).")
        task = ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=TRIES - 1)(_complete)
        waiting = {
            task.remote(str(cell.folder.resolve()), cell.config_to_run.resolved_yaml(), cores): cell
            for cell in open_cells
        }
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            _finish(ray, done, waiting.pop(done), list(waiting), tell, may_diverge=may_diverge)
    finally:
        if started:
            ray.shutdown()


def _finish(
    ray: Any, done: Any, cell: Cell, others: Sequence[Any], tell: Tell = say_nothing, *, may_diverge: bool = False
) -> None:
    """Reports the end of a cell; if it failed, stops the others and raises."""
    try:
        problem, hint = ray.get(done)
    except ray.exceptions.RayTaskError as error:  # raised by the run itself: not tried again
        reason = error if error.cause is None else error.cause
        problem = f"{type(reason).__name__}: {str(reason).strip() or 'no message'}"
        hint = f"Its folder: {cell.folder}"
    except ray.exceptions.RayError as error:
        problem, hint = (
            str(error).strip().splitlines()[0],
            "Its machine or process died; run the same command again.",
        )
    if not problem and cell.state() != "finished":
        problem = f"it ended on a machine that does not share {cell.folder} with this one"
        hint = "Give an output folder on storage that every machine of the cluster sees."
    if problem and may_diverge and divergence(cell.folder):
        tell(f"{cell.title}: {problem}")
        return
    if problem:
        for other in others:
            ray.cancel(other, force=True)
        raise FedGuildError(f"{cell.title} failed: {problem}", hint)
    tell(f"{cell.title}: finished")


def _complete(folder: str, resolved_yaml: str, threads: int) -> tuple[str, str]:
    """Runs or resumes one cell in a Ray worker; returns the error and the hint, both empty on success."""
    import torch
    import yaml

    from fedguild import experiment
    from fedguild.config import Config

    torch.set_num_threads(threads)
    try:
        if (Path(folder) / CONFIG).is_file():
            experiment.resume(Path(folder))
        else:
            experiment.run(Config.model_validate(yaml.safe_load(resolved_yaml)), Path(folder))
    except FedGuildError as error:
        return error.message, error.hint
    return "", ""


def _ray() -> Any:
    """Returns the package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("The engine ray needs Ray.", "pip install 'fedguild[ray]'") from error
    return ray
