"""`fedguild compare`: several configs over several seeds, or a built-in table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fedguild
from fedguild.cli.options import (
    AddressOption,
    CoresOption,
    JobsOption,
    JsonOption,
    Launcher,
    LauncherOption,
    is_setting,
    parsed_seeds,
)
from fedguild.cli.output import errors, note, show_grids, show_json
from fedguild.cli.watch import WatchOption, watching
from fedguild.core.errors import ConfigError
from fedguild.runs.terminal import TerminalProgress

if TYPE_CHECKING:
    from fedguild.runs.results import Comparison

EXAMPLES = (
    "fedguild compare flame/tiny-tasks fedit/tiny-tasks-ranks --seeds 0,1,2",
    "fedguild compare flame/tiny-dolly fedit/tiny-dolly data.train=dolly.jsonl --output runs/dolly",
    "fedguild compare ub-smoe/table-4-tiny --jobs 2",
    "fedguild compare ub-smoe/table-4 --launcher ray --address auto --output /shared/table-4",
    "fedguild compare flame/table-2 --rows flame,trivial --columns dolly-0.5 --seeds 0 data.train=dolly.jsonl",
)


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
    jobs: JobsOption = 1,
    launcher: LauncherOption = Launcher.LOCAL,
    address: AddressOption = None,
    cores: CoresOption = 1,
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run several configs over several seeds and print a paper's table.

    Every config and seed is a run in OUTPUT/NAME/seed-N (OUTPUT/COLUMN/ROW/seed-N in a table with columns). Finished
    runs are kept, unfinished ones are resumed, so the same command continues after an interruption.
    `fedguild presets METHOD` lists a method's tables.
    """
    context.obj.resume_with = "the same command again"
    overrides = [text for text in configs if is_setting(text)]
    names = [text for text in configs if not is_setting(text)]
    from fedguild.runs.api.comparing import default_folder, is_table

    table = next((name for name in names if is_table(name)), None)
    if table is not None and len(names) > 1:
        raise ConfigError(f"{table} is a table: give it alone, followed only by settings for every cell.")
    chosen = parsed_seeds(seeds)
    folder = output or default_folder(table or names)
    with watching(folder, on=watch):
        comparison = fedguild.compare(
            table or names,
            *overrides,
            seeds=chosen,
            reference=reference,
            rows=_parts(rows),
            columns=_parts(columns),
            output=folder,
            jobs=jobs,
            launcher=launcher.value,
            address=address,
            cores=cores,
            progress=lambda title: TerminalProgress(errors, title),
            tell=note,
        )
    _show(comparison, as_json)


def _show(comparison: Comparison, as_json: bool) -> None:
    from fedguild.report.overview import adds_to, overview

    by_column = comparison.tables
    several = len(by_column) > 1
    if as_json:
        answers = {
            column: {**table.to_json(), "differing": comparison.differing(column).to_dict("index")}
            for column, table in by_column.items()
        }
        show_json(answers if several else next(iter(answers.values())))
    else:
        for column, table in by_column.items():
            note(f"\n{column}" if column else "")
            show_grids(*([table.score_grid()] if several else table.grids()))
        if differing := comparison.differing_grid():
            show_grids(differing)
        else:
            note("All settings besides the method are the same.")
        if comparison.name and adds_to(by_column, comparison.scores):
            show_grids(overview(by_column, comparison.scores, comparison.name))
    note(f"Tables: {comparison.overview}, table.tex and table.csv")
    for warning in comparison.warnings:
        note(f"Warning: {warning}")
    for page in comparison.pages.values():
        note(f"Report: {page}")


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []
