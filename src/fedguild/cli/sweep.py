"""`fedguild sweep`: one config with every combination of some settings, over several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fedguild
from fedguild.cli.compare import CellEngine, parsed_seeds
from fedguild.cli.options import ConfigArgument, JsonOption
from fedguild.cli.output import note, show, show_json
from fedguild.cli.progress import TerminalProgress
from fedguild.cli.watch import WatchOption, watching
from fedguild.config import load_config

EXAMPLES = (
    "fedguild sweep flame/tiny-tasks method.rank=4,8,16 training.learning_rate=1e-3,5e-3 --seeds 0,1,2",
    "fedguild sweep mine.yaml training.learning_rate=1e-4,3e-4,1e-3 federation.rounds=20 --jobs 2",
    "fedguild sweep mine.yaml 'method.targets=[attention],[attention,experts]' --seeds 0,1",
)


def command(
    context: typer.Context,
    config: ConfigArgument,
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE[,VALUE...]",
            help="Settings: one value for all runs, or several to sweep, separated by commas outside of brackets, "
            "braces and quotes.",
            show_default=False,
        ),
    ],
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds, separated by commas.")] = "0,1,2",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for all the runs; by default runs/sweep-NAME.", metavar="PATH"),
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
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run every combination of some settings over several seeds, and mark the best by its validation score.

    Every combination and seed is a run in OUTPUT/SETTING/seed-N. Finished runs are kept, unfinished ones are resumed,
    so the same command continues after an interruption, and one with more values or seeds adds to what is there. The
    runs are scored on validation examples unless evaluation.split says otherwise.
    """
    context.obj.resume_with = "the same command again"
    chosen = parsed_seeds(seeds) or ()
    from fedguild.api.sweeping import default_folder, divide

    folder = output or default_folder(load_config(config, divide(overrides)[0]))
    with watching(folder, on=watch):
        found = fedguild.sweep(
            config,
            *overrides,
            seeds=chosen,
            output=folder,
            jobs=jobs,
            engine=engine.value,
            address=address,
            cores=cores,
            progress=lambda title: TerminalProgress(title=title),
            tell=note,
        )
    if as_json:
        show_json({**found.table.to_json(), "folder": str(found.folder), "page": str(found.page)})
    else:
        show(found.table.grid().to_rich())
    for sentence in found.table.sentences():
        note(sentence)
    for warning in found.table.warnings:
        note(f"Warning: {warning}")
    note(f"Report: {found.page}")
