"""`fedguild run`: one config, from the data to the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fedguild
from fedguild.cli.following import follows_torchrun
from fedguild.cli.options import ConfigArgument, JsonOption, OverridesArgument, config_and_settings
from fedguild.cli.output import errors
from fedguild.cli.results import show_run
from fedguild.cli.watch import WatchOption, watching
from fedguild.config import load_config
from fedguild.runs.terminal import TerminalProgress

EXAMPLES = (
    "fedguild run flame/tiny-tasks",
    "fedguild run",
    "fedguild run flame/tiny-tasks seed=1 training.steps=50 --output runs/longer",
    "fedguild run flame/tiny-tasks federation.rounds=20 --watch",
    "fedguild run fedit/tiny-ag_news data.train=train.csv data.test=test.csv",
)


def command(
    context: typer.Context,
    config: ConfigArgument = None,
    overrides: OverridesArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the run; by default runs/NAME, the name being the config's."),
    ] = None,
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a config: train, evaluate every budget, write the report.

    Without a CONFIG it runs fedguild.yaml in this folder.
    """
    settings = load_config(*config_and_settings(config, overrides))
    if follows_torchrun(settings.model.device):
        return
    folder = output or settings.run_folder
    context.obj.resume_with = f"fedguild resume {folder}"
    with watching(folder, on=watch), TerminalProgress(errors) as progress:
        result = fedguild.run(settings, output=folder, progress=progress)
    show_run(result.folder, as_json)
