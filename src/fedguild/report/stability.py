"""Stability of one entry of an observed figure, over the rounds and the seeds (FedAMoLE, Table 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedguild.errors import ConfigError, nearest
from fedguild.report.grid import Cell, Grid
from fedguild.report.observations import Series, observed
from fedguild.runs.folder import Run


def entry_over_seeds(runs: Sequence[Run], figure: str, row: str, column: str = "", *, rounds: int = 5) -> Grid:
    """Returns a table with a row for each seed and a column for each of the last rounds.

    For Table 7: the figure `experts held in the next round`, the row a module, the column a client.

    Args:
        runs: The runs of one config, one for each seed.
        figure: Name of the observation.
        row: Label of its row.
        column: Label of its column; empty where a row has one value.
        rounds: How many of the last rounds that every run has.

    Raises:
        ConfigError: a run reports no such figure, row or column.
    """
    values_by_run = [_values(run, figure, row, column) for run in runs]
    common = sorted(set.intersection(*(set(values) for values in values_by_run)))[-rounds:]
    body = tuple(
        (Cell(str(run.setting("seed", default=""))), *(Cell(f"{values[number]:.4g}") for number in common))
        for run, values in zip(runs, values_by_run, strict=True)
    )
    place = f"{row}, {column}" if column else row
    return Grid(f"{figure}: {place}", (Cell("Seed"), *(Cell(f"round {number}") for number in common)), body)


def stability_grids(runs: Mapping[str, Sequence[Run]]) -> list[Grid]:
    """Returns, for each method with several seeds, the first entry of each matrix of counts that it reports.

    Counts, such as the experts that a client holds, mean the same under every seed; a matrix
    without a unit need not (experts are drawn anew), and is left out.

    Args:
        runs: Label -> the method's runs, one per seed.
    """
    return [
        replace(grid, title=f"{label}: {grid.title}")
        for label, members in runs.items()
        if len(members) > 1
        for series in observed(members[0])
        if series.is_matrix and series.unit
        for grid in [entry_over_seeds(members, series.name, series.last.rows[0], series.last.columns[0])]
    ]


def _values(run: Run, figure: str, row: str, column: str) -> dict[int, float]:
    """Returns round -> the entry's value."""
    series: dict[str, Series] = {one.name: one for one in observed(run)}
    if figure not in series:
        raise ConfigError(f"{run.folder} reports no figure '{figure}'.", nearest(figure, series))
    values = {}
    for record in series[figure].records:
        across = _place(column, record.columns, figure) if record.columns else 0
        values[record.round] = record.values[_place(row, record.rows, figure)][across]
    return values


def _place(label: str, known: Iterable[str], figure: str) -> int:
    labels = list(known)
    if label not in labels:
        raise ConfigError(f"The figure '{figure}' has no row or column '{label}'.", nearest(label, labels))
    return labels.index(label)
