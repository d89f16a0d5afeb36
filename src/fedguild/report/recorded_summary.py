"""Recorded tables in short, for the methods' pages: one score by column, what a client spends, and claims' costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from fedguild.config.table import ONLY_COLUMN, Table
from fedguild.evaluation.statistics import spread
from fedguild.report import units
from fedguild.report.grid import Cell, Grid
from fedguild.report.recorded import CellRecord
from fedguild.score_names import TITLES

Rows = Mapping[str, Sequence[CellRecord]]
"""Row -> its records."""


def training_flops(record: CellRecord) -> float | None:
    """Returns a client's training FLOPs, the mean over the budgets; None where they are not known."""
    return fmean(record.training_flops.values()) if record.training_flops else None


COSTS: Mapping[str, Callable[[CellRecord], float | None]] = {
    "up": lambda record: record.upload_bytes,
    "down": lambda record: record.download_bytes,
    "FLOPs": training_flops,
}
"""What a client spends in a run."""


EQUAL = 0.005
"""Costs that differ by less than this part of them are written as equal."""


def summary_grid(table: Table, records: Sequence[CellRecord]) -> Grid:
    """Returns rows × columns of the table: the mean of its score over the seeds, with the sample deviation, and costs.

    The costs are those of the last column with a record, over the whole run.
    """
    columns = [column for column in table.columns if any(record.column == column for record in records)]
    rows = {row: [record for record in records if record.row == row] for row in table.rows}
    header = [Cell("row"), *(Cell(TITLES[table.score] if name == ONLY_COLUMN else name) for name in columns)]
    header += [Cell("training FLOPs"), Cell("up"), Cell("down"), Cell("seeds")]
    body = []
    for row, members in rows.items():
        if not members:
            continue
        line = [Cell(row)]
        for column in columns:
            scored = [one.scores[table.score] for one in members if one.column == column and table.score in one.scores]
            line.append(Cell(units.score_spread(spread(scored) if scored else None)))
        last = [record for record in members if record.column == columns[-1]]
        line.append(Cell(units.si(_mean(map(training_flops, last)))))
        line += [Cell(units.byte_count(_mean(map(COSTS[name], last)))) for name in ("up", "down")]
        seeds = {sum(one.column == column for one in members) for column in columns}
        line.append(Cell(str(seeds.pop()) if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"))
        body.append(tuple(line))
    of = "" if len(columns) == 1 else f" in {columns[-1]}"
    title = (
        f"{TITLES[table.score].capitalize()} score, mean ± sample deviation over the seeds; what a client spends{of}, "
        "the mean over the budgets"
    )
    return Grid(title, tuple(header), tuple(body))


def cost_ratios(rows: Rows, higher: str, lower: Iterable[str]) -> str:
    """Returns what a claim's row costs beside the cheapest of those that it is to beat: `up × 1.90, down × 1.90`.

    Of bytes sent and received and of training FLOPs, each the largest of the ratios of means; `equal` where all of them
    are 1. What is not known of one of the rows is left out; `–` where that is all.
    """
    found: dict[str, float] = {}
    for name, cost in COSTS.items():
        own = _mean(map(cost, rows.get(higher, ())))
        others = [_mean(map(cost, rows.get(row, ()))) for row in lower]
        if own is None or not all(others):
            continue
        found[name] = max(own / other for other in others if other)
    if found and all(abs(ratio - 1) < EQUAL for ratio in found.values()):
        return "equal"
    return ", ".join(f"{name} × {ratio:.{2 if ratio < 10 else 0}f}" for name, ratio in found.items()) or units.MISSING


def _mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of those that are known; None without one."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
