"""Runs the cells of a grid: one at a time, in several processes, or as tasks of a Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedguild.config import Config
from fedguild.config.trust import trust
from fedguild.core.errors import ConfigError, DivergedError, FedGuildError
from fedguild.core.files import write_text
from fedguild.core.progress import Progress, Silent
from fedguild.core.torchrun import torchrun_ranks
from fedguild.model.heap import give_back_freed_pages
from fedguild.runs.api.inputs import Inputs
from fedguild.runs.api.run_grid import Cell, RunGrid
from fedguild.runs.results import divergence, has_begun

TRIES = 3
"""Attempts at a cell of a Ray cluster whose process or machine died."""
Tell = Callable[[str], None]
"""Receives a line about the cells."""
ProgressOf = Callable[[str], AbstractContextManager[Progress]]
"""Returns the receiver of a cell's progress reports, by the cell's title."""


def say_nothing(_: str) -> None:
    """A `Tell` that ignores everything."""


def silent(_: str) -> AbstractContextManager[Progress]:
    """A `ProgressOf` whose receivers ignore everything."""
    return nullcontext(Silent())


@dataclass(frozen=True)
class Launch:
    """How to complete the runs of a grid. Missing runs are begun, partial ones resumed, finished ones kept.

    Attributes:
        jobs: Number of runs at the same time on this machine; if more than one, each in its own process.
        launcher: `local`, or `ray`: as many at a time as the cluster has room for.
        address: The Ray cluster's; None to start Ray on this machine.
        cores: With `ray`, CPU cores of each run, and its threads; with GPUs each run has one to itself.
        progress: Returns the receiver of a cell's progress reports, if it runs in this process.
        tell: Receives a line for each finished cell, and the output of the processes.
        may_diverge: Whether a cell whose training diverges is reported and skipped, now and later.

    Raises:
        ConfigError: there is no such launcher, or no run could start.
    """

    jobs: int = 1
    launcher: Literal["local", "ray"] = "local"
    address: str | None = None
    cores: int = 1
    progress: ProgressOf = silent
    tell: Tell = say_nothing
    may_diverge: bool = False

    def __post_init__(self) -> None:
        if self.launcher not in ("local", "ray"):
            raise ConfigError(f"There is no launcher '{self.launcher}' for several runs.", "Known: local, ray.")
        if self.jobs < 1:
            raise ConfigError(f"At least one run goes on at a time, but jobs is {self.jobs}.")
        if torchrun_ranks() > 1:
            raise ConfigError(
                "torchrun's processes share one run, but several are to be completed.",
                "Start one run by torchrun (fedguild run), or these without it: in turn, with jobs, on Ray.",
            )

    @property
    def is_here(self) -> bool:
        return self.launcher == "local" and self.jobs == 1

    def complete(self, grid: RunGrid) -> None:
        """Completes the runs of a grid, after writing its plan.

        Raises:
            ConfigError: functions were given in Python, which other processes lack.
            FedGuildError: a run failed; those in progress have been stopped and can be resumed.
        """
        if not self.is_here and grid.inputs.has_functions:
            where = "on Ray" if self.launcher == "ray" else "with more than one job"
            raise ConfigError(
                f"Metrics and callbacks that are given in Python cannot be used {where}: other processes lack them.",
                "Use one job on this machine, or install them as plug-ins (docs/guides/plug-ins.md).",
            )
        grid.write_plan()
        self.complete_cells(grid.cells, grid.inputs)

    def complete_cells(self, cells: Sequence[Cell], inputs: Inputs | None = None) -> None:
        """Completes some cells.

        Raises:
            FedGuildError: as `complete`.
        """
        inputs = inputs or Inputs()
        left = [cell for cell in cells if self._is_open(cell)]
        if self.is_here:
            for cell in left:
                self._run_here(cell, inputs)
        elif left:
            hand_over(left, inputs)
            (_on_ray if self.launcher == "ray" else _in_processes)(left, self)

    def settle(self, cell: Cell, problem: str, hint: str) -> None:
        """Raises the error of a cell that ran elsewhere, or reports it if the cell may diverge and did."""
        if problem and self.may_diverge and divergence(cell.folder):
            self.tell(f"{cell.title}: {problem}")
        elif problem:
            raise FedGuildError(f"{cell.title} failed: {problem}", hint)

    def _is_open(self, cell: Cell) -> bool:
        """Whether a cell is to be run; reports one that is not."""
        state = cell.state()
        if state == "finished":
            self.tell(f"{cell.title}: already finished")
        elif self.may_diverge and state == "partial" and divergence(cell.folder):
            self.tell(f"{cell.title}: diverged before; remove {cell.folder} to try it again")
        else:
            if state == "partial" and (changed := cell.rewrite_config()):
                self.tell(f"{cell.title}: goes on with other values of {', '.join(changed)}")
            return True
        return False

    def _run_here(self, cell: Cell, inputs: Inputs) -> None:
        try:
            with self.progress(cell.title) as receiver:
                _run_or_resume(
                    cell.config_to_run,
                    cell.folder,
                    progress=receiver,
                    preparation=inputs.preparation(),
                    callbacks=inputs.callbacks,
                )
        except DivergedError as error:
            if not self.may_diverge:
                raise
            self.tell(f"{cell.title}: {error.message}")
        give_back_freed_pages()


def hand_over(cells: Sequence[Cell], inputs: Inputs) -> None:
    """Writes data and a partition given in Python to files for other processes.

    Raises:
        DataError: the partition does not fit the data.
    """
    from fedguild.runs.setup import prepare_data

    for cell in cells:
        if inputs.data is not None and cell.state() == "absent":
            inputs.data.write(cell.folder)
            prepare_data(cell.config, cell.folder, inputs.data)


def _run_or_resume(config: Config, folder: Path, **options: Any) -> None:
    from fedguild.runs import experiment

    if has_begun(folder):
        experiment.resume(folder, **options)
    else:
        experiment.run(config, folder, **options)


def _in_processes(cells: Sequence[Cell], launch: Launch) -> None:
    """Completes cells in processes with an equal share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // launch.jobs))}
    running: set[subprocess.Popen[str]] = set()
    stopped = threading.Event()

    def problem_of(cell: Cell) -> str:
        if stopped.is_set():
            return ""
        lines = []
        process = subprocess.Popen(
            command_of(cell), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        running.add(process)
        if stopped.is_set():  # since the look above
            process.terminate()
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip())
            launch.tell(f"{cell.title}: {line.rstrip()}")
        running.discard(process)
        if process.wait() == 0 or stopped.is_set():
            return ""
        problem = next((line for line in lines if line.startswith("Error: ")), lines[-1] if lines else "no message")
        return problem.removeprefix("Error: ")

    with ThreadPoolExecutor(launch.jobs) as threads:
        waiting = {threads.submit(problem_of, cell): cell for cell in cells}
        try:
            for done in as_completed(waiting):
                launch.settle(waiting[done], done.result(), f"Its folder: {waiting[done].folder}")
        except BaseException:
            stopped.set()
            for process in list(running):
                process.terminate()
            raise


def command_of(cell: Cell) -> list[str]:
    """Returns the command that runs or resumes a cell; a new one's config is written next to its folder."""
    fedguild = [sys.executable, "-P", "-m", "fedguild"]  # no module of the working folder, as `fedguild` itself
    if has_begun(cell.folder):
        return [*fedguild, "resume", str(cell.folder)]
    config = cell.folder.with_suffix(".yaml")
    trust(config, cell.config_to_run.code)
    write_text(config, cell.config_to_run.resolved_yaml())
    return [*fedguild, "run", str(config), "--output", str(cell.folder)]


def _on_ray(cells: Sequence[Cell], launch: Launch) -> None:
    """Completes cells on a Ray cluster; their folders must be on storage shared by all its machines."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("The engine ray needs Ray.", "pip install 'fedguild[ray]'") from error
    from fedguild.engines.ray_cluster import connect

    started = connect(launch.address, launch.cores)
    try:
        resources = ray.cluster_resources()
        if launch.cores > resources.get("CPU", 0.0):
            raise ConfigError(f"cores is {launch.cores}, but Ray has {resources.get('CPU', 0.0):g} CPU core(s).")
        gpus = 1 if resources.get("GPU", 0.0) else 0
        task = ray.remote(num_cpus=launch.cores, num_gpus=gpus, max_retries=TRIES - 1)(_in_a_worker)
        waiting = {
            task.remote(str(cell.folder.resolve()), cell.config_to_run.resolved_yaml(), launch.cores): cell
            for cell in cells
        }
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            _finish(ray, done, waiting.pop(done), list(waiting), launch)
    finally:
        if started:
            ray.shutdown()


def _finish(ray: Any, done: Any, cell: Cell, others: Sequence[Any], launch: Launch) -> None:
    """Reports the end of a cell; if it failed, stops the others and raises."""
    try:
        problem, hint = ray.get(done)
    except ray.exceptions.RayTaskError as error:  # raised by the run itself: not tried again
        reason = error if error.cause is None else error.cause
        problem = f"{type(reason).__name__}: {str(reason).strip() or 'no message'}"
        hint = f"Its folder: {cell.folder}"
    except ray.exceptions.RayError as error:
        problem = str(error).strip().splitlines()[0]
        hint = "Its machine or process died; run the same command again."
    if not problem and cell.state() != "finished":
        problem = f"it ended on a machine that does not share {cell.folder} with this one"
        hint = "Give an output folder on storage that every machine of the cluster sees."
    try:
        launch.settle(cell, problem, hint)
    except FedGuildError:
        for other in others:
            ray.cancel(other, force=True)
        raise
    if not problem:
        launch.tell(f"{cell.title}: finished")


def _in_a_worker(folder: str, resolved_yaml: str, threads: int) -> tuple[str, str]:
    """Runs or resumes one cell in a Ray worker; returns the error and the hint, both empty on success."""
    import torch
    import yaml

    torch.set_num_threads(threads)
    try:
        _run_or_resume(Config.model_validate(yaml.safe_load(resolved_yaml)), Path(folder))
    except FedGuildError as error:
        return error.message, error.hint
    return "", ""
