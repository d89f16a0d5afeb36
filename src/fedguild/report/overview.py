"""A table of several conditions: methods × columns, one score in each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fedguild.core.files import write_text
from fedguild.core.score_names import MEANINGS
from fedguild.report import units
from fedguild.report.comparison import ComparisonTable
from fedguild.report.grid import Cell, Grid

MARKDOWN_FILE = "table.md"
LATEX_FILE = "table.tex"
CSV_FILE = "table.csv"


def overview(tables: Mapping[str, ComparisonTable], scores: Mapping[str, str], title: str) -> Grid:
    """Returns methods × columns: mean ± sample deviation of a score, then the paired differences.

    Args:
        tables: Column -> its comparison; all have the same methods.
        scores: Label -> its score, one of `SCORES`.
    """
    first = next(iter(tables.values()))
    labels = [row.label for row in first.rows]
    shown = {label: scores[label] for label in labels}
    body = [_score_row(label, tables, shown) for label in labels]
    rules = {len(body)}
    for label in labels:
        if label != first.reference:
            against = shown[first.reference]
            gaps = {column: table.difference(label, shown[label], against) for column, table in tables.items()}
            texts = [Cell(units.difference(gap)) for gap in gaps.values()]
            body.append((Cell(f"{label} \u2212 {first.reference}", "paired by seed"), *texts))
    metrics = {table.metric for table in tables.values()}
    said = f"{first.metric}, " if len(metrics) == 1 and first.metric != "score" else ""
    heading = (
        f"{title}: {said}{_meaning(shown)}; mean ± sample deviation over {units.count_of(len(first.seeds), 'seed')}"
    )
    heading += "; differences with their 95 % interval" if len(first.seeds) > 1 else ""
    several = {column: f"{column} ({table.metric})" for column, table in tables.items() if len(metrics) > 1}
    header = (Cell("Method"), *(Cell(several.get(column, column)) for column in tables))
    return Grid(heading, header, tuple(body), frozenset(rules))


def write_tables(tables: Mapping[str, ComparisonTable], scores: Mapping[str, str], title: str, folder: Path) -> Path:
    """Writes `table.md` and `table.tex` into a folder, and returns the first.

    Both have the overview if it adds something, and every column's scores and costs.

    Raises:
        FedGuildError: a file cannot be written.
    """
    whole = [overview(tables, scores, title)] if adds_to(tables, scores) else []
    grids = {column: table.grids() for column, table in tables.items()}
    parts = [grid.to_markdown() for grid in whole]
    lines = ["% needs \\usepackage{booktabs}", *(grid.to_latex() for grid in whole)]
    for column, of_column in grids.items():
        parts += [f"## {column}\n"] if column else []
        parts += [grid.to_markdown() for grid in of_column]
        lines += [f"% {column}"] if column else []
        lines += [grid.to_latex() for grid in of_column]
    path = folder / MARKDOWN_FILE
    write_text(path, "\n".join(parts))
    write_text(folder / LATEX_FILE, "\n".join(lines))
    return path


def adds_to(tables: Mapping[str, ComparisonTable], scores: Mapping[str, str]) -> bool:
    """Whether an overview shows what the columns' own tables do not: several columns, or different scores."""
    labels = {row.label for table in tables.values() for row in table.rows}
    return bool(scores) and (len(tables) > 1 or len({scores[label] for label in labels}) > 1)


def _meaning(scores: Mapping[str, str]) -> str:
    """Returns what is shown, in words: the score of most rows, then the rows with another one."""
    (usual, _), *others = Counter(scores.values()).most_common()
    parts = [MEANINGS[usual]]
    for score, _ in others:
        names = [label for label, shown in scores.items() if shown == score]
        parts.append(f"{', '.join(names)}: {MEANINGS[score]}")
    return "; ".join(parts)


def _score_row(label: str, tables: Mapping[str, ComparisonTable], scores: Mapping[str, str]) -> tuple[Cell, ...]:
    cells = [
        Cell(units.score_spread(table.row(label).spread(scores[label])), strong=table.best(scores) == label)
        for table in tables.values()
    ]
    return (Cell(label), *cells)
