"""A folder of runs as the parts of a page: the cells of a comparison as they fill, or an index of the runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedguild.measuring.log.index import GroupPage, RunSummary, find_pages, find_runs, read_plan
from fedguild.report.watch.board import Board

SCAN_SECONDS = 0.5
"""New runs and pages are looked for no more often than this."""


class GridView:
    """The parts `page` and `runs` of a folder with runs below it.

    The page asks for a run by its number, never by a path; likewise for the pages of comparisons and sweeps.

    Args:
        folder: The folder; it need not exist yet.
        now: The clock, in seconds.
    """

    def __init__(self, folder: Path, board: Board, now: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.board, self._clock = folder, board, now
        self.folders: list[Path] = []
        self.pages: list[GroupPage] = []
        self._summaries: dict[Path, RunSummary] = {}
        self._cells: dict[Path, dict[str, Any]] = {}
        self._scanned = -SCAN_SECONDS

    def refresh(self) -> bool:
        if self._clock() - self._scanned >= SCAN_SECONDS:
            self._scanned = self._clock()
            self._scan()
        for number, folder in enumerate(self.folders):
            cell = self._cells.get(folder, {})
            where = {"row": cell.get("row", ""), "column": cell.get("column", "")}
            self._summaries[folder].refresh()
            summary = self._summaries[folder].to_json()
            if cell:
                summary["seed"] = cell["seed"]
            self.board.put("runs", number, {**summary, **where, "place": str(folder.relative_to(self.folder))})
        self.board.put("page", "facts", self._facts())
        return False

    def close(self) -> None:
        self._summaries.clear()

    def _scan(self) -> None:
        planned = {self.folder / str(cell["folder"]): dict(cell) for cell in read_plan(self.folder).cells}
        self._cells = planned
        for folder in [*planned, *find_runs(self.folder)]:
            if folder not in self._summaries and self.folder in folder.parents:
                self._summaries[folder] = RunSummary(folder)
                self.folders.append(folder)
        self.pages += [page for page in find_pages(self.folder, self.folders) if page not in self.pages]

    def _facts(self) -> dict[str, Any]:
        cells = [cell for folder, cell in self._cells.items() if folder in self._summaries]
        return {
            "kind": "grid",
            "folder": str(self.folder),
            "name": self.folder.name or str(self.folder),
            "rows": list(dict.fromkeys(cell["row"] for cell in cells)),
            "columns": list(dict.fromkeys(cell["column"] for cell in cells)),
            "seeds": sorted({cell["seed"] for cell in cells}),
            "pages": [{"kind": page.kind, "name": page.name, "place": page.place} for page in self.pages],
        }
