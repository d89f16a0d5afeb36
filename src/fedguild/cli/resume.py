"""`fedguild resume`: continue a run that was stopped."""

from __future__ import annotations

import typer

from fedguild.cli.options import JsonOption, RunFolderArgument
from fedguild.cli.progress import TerminalProgress
from fedguild.cli.results import show_run

EXAMPLES = ("fedguild resume runs/flame-tiny-tasks",)


def command(context: typer.Context, folder: RunFolderArgument, as_json: JsonOption = False) -> None:
    """Continue a run from its last complete round, with the results of an uninterrupted run."""
    from fedguild import experiment

    context.obj.resume_with = f"fedguild resume {folder}"
    with TerminalProgress() as progress:
        result = experiment.resume(folder, progress=progress)
    show_run(result.folder, as_json)
