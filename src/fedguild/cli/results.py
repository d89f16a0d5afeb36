"""Display of a finished run's results."""

from __future__ import annotations

from pathlib import Path

from fedguild.cli.output import note, show_grids, show_json


def show_run(folder: Path, as_json: bool) -> None:
    """Prints a run's table and the path of its report, or the table as JSON."""
    from fedguild.measuring.log.folder import load_run
    from fedguild.measuring.log.index import REPORT_FILE
    from fedguild.report.tables import privacy_grid, run_table

    run = load_run(folder)
    table, privacy = run_table(run), privacy_grid(run)
    if as_json:
        spent = {"privacy": run.privacy[-1].model_dump(mode="json")} if run.privacy else {}
        show_json({"folder": str(folder), **table.to_json(), **spent})
    else:
        show_grids(table.grid())
        if privacy is not None:
            show_grids(privacy)
        note(f"Report: {folder / REPORT_FILE}")
