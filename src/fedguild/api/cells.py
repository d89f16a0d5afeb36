"""The cells of a comparison: one run for every config and seed, one at a time or several in parallel."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedguild.api.inputs import Inputs
from fedguild.config import Config, TableCell, load_config
from fedguild.config.loading import Given
from fedguild.config.table import ONLY_COLUMN
from fedguild.errors import ConfigError, DivergedError, FedGuildError
from fedguild.files import write_json, write_text
from fedguild.heap import give_back_freed_pages
from fedguild.layout import CONFIG
from fedguild.progress import Progress, Silent
from fedguild.results import divergence

if TYPE_CHECKING:
    from fedguild.callbacks import Callback

_OWN_SETTINGS = {"seed": "seeds", "output": "output"}
"""Setting of a run -> the option that sets it for the runs of a comparison or a sweep."""
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
class Cell:
    """One config at one seed, and the folder of its run.

    Attributes:
        given: The config as it was given, for the reference; empty if not as a name.
        config: The config.
        folder: The run's folder.
        inputs: What else was given in Python.
    """

    given: str
    config: Config
    folder: Path
    inputs: Inputs = field(default_factory=Inputs)

    @property
    def config_to_run(self) -> Config:
        """The config as it runs: in trackers, the runs of a comparison are a group, and each has its own name."""
        from fedguild.tracking.sending import for_comparison

        return for_comparison(self.config, self.folder.absolute().parents[1].name)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.config.name} seed {self.config.seed}"

    def state(self) -> Literal["absent", "partial", "finished"]:
        """Returns the progress of the run in the folder.

        Raises:
            ConfigError: the folder holds a run with other settings.
        """
        from fedguild.layout import CHECKPOINTS, STOPPED
        from fedguild.results import has_begun
        from fedguild.runs.index import REPORT_FILE
        from fedguild.server import checkpoint

        if not has_begun(self.folder):
            return "absent"
        written = self.folder / CONFIG
        if load_config(str(written)).fingerprint() != self.config.fingerprint():
            raise ConfigError(
                f"{self.folder} holds a run with settings other than {self.config.name}, seed {self.config.seed}.",
                "Give another --output, or remove that folder.",
            )
        last = checkpoint.latest(self.folder / CHECKPOINTS)
        ended = last == self.config.federation.rounds or (self.folder / STOPPED).is_file()
        finished = ended and (self.folder / REPORT_FILE).is_file()
        return "finished" if finished else "partial"


def refuse_own_settings(overrides: Sequence[str], what: str) -> None:
    """Refuses settings that every run of several has its own of, since given for all of them they would do nothing.

    Args:
        overrides: The settings for all runs.
        what: What the runs belong to, for the message.

    Raises:
        ConfigError: `seed` or `output` is among them.
    """
    for key, _, value in (str(text).partition("=") for text in overrides):
        if key.strip() in _OWN_SETTINGS:
            option = _OWN_SETTINGS[key.strip()]
            raise ConfigError(
                f"{key.strip()}={value} is a setting of one run, and {what} has several.",
                f"Give --{option} {value}, or in Python `{option}`.",
            )


def plan_cells(
    configs: Sequence[Given], overrides: Sequence[str], seeds: Sequence[int], output: Path, inputs: Inputs | None = None
) -> list[Cell]:
    """Returns a cell for every config and seed, configs in the order given, seeds within.

    Args:
        configs: The configs.
        overrides: Settings that override those of each of them.
        seeds: The seeds.
        output: Parent folder of the cells' folders.
        inputs: What else was given in Python, for all cells.

    Raises:
        ConfigError: there is no config, one or a method's options are wrong, two have the same name, or a seed or a
            folder is among the settings.
    """
    if not configs:
        raise ConfigError(
            "There is no config to compare.",
            "Give presets or YAML files: `fedguild presets` lists those that ship.",
        )
    refuse_own_settings(overrides, "a comparison")
    inputs = inputs or Inputs()
    cells = []
    for given in configs:
        for seed in seeds:
            config = require_fit(inputs.config(given, [*overrides, f"seed={seed}"]))
            name = str(given) if isinstance(given, (str, Path)) else ""
            cells.append(Cell(name, config, output / config.name / f"seed-{seed}", inputs))
    folders = [cell.folder for cell in cells]
    repeated = next((cell.config.name for cell in cells if folders.count(cell.folder) > 1), None)
    if repeated is not None:
        raise ConfigError(f"Two of the configs are named '{repeated}'.", "Give each its own `name`.")
    return cells


@dataclass(frozen=True)
class Column:
    """Cells whose scores form one table.

    Attributes:
        title: A table's column; empty where there is only one.
        folder: Parent folder of the cells' folders.
        cells: The cells.
    """

    title: str
    folder: Path
    cells: tuple[Cell, ...]

    @property
    def names(self) -> list[str]:
        """The names of the compared configs, in their order."""
        return list(dict.fromkeys(cell.config.name for cell in self.cells))

    def folders(self) -> dict[str, list[Path]]:
        """Returns the folders of every config's runs."""
        return {name: [cell.folder for cell in self.cells if cell.config.name == name] for name in self.names}


def plan_table(
    cells: Sequence[TableCell],
    overrides: Sequence[str],
    seeds: Sequence[int],
    output: Path,
    inputs: Inputs | None = None,
) -> list[Column]:
    """Returns a comparison for every column of a table, in the order of its cells.

    Raises:
        ConfigError: a cell's config, or an option of its method, is wrong.
    """
    refuse_own_settings(overrides, "a comparison")
    inputs = inputs or Inputs()
    columns = list(dict.fromkeys(cell.column for cell in cells))
    comparisons = []
    for column in columns:
        folder = output if columns == [ONLY_COLUMN] else output / column
        runs = [
            Cell(cell.preset, config, folder / config.name / f"seed-{seed}", inputs)
            for cell in cells
            if cell.column == column
            for seed in seeds
            for config in [require_fit(inputs.config(cell.preset, [*overrides, f"seed={seed}"], between=cell.layers))]
        ]
        comparisons.append(Column("" if columns == [ONLY_COLUMN] else column, folder, tuple(runs)))
    return comparisons


def write_plan(columns: Sequence[Column], folder: Path) -> None:
    """Writes which runs a comparison consists of, so that a page can show those that have not begun."""
    from fedguild.runs.index import PLAN_FILE

    cells = [
        {
            "row": cell.config.name,
            "column": column.title,
            "seed": cell.config.seed,
            "folder": cell.folder.relative_to(folder).as_posix(),
        }
        for column in columns
        for cell in column.cells
    ]
    write_json(folder / PLAN_FILE, {"cells": cells})


def require_fit(config: Config) -> Config:
    """Returns a config whose method takes its options and fits; a row that does not is reported before others run.

    Raises:
        ModelError, ConfigError: the method or one of its options is unknown, out of range, or does not fit.
    """
    from fedguild.setup import check_config
    from fedguild.tracking import check_trackers

    check_config(config)
    check_trackers(config.tracking.trackers)
    return config


def complete(
    cells: Sequence[Cell],
    jobs: int = 1,
    *,
    tell: Tell = say_nothing,
    progress: ProgressOf = silent,
    callbacks: Iterable[Callback] = (),
    may_diverge: bool = False,
) -> None:
    """Completes every cell: runs absent ones, resumes partial ones, keeps finished ones.

    Args:
        cells: The cells.
        jobs: How many run at the same time; if more than one, each in its own process.
        tell: Receives a line for each finished cell, and what the processes say.
        progress: Returns the receiver of a cell's progress reports, where it runs in this process.
        callbacks: Receivers of the events of each run in this process.
        may_diverge: Whether a cell whose training diverges is told and left, now and when it is met again.

    Raises:
        FedGuildError: a run failed; those that were under way have been stopped and can be resumed.
    """
    open_cells = still_open(cells, tell, may_diverge=may_diverge)
    if jobs == 1:
        for cell in open_cells:
            try:
                _complete_here(cell, progress, tuple(callbacks))
            except DivergedError as error:
                if not may_diverge:
                    raise
                tell(f"{cell.title}: {error.message}")
    else:
        hand_over(open_cells)
        _Workers(jobs, tell, may_diverge=may_diverge).complete(open_cells)


def still_open(cells: Iterable[Cell], tell: Tell, *, may_diverge: bool = False) -> list[Cell]:
    """Returns the cells that are to be run, after a line about each of the others."""
    left = []
    for cell in cells:
        if cell.state() == "finished":
            tell(f"{cell.title}: already finished")
        elif may_diverge and cell.state() == "partial" and divergence(cell.folder):
            tell(f"{cell.title}: diverged before; remove {cell.folder} to try it again")
        else:
            left.append(cell)
    return left


def _complete_here(cell: Cell, progress: ProgressOf, callbacks: tuple[Callback, ...]) -> None:
    from fedguild import experiment

    preparation = cell.inputs.preparation()
    with progress(cell.title) as receiver:
        if cell.state() == "partial":
            experiment.resume(cell.folder, progress=receiver, preparation=preparation, callbacks=callbacks)
        else:
            experiment.run(
                cell.config_to_run, cell.folder, progress=receiver, preparation=preparation, callbacks=callbacks
            )
    give_back_freed_pages()


def hand_over(cells: Iterable[Cell]) -> None:
    """Writes the data and the partition that were given in Python where another process finds them.

    Raises:
        DataError: the partition does not fit the data.
    """
    for cell in cells:
        if cell.inputs.data is not None and cell.state() == "absent":
            from fedguild.setup import prepare_data

            cell.inputs.data.write(cell.folder)
            prepare_data(cell.config, cell.folder, cell.inputs.data)


class _Workers:
    """Processes that each run a cell with an equal share of the cores."""

    def __init__(self, jobs: int, tell: Tell, *, may_diverge: bool = False) -> None:
        self._jobs = jobs
        self._tell = tell
        self._may_diverge = may_diverge
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = threading.Event()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // jobs))}

    def complete(self, cells: Sequence[Cell]) -> None:
        with ThreadPoolExecutor(self._jobs) as threads:
            waiting = [threads.submit(self._complete, cell) for cell in cells]
            try:
                for cell in waiting:
                    cell.result()
            except BaseException:
                self._stopped.set()
                for process in list(self._running):
                    process.terminate()
                raise

    def _complete(self, cell: Cell) -> None:
        if self._stopped.is_set():
            return
        process = subprocess.Popen(
            _command(cell), env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._running.add(process)
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip())
            self._tell(f"{cell.title}: {line.rstrip()}")
        self._running.discard(process)
        failed = process.wait() != 0 and not self._stopped.is_set()
        if failed and not (self._may_diverge and divergence(cell.folder)):
            problem = next((line for line in lines if line.startswith("Error: ")), lines[-1] if lines else "no message")
            raise FedGuildError(f"{cell.title} failed: {problem.removeprefix('Error: ')}", f"Its folder: {cell.folder}")


def _command(cell: Cell) -> list[str]:
    """Returns the command that runs or resumes a cell; a new one's config is written beside its folder."""
    fedguild = [sys.executable, "-m", "fedguild"]
    if cell.state() == "partial":
        return [*fedguild, "resume", str(cell.folder)]
    config = cell.folder.with_suffix(".yaml")
    write_text(config, cell.config_to_run.resolved_yaml())
    return [*fedguild, "run", str(config), "--output", str(cell.folder)]
