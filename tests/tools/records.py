"""Records of cells, made up."""

from __future__ import annotations

from typing import Any

from tools.records.cells import CellRecord


def cell_record(row: str, seed: int, column: str, **changes: Any) -> CellRecord:
    of_run = {"fingerprint": "x", "fedguild": "0.3.0", "round": 4, "split": "test"}
    return CellRecord(**{"table": "one/two", "column": column, "row": row, "seed": seed, **of_run, **changes})
