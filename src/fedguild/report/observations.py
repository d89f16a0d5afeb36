"""Observations that methods report of their rounds, gathered by name over the rounds and the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import pandas

from fedguild.core.errors import ConfigError, nearest
from fedguild.measuring.log.folder import Run
from fedguild.measuring.log.records import ObservationRecord
from fedguild.measuring.scores.statistics import spread
from fedguild.report.grid import Cell, Grid, curves_grid, values_grid

Kept = TypeVar("Kept")
MOST_ROUNDS = 6
"""Rounds of a figure in `observed_means`: all of them, or so many, evenly spread from the first to the last."""
MOST_COLUMNS = 8
"""Columns of a figure that are kept apart; where there are more, one for each client or expert, their mean. Of one
without columns the rows, beside their mean."""


@dataclass(frozen=True)
class Series:
    """One figure of a run over its rounds.

    Attributes:
        name: Name of the figure.
        unit: The unit of its values; empty for a pure number.
        records: The records, one for each round, in order.
    """

    name: str
    unit: str
    records: tuple[ObservationRecord, ...]

    @property
    def last(self) -> ObservationRecord:
        return self.records[-1]

    @property
    def is_matrix(self) -> bool:
        """Whether a row has a value for each column."""
        return bool(self.last.columns)

    @property
    def is_over_rounds(self) -> bool:
        """Whether it is a matrix of one row in every round, shown over the rounds."""
        return self.is_matrix and all(len(record.rows) == 1 for record in self.records)

    def matrix(self) -> ObservationRecord:
        """Returns the last round's matrix; for a figure with one row in a round, the row of every round.

        Rounds with other columns are left out.
        """
        if not self.is_over_rounds:
            return self.last
        alike = [record for record in self.records if record.columns == self.last.columns]
        rows = [f"round {record.round}" for record in alike]
        return self.last.model_copy(update={"rows": rows, "values": [record.values[0] for record in alike]})

    @property
    def title(self) -> str:
        return self.name[:1].upper() + self.name[1:]

    def lines(self) -> dict[str, list[tuple[int, float]]]:
        """Returns row -> (round, value), for figures with one value in a row; NaN and infinity are left out.

        A row that is missing in some rounds has a shorter line.
        """
        points: dict[str, list[tuple[int, float]]] = {}
        for record in self.records:
            for row, (value, *_) in zip(record.rows, record.values, strict=True):
                if math.isfinite(value):
                    points.setdefault(row, []).append((record.round, value))
        return points

    def grid(self) -> Grid | None:
        """Returns the values of the figure: of its last round, or of every round if it is shown over the rounds."""
        title = f"{self.title}, in {self.unit}" if self.unit else self.title
        if not self.is_matrix:
            return curves_grid(self.lines(), title, "{:.4g}".format)
        shown = self.matrix()
        texts = [[f"{value:.4g}" for value in row] for row in shown.values]
        return values_grid(title, "", shown.rows, shown.columns, texts)


def observed(run: Run) -> list[Series]:
    """Returns every figure that the run's method reported, in the order of its first report."""
    by_name: dict[str, dict[int, ObservationRecord]] = {}
    for record in run.observations:
        by_name.setdefault(record.name, {})[record.round] = record
    ordered = [[rounds[number] for number in sorted(rounds)] for rounds in by_name.values()]
    return [Series(records[-1].name, records[-1].unit, tuple(records)) for records in ordered]


def observation_grid(runs: Mapping[str, Sequence[Run]]) -> Grid | None:
    """Returns the last round's figures of several methods over their seeds; None if no method reports any.

    A figure's rows and columns may mean something else under another seed (experts are drawn anew). Seeds are therefore
    compared by the mean, the smallest and the largest value of a figure, never entry by entry.

    Args:
        runs: Label -> the method's runs, one per seed.
    """
    body = [
        (Cell(label), Cell(f"{name} ({unit})" if unit else name), *map(Cell, cells))
        for label, members in runs.items()
        for name, unit, cells in _over_seeds(members)
    ]
    header = (Cell("Method"), Cell("Figure"), Cell("Mean"), Cell("Smallest"), Cell("Largest"))
    title = "The methods' observations in the last round, mean ± sample deviation over seeds"
    return Grid(title, header, tuple(body)) if body else None


def _over_seeds(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[str]]]:
    """Yields the name, the unit and the printed mean, smallest and largest value of each figure."""
    by_figure: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for series in (series for run in runs for series in observed(run)):
        values = [value for row in series.last.values for value in row if math.isfinite(value)]
        if values:
            by_figure.setdefault((series.name, series.unit), []).append((fmean(values), min(values), max(values)))
    for (name, unit), seeds in by_figure.items():
        yield name, unit, [_printed(column) for column in zip(*seeds, strict=True)]


def _printed(values: Sequence[float]) -> str:
    over = spread(values)
    return f"{over.mean:.4g}" if over.count < 2 else f"{over.mean:.4g} ± {over.std:.2g}"


def observed_means(run: Run) -> dict[str, dict[int, float]]:
    """Returns `figure` or `figure / column` -> round -> the mean of its finite values, with six digits.

    Up to `MOST_ROUNDS` of its rounds are kept, evenly spread. A figure without columns has its mean, and each row.
    """
    found: dict[str, dict[int, float]] = {}
    for series in sorted(observed(run), key=lambda one: one.name):
        for record in evenly(series.records, MOST_ROUNDS):
            for name, values in _by_column(record).items():
                if finite := [value for value in values if math.isfinite(value)]:
                    found.setdefault(name, {})[record.round] = float(f"{fmean(finite):.6g}")
    return found


def _by_column(record: ObservationRecord) -> dict[str, list[float]]:
    """Returns the values of a figure by column, or all together if it has none or more than `MOST_COLUMNS`.

    A figure without columns, but with several rows, also has each of its rows.
    """
    if not 0 < len(record.columns) <= MOST_COLUMNS:
        every = {record.name: [value for row in record.values for value in row]}
        if record.columns or not 1 < len(record.rows) <= MOST_COLUMNS:
            return every
        by_row = zip(record.rows, record.values, strict=True)
        return every | {f"{record.name} / {row}": list(values) for row, values in by_row}
    by_column = zip(*record.values, strict=True)
    return {f"{record.name} / {column}": list(values) for column, values in zip(record.columns, by_column, strict=True)}


def evenly(members: Sequence[Kept], most: int) -> list[Kept]:
    """Returns up to `most` members, evenly spread, the first and the last among them."""
    if len(members) <= most:
        return list(members)
    return [members[round(place * (len(members) - 1) / (most - 1))] for place in range(most)]


def entry_over_seeds(runs: Sequence[Run], figure: str, row: str, column: str = "", *, rounds: int = 5) -> Grid:
    """Returns a table with a row for each seed and a column for each of the last rounds.

    For Table 7: the figure `experts held in the next round`, the row a module, the column a client.

    Args:
        runs: The runs of one config, one for each seed.
        figure: Name of the observation.
        row: Label of its row.
        column: Label of its column; empty if a row has one value.
        rounds: Number of last rounds, of those that every run has.

    Raises:
        ConfigError: a run reports no such figure, row or column.
    """
    entries = [_entry(run.frame("observations"), run.folder, figure, row, column) for run in runs]
    over_rounds = pandas.concat(entries, axis=1, join="inner").sort_index().tail(rounds)
    body = tuple(
        (Cell(str(run.setting("seed", default=""))), *(Cell(f"{value:.4g}") for value in over_rounds.iloc[:, place]))
        for place, run in enumerate(runs)
    )
    place = f"{row}, {column}" if column else row
    return Grid(f"{figure}: {place}", (Cell("Seed"), *(Cell(f"round {number}") for number in over_rounds.index)), body)


def stability_grids(runs: Mapping[str, Sequence[Run]]) -> list[Grid]:
    """Returns, for each method with several seeds, the first entry of each matrix of counts that it reports.

    Counts, such as the number of experts that a client holds, mean the same under every seed. A matrix without a unit
    need not (experts are drawn anew), and is left out, as is one whose first entry another seed lacks.

    Args:
        runs: Label -> the method's runs, one per seed.
    """
    grids = []
    for label, members in runs.items():
        for series in observed(members[0]) if len(members) > 1 else ():
            if series.is_matrix and series.unit:
                with suppress(ConfigError):
                    grid = entry_over_seeds(members, series.name, series.last.rows[0], series.last.columns[0])
                    grids.append(replace(grid, title=f"{label}: {grid.title}"))
    return grids


def _entry(observed: pandas.DataFrame, folder: Path, figure: str, row: str, column: str) -> pandas.Series:
    found = observed.reindex(columns=["round", "name", "row", "column", "value"])
    for key, label, missing in (
        ("name", figure, f"{folder} reports no figure '{figure}'."),
        ("row", row, f"The figure '{figure}' has no row '{row}'."),
        ("column", column, f"The figure '{figure}' has no column '{column}'."),
    ):
        if label not in (known := list(found[key].unique())):
            raise ConfigError(missing, nearest(label, known))
        found = found[found[key] == label]
    return found.groupby("round")["value"].last()
