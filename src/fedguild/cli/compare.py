"""`fedguild compare`: several configs over several seeds, or a table that ships with FedGuild."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedguild.cli.cells import Cell, Comparison, complete, plan_cells, plan_table
from fedguild.cli.options import JsonOption
from fedguild.cli.output import note, show, show_json
from fedguild.config import ShippedTable, table_cells, tables
from fedguild.errors import ConfigError, nearest

EXAMPLES = (
    "fedguild compare flame/tiny-tasks fedit/tiny-tasks-ranks --seeds 0,1,2",
    "fedguild compare flame/tiny-dolly fedit/tiny-dolly data.train=dolly.jsonl --output runs/dolly",
    "fedguild compare ub-smoe/table-4-tiny --jobs 2",
    "fedguild compare ub-smoe/table-4 --engine ray --address auto --output /shared/table-4",
    "fedguild compare flame/table-2 --rows flame,trivial --columns dolly-0.5 --seeds 0 data.train=dolly.jsonl",
)
SEEDS = (0, 1, 2)


class CellEngine(StrEnum):
    """Engine that executes the runs of a comparison."""

    LOCAL = "local"
    RAY = "ray"


def command(
    context: typer.Context,
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|TABLE|KEY=VALUE",
            help="Presets or YAML files, or a table that ships with FedGuild, then settings that override theirs.",
            show_default=False,
        ),
    ],
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="Seeds, separated by commas; by default the table's, or 0,1,2.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference", help="Config or row that the others are compared with; by default the table's, or the last."
        ),
    ] = None,
    rows: Annotated[str | None, typer.Option("--rows", help="Rows of the table, separated by commas.")] = None,
    columns: Annotated[str | None, typer.Option("--columns", help="Columns of the table, separated by commas.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for all the runs; by default runs/compare, or runs/TABLE for a table.",
            metavar="PATH",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs", "-j", min=1, help="Runs at the same time, each in a process with its share of the CPU cores."
        ),
    ] = 1,
    engine: Annotated[
        CellEngine, typer.Option("--engine", help="local: on this machine; ray: each run as a task of a Ray cluster.")
    ] = CellEngine.LOCAL,
    address: Annotated[
        str | None,
        typer.Option("--address", help="The Ray cluster, for example auto; by default Ray is started on this machine."),
    ] = None,
    cores: Annotated[int, typer.Option("--cores", min=1, help="With ray: CPU cores of each run.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run several configs over several seeds and print a paper's table.

    Every config and seed is a run in OUTPUT/NAME/seed-N (OUTPUT/COLUMN/ROW/seed-N in a table with columns). Finished
    runs are kept, unfinished ones are resumed, so the same command continues after an interruption.
    `fedguild presets` lists the tables that ship with FedGuild.
    """
    context.obj.resume_with = "the same command again"
    table = _table_among(configs)
    if table is None:
        if rows or columns:
            raise ConfigError("--rows and --columns choose from a table, but none is given.", _known_tables())
        folder = output or Path("runs/compare")
        cells = plan_cells(configs, _parsed_seeds(seeds) or SEEDS, folder)
        chosen = _reference_name(reference, cells)
        _complete(cells, jobs, engine, address, cores)
        _show([Comparison("", folder, tuple(cells))], chosen, as_json, None)
        return
    overrides = [text for text in configs if "=" in text]
    if len(configs) > len(overrides) + 1:
        raise ConfigError(f"{table.name} is a table: give it alone, followed only by settings for every cell.")
    content = table.load()
    wanted = table_cells(table.name, content, _parts(rows), _parts(columns))
    folder = output or Path("runs") / table.name.replace("/", "-")
    comparisons = plan_table(wanted, overrides, _parsed_seeds(seeds) or content.seeds, folder)
    chosen = _row_reference(reference or content.reference, comparisons, asked=reference is not None)
    _complete([cell for comparison in comparisons for cell in comparison.cells], jobs, engine, address, cores)
    _show(comparisons, chosen, as_json, Whole(table.name, content.scores, folder))


@dataclass(frozen=True)
class Whole:
    """The table whose columns are comparisons: its name, the score shown for each row, and its folder."""

    name: str
    scores: Mapping[str, str]
    folder: Path


def _complete(cells: Sequence[Cell], jobs: int, engine: CellEngine, address: str | None, cores: int) -> None:
    """Completes every cell, here or on a Ray cluster."""
    if engine is CellEngine.RAY:
        from fedguild.cli.ray_cells import complete_on_ray

        complete_on_ray(cells, address, cores)
    else:
        complete(cells, jobs)


def _show(comparisons: Sequence[Comparison], reference: str, as_json: bool, whole: Whole | None) -> None:
    """Writes a page for each comparison and prints the tables."""
    from fedguild.report.comparison import compare
    from fedguild.report.html import write_comparison
    from fedguild.report.overview import adds_to, overview, write_overview
    from fedguild.report.run_folder import load_run

    by_column, pages = {}, []
    for comparison in comparisons:
        folders = comparison.folders()
        by_column[comparison.title] = compare(
            {name: [load_run(folder) for folder in folders[name]] for name in folders}, reference
        )
        pages.append(write_comparison(folders, comparison.folder, reference=reference, title=comparison.title or None))
    several = len(comparisons) > 1
    if as_json:
        answers = {column: table.to_json() for column, table in by_column.items()}
        show_json(answers if several else next(iter(answers.values())))
    else:
        for column, table in by_column.items():
            note(f"\n{column}" if column else "")
            show(table.score_grid().to_rich(), *([] if several else [table.cost_grid().to_rich()]))
        if whole and adds_to(by_column, whole.scores):
            show(overview(by_column, whole.scores, whole.name).to_rich())
    if whole:
        note(f"Table: {write_overview(by_column, whole.scores, whole.name, whole.folder)}")
    for column, table in by_column.items():
        for warning in table.warnings:
            note(f"Warning: {f'{column}: ' if column else ''}{warning}")
    for page in pages:
        note(f"Report: {page}")


def _table_among(configs: Sequence[str]) -> ShippedTable | None:
    known = {table.name: table for table in tables()}
    return next((known[name] for name in configs if name in known), None)


def _known_tables() -> str:
    return f"Tables: {', '.join(table.name for table in tables())}."


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _parsed_seeds(text: str | None) -> tuple[int, ...]:
    """Returns the seeds that an option names; none where it was not given."""
    if text is None:
        return ()
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--seeds takes whole numbers separated by commas, got '{text}'.") from error
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds names a seed twice: '{text}'.")
    return seeds


def _reference_name(reference: str | None, cells: Sequence[Cell]) -> str:
    """Returns the run name that a reference means, which may be given as on the command line."""
    names = {cell.given: cell.config.name for cell in cells} | {cell.config.name: cell.config.name for cell in cells}
    if reference is None:
        return cells[-1].config.name
    if reference not in names:
        raise ConfigError(f"The reference '{reference}' is not one of the compared configs.", nearest(reference, names))
    return names[reference]


def _row_reference(reference: str, comparisons: Sequence[Comparison], *, asked: bool) -> str:
    """Returns the row that the others are compared with; the last of those wanted where the table's own is not."""
    names = comparisons[0].names
    if reference in names:
        return reference
    if asked:
        raise ConfigError(f"The reference '{reference}' is not one of the compared rows.", nearest(reference, names))
    return names[-1]
