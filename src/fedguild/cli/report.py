"""`fedguild report`: rewrite the HTML page of a run."""

from __future__ import annotations

import typer

from fedguild.cli.options import RunFolderArgument

EXAMPLES = ("fedguild report runs/flame-tiny-tasks",)


def command(folder: RunFolderArgument) -> None:
    """Write the HTML page of a run, and print its path."""
    from fedguild.report.html import write_report

    typer.echo(write_report(folder))
