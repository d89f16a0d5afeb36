"""The values of figures as tables, for readers who cannot see a figure or want its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from numpy.typing import NDArray

from fedguild.report import units
from fedguild.report.grid import Cell, Grid
from fedguild.report.observations import Series

MOST_VALUES = 3000
"""Tables with more values are left out: `metrics.jsonl` holds them, and a page with them would not open."""


def curves_values(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Grid | None:
    """Returns round × line, the scores of a line chart."""
    by_round = {name: dict(curve) for name, curve in curves.items()}
    rounds = sorted(set(chain.from_iterable(by_round.values())))
    rows = [[units.score(known.get(number)) for known in by_round.values()] for number in rounds]
    return _grid(title, "Round", list(map(str, rounds)), list(curves), rows)


def counts_values(
    counts: NDArray[Any], rows: Sequence[str], columns: Sequence[str], title: str, digits: int = 0
) -> Grid | None:
    """Returns clients × labels or experts, the values of a bubble chart or a heat map."""
    texts = [[f"{value:.{digits}f}" for value in row] for row in counts.tolist()]
    return _grid(title, "Client", list(rows), list(columns), texts)


def series_values(series: Series) -> Grid | None:
    """Returns the values of an observation's figure: of its last round, or of every round where it is followed."""
    unit = f", in {series.unit}" if series.unit else ""
    if series.is_matrix:
        shown = series.matrix()
        texts = [[f"{value:.4g}" for value in row] for row in shown.values]
        return _grid(f"{series.title}{unit}", "", list(shown.rows), list(shown.columns), texts)
    lines = {row: dict(points) for row, points in series.lines().items()}
    rounds = sorted(set(chain.from_iterable(lines.values())))
    rows = [[_printed(known.get(number)) for known in lines.values()] for number in rounds]
    return _grid(f"{series.title}{unit}", "Round", list(map(str, rounds)), list(lines), rows)


def _printed(value: float | None) -> str:
    return units.MISSING if value is None else f"{value:.4g}"


def _grid(
    title: str, corner: str, rows: Sequence[str], columns: Sequence[str], texts: Sequence[Sequence[str]]
) -> Grid | None:
    """Returns a table; None for one without values, or with too many."""
    if not 0 < len(rows) * len(columns) <= MOST_VALUES:
        return None
    body = tuple((Cell(name), *map(Cell, row)) for name, row in zip(rows, texts, strict=True))
    return Grid(title, (Cell(corner), *map(Cell, columns)), body)
