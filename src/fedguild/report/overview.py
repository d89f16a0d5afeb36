"""A table of several conditions: methods × columns, one score in each cell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedguild.files import write_text
from fedguild.report import units
from fedguild.report.comparison import ComparisonTable
from fedguild.report.grid import Cell, Grid

OVERVIEW_FILE = "table.md"
_MEANING = {
    "mean": "global model, mean over budgets",
    "mtal": "own models on own data (MTAL)",
    "received": "next models on own data",
    "pooled": "own models on all data",
}


def overview(tables: Mapping[str, ComparisonTable], score: str, title: str) -> Grid:
    """Returns methods × columns: mean ± sample deviation of a score, then the paired differences.

    Args:
        tables: Column -> its comparison; all have the same methods.
        score: Which score: `mean`, `mtal`, `received` or `pooled`.
        title: What the table is called.
    """
    first = next(iter(tables.values()))
    labels = [row.label for row in first.rows]
    body = [_score_row(label, tables, score) for label in labels]
    rules = {len(body)}
    for label in labels:
        if label != first.reference:
            gaps = {column: table.difference(label, score) for column, table in tables.items()}
            texts = [Cell(units.score_spread(gap, difference=True)) for gap in gaps.values()]
            body.append((Cell(f"{label} \u2212 {first.reference}", "paired by seed"), *texts))
    heading = f"{title}: {_MEANING[score]}, mean ± sample deviation over {units.count_of(len(first.seeds), 'seed')}"
    header = (Cell("Method"), *(Cell(column) for column in tables))
    return Grid(heading, header, tuple(body), frozenset(rules))


def write_overview(tables: Mapping[str, ComparisonTable], score: str, title: str, folder: Path) -> Path:
    """Writes `table.md` into a folder: every column's scores and costs and, of several columns, their overview.

    Raises:
        FedGuildError: the file cannot be written.
    """
    parts = [overview(tables, score, title).to_markdown()] if len(tables) > 1 else []
    for column, table in tables.items():
        parts += [f"## {column}\n"] if column else []
        parts += [table.score_grid().to_markdown(), table.cost_grid().to_markdown()]
    path = folder / OVERVIEW_FILE
    write_text(path, "\n".join(parts))
    return path


def _score_row(label: str, tables: Mapping[str, ComparisonTable], score: str) -> tuple[Cell, ...]:
    cells = [
        Cell(units.score_spread(table.row(label).spread(score)), strong=table.best(score) == label)
        for table in tables.values()
    ]
    return (Cell(label), *cells)
