"""Display of a finished run's results."""

from __future__ import annotations

from pathlib import Path

from fedguild.cli.output import note, show, show_json


def show_run(folder: Path, as_json: bool) -> None:
    """Prints a run's table and the path of its report, or the table as JSON."""
    from fedguild.report.html import REPORT_FILE
    from fedguild.report.run_folder import load_run
    from fedguild.report.tables import run_table

    table = run_table(load_run(folder))
    if as_json:
        show_json({"folder": str(folder), **table.to_json()})
    else:
        show(table.grid().to_rich())
        note(f"Report: {folder / REPORT_FILE}")
