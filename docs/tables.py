"""Runs the papers' tables that `docs/methods/records/plan.yaml` lists, and records every cell as soon as it is done.

    python docs/tables.py [TABLE …] [--jobs N]     # run what is missing, record, write the pages
    python docs/tables.py --recorded               # write the pages from the records alone

The pages are written by `docs/generate.py`, which reads the records and nothing else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from fedguild.api.cells import Cell, complete, plan_table
from fedguild.cli.recorded import CellRecord, record_of, record_path
from fedguild.config import table_cells, tables
from fedguild.config.table import ONLY_COLUMN
from fedguild.report.run_folder import load_run

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "methods" / "records"
RUNS = ROOT / "runs"


@dataclass(frozen=True)
class Planned:
    """A cell to record: its table, column, seed and settings, and the run."""

    table: str
    column: str
    overrides: tuple[str, ...]
    cell: Cell

    @property
    def path(self) -> Path:
        """Where its record lies."""
        return record_path(RECORDS, self.table, self.column, self.cell.config.name, self.cell.config.seed)

    def is_recorded(self) -> bool:
        """Returns whether there is a record of this very config."""
        if not self.path.is_file():
            return False
        return CellRecord.model_validate_json(self.path.read_bytes()).fingerprint == self.cell.config.fingerprint()

    def record(self) -> Path:
        """Writes the record of the finished run."""
        config = self.cell.config
        run = load_run(self.cell.folder)
        return record_of(run, self.table, self.column, config.name, config.fingerprint(), self.overrides).write(RECORDS)


def planned(wanted: Sequence[str]) -> list[Planned]:
    """Returns the cells of the planned tables, or of some of them.

    Raises:
        SystemExit: a wanted table is not in the plan.
    """
    plan = yaml.safe_load((RECORDS / "plan.yaml").read_text("utf-8"))
    shipped = {table.name: table for table in tables()}
    for name in wanted:
        if name not in plan:
            raise SystemExit(f"{name} is not in {RECORDS / 'plan.yaml'}, which has {', '.join(plan)}.")
    found = []
    for name in wanted or plan:
        content, settings = shipped[name].load(), plan[name] or {}
        overrides = tuple(settings.get("settings", ()))
        seeds = settings.get("seeds", content.seeds)
        comparisons = plan_table(table_cells(name, content), overrides, seeds, RUNS / name.replace("/", "-"))
        for comparison in comparisons:
            column = comparison.title or ONLY_COLUMN
            found += [Planned(name, column, overrides, cell) for cell in comparison.cells]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs and records what is missing, then writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="tables of the plan; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--recorded", action="store_true", help="only write the pages, from the records")
    options = parser.parse_args(arguments)
    if not options.recorded:
        missing = [one for one in planned(options.tables) if not one.is_recorded()]
        for start in range(0, len(missing), options.jobs):
            several = missing[start : start + options.jobs]
            complete([one.cell for one in several], options.jobs, tell=print)
            for one in several:
                print(f"recorded {one.record().relative_to(ROOT)}")
    return subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py")], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
