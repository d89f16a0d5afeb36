"""`fedguild compare`: several configs over several seeds, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedguild.cli.cells import Cell, complete, plan_cells
from fedguild.cli.options import JsonOption
from fedguild.cli.output import note, show, show_json
from fedguild.errors import ConfigError, nearest

EXAMPLES = (
    "fedguild compare flame/tiny-tasks fedit/tiny-tasks-ranks --seeds 0,1,2",
    "fedguild compare flame/tiny-dolly fedit/tiny-dolly data.train=dolly.jsonl --output runs/dolly",
)


def command(
    context: typer.Context,
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|KEY=VALUE",
            help="Presets or YAML files, then settings on top of each of them.",
            show_default=False,
        ),
    ],
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds, separated by commas.")] = "0,1,2",
    reference: Annotated[
        str | None, typer.Option("--reference", help="Config that the others are compared with; the last by default.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of all the runs.")] = Path("runs/compare"),
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs", "-j", min=1, help="Runs at the same time, each in a process with its share of the CPU cores."
        ),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run several configs over several seeds and print a paper's table.

    Every config and seed is a run in OUTPUT/NAME/seed-N. Finished runs are kept, half-finished
    ones are resumed, so the same command goes on after an interruption.
    """
    cells = plan_cells(configs, _parsed_seeds(seeds), output)
    names = list(dict.fromkeys(cell.config.name for cell in cells))
    reference_name = _reference_name(reference, cells)
    context.obj.resume_with = "the same command again"

    from fedguild.report.comparison import compare
    from fedguild.report.html import write_comparison
    from fedguild.report.record import load_run

    complete(cells, jobs)
    folders = {name: [cell.folder for cell in cells if cell.config.name == name] for name in names}
    table = compare({name: [load_run(folder) for folder in folders[name]] for name in names}, reference_name)
    page = write_comparison(folders, output, reference=reference_name)
    if as_json:
        show_json(table.to_json())
    else:
        show(table.score_grid().to_rich(), table.cost_grid().to_rich())
    for warning in table.warnings:
        note(f"Careful: {warning}")
    note(f"Report: {page}")


def _parsed_seeds(text: str) -> tuple[int, ...]:
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
        raise ConfigError(f"The reference '{reference}' is none of the compared configs.", nearest(reference, names))
    return names[reference]
