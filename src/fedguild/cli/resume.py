"""`fedguild resume`: continue a run that was stopped."""

from __future__ import annotations

from typing import Annotated

import typer

import fedguild
from fedguild.cli.following import follows_torchrun
from fedguild.cli.options import JsonOption, RunFolderArgument
from fedguild.cli.output import errors
from fedguild.cli.results import show_run
from fedguild.cli.watch import WatchOption, watching
from fedguild.core.errors import ConfigError
from fedguild.core.layout import CONFIG
from fedguild.runs.terminal import TerminalProgress

EXAMPLES = ("fedguild resume runs/flame-tiny-tasks", "fedguild resume runs/flame-tiny-tasks --round 4")
CONTEXT = {"allow_extra_args": True}
"""Settings reach the command, which says where they are changed."""
RoundOption = Annotated[
    int | None,
    typer.Option(
        "--round", min=0, help="Go back to this round, whose checkpoint is still there; later ones are removed."
    ),
]


def command(
    context: typer.Context,
    folder: RunFolderArgument,
    round: RoundOption = None,
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a run from its last complete round, with the results of an uninterrupted run.

    It takes no settings: those that may change are changed in the config.yaml of the FOLDER.
    """
    if context.args:
        raise ConfigError(
            f"resume takes no settings, got {context.args[0]}.",
            f"Those that may change are changed in {folder / CONFIG}.",
        )
    if follows_torchrun():
        return
    context.obj.resume_with = f"fedguild resume {folder}"
    with watching(folder, on=watch), TerminalProgress(errors) as progress:
        result = fedguild.resume(folder, progress=progress, round=round)
    show_run(result.folder, as_json)
