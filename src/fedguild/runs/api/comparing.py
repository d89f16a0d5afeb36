"""Comparing configs over seeds, or a built-in table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedguild.config import ShippedTable, Table, table_cells, tables
from fedguild.config.renamed import answers_old_arguments
from fedguild.config.table import ONLY_COLUMN
from fedguild.core.errors import CheckpointError, ConfigError, nearest
from fedguild.measuring.log.index import COMPARISON_FILE, PLAN_FILE, read_plan
from fedguild.runs.api.inputs import gather
from fedguild.runs.api.launch import Launch, ProgressOf, Tell, say_nothing, silent
from fedguild.runs.api.run_grid import SEEDS, Row, RunGrid, plan_grid, table_rows
from fedguild.runs.results import Comparison

if TYPE_CHECKING:
    from fedguild.config.loading import Given, Override
    from fedguild.measuring.log.folder import Run
    from fedguild.measuring.scores.metrics import Metric
    from fedguild.report.style import Svg
    from fedguild.runs.api.inputs import Dataset, Partition
    from fedguild.runs.callbacks import Callback


@answers_old_arguments
def compare(
    configs: str | Sequence[Given],
    *overrides: Override,
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
    launcher: Literal["local", "ray"] = "local",
    address: str | None = None,
    cores: int = 1,
    progress: ProgressOf = silent,
    tell: Tell = say_nothing,
    **settings: Any,
) -> Comparison:
    """Runs several configs over several seeds, or a built-in table, and compares them.

    Every config and seed is a run in `output/NAME/seed-N` (`output/COLUMN/ROW/seed-N` in a table with columns).
    Finished runs are kept, unfinished ones are resumed: the same call continues after an interruption. A function given
    as the partition is identified by its name only, so use another `output` after changing it.

    Args:
        configs: Presets, files, mappings or configs; or the name of a table that `fedguild presets METHOD` lists.
        overrides: As in `run`, for every config.
        seeds: The seeds; by default the table's, or 0, 1, 2.
        reference: The config or row that the others are compared with; by default the table's, or the last.
        rows: Rows of a table; all by default.
        columns: Columns of a table; all by default.
        output: Folder for all the runs; by default `runs/compare`, or `runs/TABLE` for a table.
        dataset: As in `run`, for every config.
        partition: As in `run`, for every config.
        metrics: As in `run`; with one job and the launcher `local` only.
        callbacks: As in `run`; with one job and the launcher `local` only.
        jobs: Runs at the same time, each in a process with its share of the CPU cores.
        launcher: `local`: on this machine; `ray`: each run as a task of a Ray cluster.
        address: The Ray cluster; None to start Ray on this machine.
        cores: With `ray`, CPU cores of each run.
        progress: Returns the receiver of a run's progress reports by the run's title; with one job only.
        tell: Receives a line for each run that is finished.
        settings: As in `run`, for every config.

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
        (['fedit-tiny-tasks-ranks', 'flame-tiny-tasks'], ['row', 'score', 'metric', 'seed', 'value', 'difference'])
    """
    overrides = (*overrides, settings) if settings else overrides
    given = gather(dataset, partition, metrics, callbacks)
    launch = Launch(jobs, launcher, address, cores, progress, tell)
    folder = Path(output) if output else default_folder(configs)
    content: Table | None = None
    if isinstance(configs, str):
        content = _table(configs).load()
        wanted = table_rows(table_cells(configs, content, list(rows or ()), list(columns or ())))
        grid = plan_grid(wanted, content.seeds if seeds is None else seeds, folder, overrides, given)
    else:
        if rows or columns:
            raise ConfigError(
                "Rows and columns choose from a table, but none is given.",
                f"Tables: {', '.join(table.name for table in tables())}.",
            )
        if not configs:
            raise ConfigError(
                "There is no config to compare.",
                "Give presets or YAML files: `fedguild presets` lists those that ship.",
            )
        grid = plan_grid([Row(one) for one in configs], SEEDS if seeds is None else seeds, folder, overrides, given)
    name = configs if isinstance(configs, str) else ""
    grid = replace(grid, reference=_reference(reference, grid, content), table=name)
    launch.complete(grid)
    return _compared(grid, content)


def default_folder(configs: str | Sequence[Given]) -> Path:
    return Path("runs") / configs.replace("/", "-") if isinstance(configs, str) else Path("runs/compare")


def is_table(name: object) -> bool:
    """Whether this is the name of a built-in table."""
    return any(table.name == name for table in tables())


def load_comparison(folder: str | Path) -> Comparison:
    """Returns a comparison from its folder, with the runs that have a score, without running or loading anything.

    Args:
        folder: The folder that `compare` or `fedguild compare` wrote; its runs may be in progress.

    Raises:
        CheckpointError: the folder is not that of a comparison, or a run's files are damaged.
        ConfigError: a row has no run with a score yet.

    Examples:
        >>> import fedguild
        >>> fedguild.load_comparison("runs/compared").tables[""].reference
        'fedit-tiny-tasks-ranks'
    """
    from fedguild.measuring.log.folder import has_scores, load_run
    from fedguild.report.comparison import compare as compared
    from fedguild.report.overview import MARKDOWN_FILE

    folder = Path(folder)
    plan = read_plan(folder)
    if not plan.cells:
        raise CheckpointError(
            f"{folder} is not the folder of a comparison: it has no {PLAN_FILE}.",
            "Give the folder that `fedguild compare` wrote, for example runs/compare.",
        )
    runs: dict[str, dict[str, list[Path]]] = {}
    for cell in plan.cells:
        members = runs.setdefault(cell["column"], {}).setdefault(cell["row"], [])
        members += [folder / cell["folder"]] if has_scores(folder / cell["folder"]) else []
    tables = {
        column: compared({row: [load_run(one) for one in members] for row, members in rows.items()}, plan.reference)
        for column, rows in runs.items()
    }
    scores = _table(plan.table).load().scores if is_table(plan.table) else {}
    pages = {column: folder / column / COMPARISON_FILE for column in runs}
    return Comparison(folder, tables, runs, pages, plan.table, scores, folder / MARKDOWN_FILE)


def _compared(grid: RunGrid, table: Table | None) -> Comparison:
    """Writes a page for each column, and the tables as text, LaTeX and CSV; returns the comparison."""
    from fedguild.core.files import write_text
    from fedguild.measuring.log.folder import load_run
    from fedguild.report.comparison import compare as compared
    from fedguild.report.html import write_comparison
    from fedguild.report.overview import CSV_FILE, write_tables

    runs = {cell.folder: load_run(cell.folder) for cell in grid.cells}
    folders = {
        column: {row: [cell.folder for cell in cells] for row, cells in grid.rows(column).items()}
        for column in grid.columns
    }
    drawn = _table_figures(grid, runs, table) if table else {}
    by_column, pages = {}, {}
    for column, rows in folders.items():
        of_column = {row: [runs[one] for one in members] for row, members in rows.items()}
        by_column[column] = compared(of_column, grid.reference)
        pages[column] = write_comparison(
            rows, grid.folder / column, reference=grid.reference, title=column or None, drawn=drawn
        )
    scores: Mapping[str, str] = table.scores if table else {}
    overview = write_tables(by_column, scores, grid.table, grid.folder)
    comparison = Comparison(grid.folder, by_column, folders, pages, grid.table, scores, overview)
    write_text(grid.folder / CSV_FILE, comparison.frame().to_csv(index=False))
    return comparison


def _table_figures(grid: RunGrid, runs: Mapping[Path, Run], table: Table) -> dict[str, Callable[[float], Svg]]:
    """Returns the figures of a table from the comparison's own runs: caption -> function of a width in inches.

    A figure that needs a cell which was not run is left out.
    """
    from fedguild.report.table_figures import CellScores, for_page

    if not table.drawn_scores and table.rounds is None:
        return {}
    scores = [CellScores.of(runs[cell.folder], cell.config.name, cell.row.column or ONLY_COLUMN) for cell in grid.cells]
    return for_page(table, scores)


def _table(name: str) -> ShippedTable:
    known = {table.name: table for table in tables()}
    if name not in known:
        raise ConfigError(
            f"There is no table '{name}'.", f"{nearest(name, known)} To compare configs, give them as a list."
        )
    return known[name]


def _reference(asked: str | None, grid: RunGrid, table: Table | None) -> str:
    """Returns the row that the others are compared with: the one asked for, the table's own, or the last.

    A config may be given as it was passed, or by its name.

    Raises:
        ConfigError: there is no such row.
    """
    names = [cell.config.name for cell in grid.cells]
    if asked is None:
        return table.reference if table and table.reference in names else names[-1]
    known = {} if table else {str(cell.row.given): cell.config.name for cell in grid.cells}
    known |= dict(zip(names, names, strict=True))
    if asked not in known:
        what = "configs" if table is None else "rows"
        raise ConfigError(f"The reference '{asked}' is not one of the compared {what}.", nearest(asked, known))
    return known[asked]
