"""`fedguild sweep`: one config with every combination of some settings, over several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fedguild
from fedguild.cli.options import (
    AddressOption,
    ConfigArgument,
    CoresOption,
    JobsOption,
    JsonOption,
    Launcher,
    LauncherOption,
    config_and_settings,
    parsed_seeds,
)
from fedguild.cli.output import errors, note, show_grids, show_json
from fedguild.cli.watch import WatchOption, watching
from fedguild.config import load_config
from fedguild.runs.terminal import TerminalProgress

EXAMPLES = (
    "fedguild sweep flame/tiny-tasks method.rank=4,8,16 training.learning_rate=1e-3,5e-3 --seeds 0,1,2",
    "fedguild sweep mine.yaml training.learning_rate=1e-4,3e-4,1e-3 federation.rounds=20 --jobs 2",
    "fedguild sweep mine.yaml 'method.targets=[attention],[attention,experts]' --seeds 0,1",
)


def command(
    context: typer.Context,
    config: ConfigArgument = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE[,VALUE...]",
            help="Settings: one value for all runs, or several to sweep, separated by commas outside of brackets, "
            "braces and quotes.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds, separated by commas.")] = "0,1,2",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for all the runs; by default runs/sweep-NAME.", metavar="PATH"),
    ] = None,
    jobs: JobsOption = 1,
    launcher: LauncherOption = Launcher.LOCAL,
    address: AddressOption = None,
    cores: CoresOption = 1,
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run every combination of some settings over several seeds, and mark the best by its validation score.

    Every combination and seed is a run in OUTPUT/SETTING/seed-N. Finished runs are kept, unfinished ones are resumed,
    so the same command continues after an interruption, and one with more values or seeds adds to what is there. The
    runs are scored on validation examples unless evaluation.split says otherwise.
    """
    context.obj.resume_with = "the same command again"
    named, settings = config_and_settings(config, overrides)
    from fedguild.runs.api.sweeping import default_folder, divide

    folder = output or default_folder(load_config(named, divide(settings)[0]))
    with watching(folder, on=watch):
        found = fedguild.sweep(
            named,
            *settings,
            seeds=parsed_seeds(seeds) or (),
            output=folder,
            jobs=jobs,
            launcher=launcher.value,
            address=address,
            cores=cores,
            progress=lambda title: TerminalProgress(errors, title),
            tell=note,
        )
    if as_json:
        show_json({**found.table.to_json(), "folder": str(found.folder), "page": str(found.page)})
    else:
        show_grids(found.table.grid())
    for sentence in found.table.sentences():
        note(sentence)
    for warning in found.table.warnings:
        note(f"Warning: {warning}")
    note(f"Report: {found.page}")
