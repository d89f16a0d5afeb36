"""`fedguild report`: rewrite the HTML page of a run, or write an index of a folder's runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = ("fedguild report runs/flame-tiny-tasks", "fedguild report runs")


def command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A run's folder, or one with runs below it.", show_default=False),
    ],
) -> None:
    """Write the HTML page of a run, or an index of all runs below a folder with filters, and print its path."""
    from fedguild.measuring.log.index import find_runs, is_run
    from fedguild.report.html import write_index, write_report

    several = not is_run(folder) and bool(find_runs(folder))
    typer.echo(write_index(folder) if several else write_report(folder))
