"""Comparing configs over seeds, or a table that ships with FedGuild."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedguild.api.cells import (
    Cell,
    Column,
    ProgressOf,
    Tell,
    complete,
    plan_cells,
    plan_table,
    say_nothing,
    silent,
    write_plan,
)
from fedguild.api.inputs import Inputs, gather
from fedguild.config import ShippedTable, Table, table_cells, tables
from fedguild.config.table import ONLY_COLUMN
from fedguild.errors import ConfigError, nearest
from fedguild.results import Comparison

if TYPE_CHECKING:
    from fedguild.api.inputs import Dataset, Partition
    from fedguild.callbacks import Callback
    from fedguild.config.loading import Given
    from fedguild.evaluation.metrics import Metric
    from fedguild.runs.folder import Run

SEEDS = (0, 1, 2)


def compare(
    configs: str | Sequence[Given],
    *overrides: str,
    seeds: Sequence[int] | None = None,
    reference: str | None = None,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    output: str | Path | None = None,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Iterable[Callback] = (),
    jobs: int = 1,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    cores: int = 1,
    progress: ProgressOf = silent,
    tell: Tell = say_nothing,
) -> Comparison:
    """Runs several configs over several seeds, or a table that ships with FedGuild, and compares them.

    Every config and seed is a run in `output/NAME/seed-N` (`output/COLUMN/ROW/seed-N` in a table with columns).
    Finished runs are kept, unfinished ones are resumed: the same call continues after an interruption. A partition that
    is a function is known by its name only, so give another `output` after a change of it.

    Args:
        configs: Presets, files, mappings or configs; or the name of a table that `fedguild presets METHOD` lists.
        overrides: `key.sub=value`, for every config.
        seeds: The seeds; by default the table's, or 0, 1, 2.
        reference: The config or row that the others are compared with; by default the table's, or the last.
        rows: Rows of a table; all by default.
        columns: Columns of a table; all by default.
        output: Folder for all the runs; by default `runs/compare`, or `runs/TABLE` for a table.
        dataset: As in `run`, for every config.
        partition: As in `run`, for every config.
        metrics: As in `run`; with one job on the engine `local` only.
        callbacks: As in `run`; with one job on the engine `local` only.
        jobs: Runs at the same time, each in a process with its share of the CPU cores.
        engine: `local`: on this machine; `ray`: each run as a task of a Ray cluster.
        address: The Ray cluster; None to start Ray on this machine.
        cores: With `ray`, CPU cores of each run.
        progress: Returns the receiver of a run's progress reports by the run's title; with one job only.
        tell: Receives a line for each run that is finished.

    Raises:
        FedGuildError: a config, a row or a column is wrong, or a run failed; the others can be continued.

    Examples:
        >>> import fedguild
        >>> small = ["federation.clients=4", "federation.rounds=1", "training.steps=1", "evaluation.max_examples=2"]
        >>> comparison = fedguild.compare(
        ...     ["flame/tiny-tasks", "fedit/tiny-tasks-ranks"], *small, seeds=[0], output="runs/compared"
        ... )
        >>> frame = comparison.frame()
        >>> sorted(frame.row.unique()), list(frame.columns)
        (['fedit-tiny-tasks-ranks', 'flame-tiny-tasks'], ['row', 'score', 'seed', 'value', 'difference'])
    """
    from fedguild.callbacks import listed

    given = gather(dataset, partition, metrics)
    check_engine(engine, jobs)
    callbacks = listed(callbacks)
    content: Table | None = None
    if isinstance(configs, str):
        table = _table(configs)
        content = table.load()
        cells = table_cells(table.name, content, list(rows or ()), list(columns or ()))
        folder = Path(output) if output else default_folder(configs)
        groups = plan_table(cells, overrides, checked_seeds(content.seeds if seeds is None else seeds), folder, given)
        chosen = _row_reference(reference or content.reference, groups, asked=reference is not None)
        name = table.name
    else:
        if rows or columns:
            raise ConfigError(
                "Rows and columns choose from a table, but none is given.",
                f"Tables: {', '.join(table.name for table in tables())}.",
            )
        folder = Path(output) if output else default_folder(configs)
        planned = plan_cells(configs, overrides, checked_seeds(SEEDS if seeds is None else seeds), folder, given)
        groups = [Column("", folder, tuple(planned))]
        chosen = _reference_name(reference, planned)
        name = ""
    complete_all(
        groups,
        folder,
        given,
        callbacks,
        jobs=jobs,
        engine=engine,
        address=address,
        cores=cores,
        progress=progress,
        tell=tell,
    )
    return _compared(groups, chosen, name, content, folder)


def default_folder(configs: str | Sequence[Given]) -> Path:
    """Returns the folder of a comparison's runs where none is given: `runs/TABLE` of a table, else `runs/compare`."""
    return Path("runs") / configs.replace("/", "-") if isinstance(configs, str) else Path("runs/compare")


def is_table(name: object) -> bool:
    """Whether this is the name of a table that ships with FedGuild."""
    return any(table.name == name for table in tables())


def _compared(groups: Sequence[Column], reference: str, name: str, table: Table | None, folder: Path) -> Comparison:
    """Writes a page for each column, and the table's overview; returns the comparison."""
    from fedguild.report.comparison import compare as compared
    from fedguild.report.html import write_comparison
    from fedguild.report.overview import write_overview
    from fedguild.runs.folder import load_run

    by_column, pages = {}, {}
    runs = {cell.folder: load_run(cell.folder) for group in groups for cell in group.cells}
    drawn = _table_figures(groups, runs, table) if table else {}
    for group in groups:
        folders = group.folders()
        loaded = {row: [runs[one] for one in members] for row, members in folders.items()}
        by_column[group.title] = compared(loaded, reference)
        pages[group.title] = write_comparison(
            folders, group.folder, reference=reference, title=group.title or None, drawn=drawn
        )
    scores: Mapping[str, str] = table.scores if table else {}
    overview = write_overview(by_column, scores, name, folder) if table else None
    by_title = {group.title: group.folders() for group in groups}
    return Comparison(folder, by_column, by_title, pages, name, scores, overview)


def _table_figures(
    groups: Sequence[Column], runs: Mapping[Path, Run], table: Table
) -> dict[str, Callable[[float], str]]:
    """Returns a table's figures of the comparison's own runs: caption -> what draws the figure at a width in inches.

    One for which a cell was not run is left out.
    """
    from fedguild.report.table_figures import CellScores, for_page

    if not table.drawn_scores and table.rounds is None:
        return {}
    scores = [
        CellScores.of(runs[cell.folder], cell.config.name, group.title or ONLY_COLUMN)
        for group in groups
        for cell in group.cells
    ]
    return for_page(table, scores)


def _table(name: str) -> ShippedTable:
    known = {table.name: table for table in tables()}
    if name not in known:
        raise ConfigError(
            f"There is no table '{name}'.", f"{nearest(name, known)} To compare configs, give them as a list."
        )
    return known[name]


def complete_all(
    columns: Sequence[Column],
    folder: Path,
    given: Inputs,
    callbacks: Sequence[Callback],
    *,
    jobs: int,
    engine: str,
    address: str | None,
    cores: int,
    progress: ProgressOf,
    tell: Tell,
    may_diverge: bool = False,
) -> None:
    """Completes the runs of a comparison or a sweep on this machine or on a Ray cluster, after writing which they are.

    Args:
        columns: The runs.
        folder: The folder of all of them.
        given: What was given in Python.
        callbacks: As in `compare`, like all that follow but the last.
        jobs: Runs at the same time.
        engine: `local` or `ray`.
        address: The Ray cluster.
        cores: With `ray`, CPU cores of each run.
        progress: Returns the receiver of a run's progress reports.
        tell: Receives a line for each run that is finished.
        may_diverge: Whether a run that diverges is told and left.

    Raises:
        ConfigError: functions were given, which other processes lack.
        FedGuildError: a run failed.
    """
    cells = [cell for column in columns for cell in column.cells]
    if engine == "ray":
        from fedguild.api.ray_cells import complete_on_ray

        _require_no_functions(given, callbacks, "on Ray")
        write_plan(columns, folder)
        complete_on_ray(cells, address, cores, tell, may_diverge=may_diverge)
    else:
        if jobs > 1:
            _require_no_functions(given, callbacks, "with more than one job")
        write_plan(columns, folder)
        complete(cells, jobs, tell=tell, progress=progress, callbacks=callbacks, may_diverge=may_diverge)


def _require_no_functions(given: Inputs, callbacks: Iterable[Callback], where: str) -> None:
    """Raises ConfigError if functions were given where other processes, which lack them, run the cells."""
    if given.metrics or tuple(callbacks):
        raise ConfigError(
            f"Metrics and callbacks that are given in Python cannot be used {where}: other processes lack them.",
            "Use one job on this machine, or install them as plug-ins (docs/guides/plug-ins.md).",
        )


def check_engine(engine: str, jobs: int) -> None:
    """Raises ConfigError if there is no such engine for a comparison's runs, or no run could go on."""
    if engine not in ("local", "ray"):
        raise ConfigError(f"There is no engine '{engine}' for several runs.", "Known: local, ray.")
    if jobs < 1:
        raise ConfigError(f"At least one run goes on at a time, but jobs is {jobs}.")


def checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Returns the seeds; raises ConfigError if there are none, they are no sequence, or one is given twice."""
    if not isinstance(seeds, Iterable) or not (seeds := tuple(seeds)):
        raise ConfigError(f"seeds takes a sequence of whole numbers, got {seeds!r}.", "For example seeds=[0, 1, 2].")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"A seed is given twice: {', '.join(map(str, seeds))}.")
    return seeds


def _reference_name(reference: str | None, cells: Sequence[Cell]) -> str:
    """Returns the run name that a reference means, which may be given as the configs were."""
    names = {cell.given: cell.config.name for cell in cells} | {cell.config.name: cell.config.name for cell in cells}
    if reference is None:
        return cells[-1].config.name
    if reference not in names:
        raise ConfigError(f"The reference '{reference}' is not one of the compared configs.", nearest(reference, names))
    return names[reference]


def _row_reference(reference: str, groups: Sequence[Column], *, asked: bool) -> str:
    """Returns the row that the others are compared with; the last of those wanted where the table's own is not."""
    names = groups[0].names
    if reference in names:
        return reference
    if asked:
        raise ConfigError(f"The reference '{reference}' is not one of the compared rows.", nearest(reference, names))
    return names[-1]
