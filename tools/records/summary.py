"""Recorded tables in short, for the methods' pages: one score by column, what a client spends, and claims' costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from fedguild.config.table import ONLY_COLUMN, Table
from fedguild.core.score_names import MEAN, TITLES
from fedguild.measuring.scores.statistics import mean_of_known, spread
from fedguild.report import units
from fedguild.report.grid import Cell, Grid
from tools.records.cells import CellRecord, perplexities

Rows = Mapping[str, Sequence[CellRecord]]
"""Row -> its records."""


COSTS = ("up", "down", "FLOPs")
"""What a client spends in a run: bytes sent and received, and training FLOPs."""


def cost_of(record: CellRecord, name: str, score: str = MEAN) -> float | None:
    """Returns what a client spends, bytes as means over the clients; None where it is not known.

    Args:
        record: The cell.
        name: The cost, of `COSTS`.
        score: Where it is a budget's, FLOPs are those of that budget; else they are the mean over the budgets.
    """
    if name != "FLOPs":
        return record.upload_bytes if name == "up" else record.download_bytes
    flops = record.training_flops
    if score in flops:
        return flops[score]
    return fmean(flops.values()) if flops else None


EQUAL = 0.005
"""Costs that differ by less than this part of them are written as equal."""


SPENT = (Cell("training FLOPs"), Cell("up"), Cell("down"))
"""Headings of `spent`."""


def spent(rows: Mapping[str, Sequence[CellRecord]]) -> dict[str, tuple[Cell, ...]]:
    """Returns row -> a client's training FLOPs, upload and download over a run, means over the seeds.

    Clients have other data with another seed, so the means are over the seeds that all rows have, where there are any.
    """
    seeds = [{one.seed for one in members} for members in rows.values()]
    common = set.intersection(*seeds) if seeds else set()
    found: dict[str, tuple[Cell, ...]] = {}
    for row, members in rows.items():
        chosen = [one for one in members if not common or one.seed in common]
        flops, up, down = (mean_of_known(cost_of(one, name) for one in chosen) for name in ("FLOPs", "up", "down"))
        found[row] = (Cell(units.si(flops)), Cell(units.byte_count(up)), Cell(units.byte_count(down)))
    return found


def by_row(table: Table, records: Iterable[CellRecord]) -> dict[str, list[CellRecord]]:
    """Returns row -> its records, in the table's order; rows without records are left out."""
    rows: dict[str, list[CellRecord]] = {row: [] for row in table.rows}
    for record in records:
        if record.row in rows:
            rows[record.row].append(record)
    return {row: members for row, members in rows.items() if members}


def summary_grid(table: Table, records: Sequence[CellRecord]) -> Grid | None:
    """Returns rows × columns of the table: the mean of its score over the seeds, with the sample deviation, and costs.

    Behind a score stands the mean perplexity of the same models, where it is recorded. The costs are those of the last
    column with a record, over the whole run. None without a record of any column. A row names a score of its own.
    """
    columns = [column for column in table.columns if any(record.column == column for record in records)]
    if not columns:
        return None
    header = [Cell("row"), *(Cell(TITLES[table.score] if name == ONLY_COLUMN else name) for name in columns)]
    header += [*SPENT, Cell("seeds")]
    body = []
    costs = spent(by_row(table, [record for record in records if record.column == columns[-1]]))
    for row, members in by_row(table, records).items():
        score = table.scores[row]
        line = [Cell(row if score == table.score else f"{row} ({TITLES[score]})")]
        for column in columns:
            of_column = [one for one in members if one.column == column]
            scored = [one.scores[score] for one in of_column if score in one.scores]
            line.append(Cell(units.score_spread(spread(scored) if scored else None) + _perplexity(of_column, score)))
        line += costs.get(row, [Cell(units.MISSING)] * len(SPENT))
        seeds = {sum(one.column == column for one in members) for column in columns}
        line.append(Cell(str(seeds.pop()) if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"))
        body.append(tuple(line))
    of = "" if len(columns) == 1 else f" in {columns[-1]}"
    shown = TITLES[table.score]
    behind = " (mean perplexity)" if any(record.perplexity for record in records) else ""
    title = (
        f"{shown[0].upper()}{shown[1:]} score, mean ± sample deviation over the seeds{behind}; "
        f"mean training FLOPs and bytes of a client{of}, over the seeds that all rows have"
    )
    return Grid(title, tuple(header), tuple(body))


def _perplexity(records: Iterable[CellRecord], score: str) -> str:
    known = [value for record in records if (value := perplexities(record).get(score)) is not None]
    return f" ({fmean(known):.2f})" if known else ""


def heading(shown: str) -> str:
    """Returns a figure's name without the formula behind its comma, and the column that is shown of it."""
    name, _, formula = shown.partition(", ")
    return f"{name} / {formula.rpartition(' / ')[2]}" if " / " in formula else name


def first_to_last(figures: Sequence[Mapping[int, float]]) -> str:
    """Returns a figure's mean over the seeds in the first and the last of its rounds: `0.31 → 0.74`."""
    ends = first_and_last(figures)
    if ends is None:
        return units.MISSING
    return f"{ends[1]:.3g}" if all(len(rounds) < 2 for rounds in figures) else f"{ends[0]:.3g} → {ends[1]:.3g}"


def first_and_last(figures: Iterable[Mapping[int, float]]) -> tuple[float, float] | None:
    """Returns a figure's means over the seeds in the first and in the last of each seed's rounds; None without a round.

    Args:
        figures: Of each seed, round -> the figure.
    """
    known = [rounds for rounds in figures if rounds]
    if not known:
        return None
    return fmean(rounds[min(rounds)] for rounds in known), fmean(rounds[max(rounds)] for rounds in known)


def cost_ratios(columns: Sequence[Rows], higher: str, lower: Iterable[str], score: str = MEAN) -> str:
    """Returns what a claim's row costs, as a multiple of each of those that it is to beat: `up × 0.97 to 1.94`.

    Of bytes sent and received and of training FLOPs, each the smallest and the largest ratio, in any of the columns, of
    the means over the seeds in which all of the rows have it. A cost that some row nowhere has is left out; `equal`
    where all three are known and nowhere differ; `–` where none is known. Where the claim's score is a budget's, FLOPs
    are of that budget.
    """
    others = list(lower)
    ratios = {name: [one for rows in columns for one in ratios_of(rows, name, higher, others, score)] for name in COSTS}
    found = {name: (min(of_cost), max(of_cost)) for name, of_cost in ratios.items() if of_cost}
    if len(found) == len(COSTS) and all(abs(end - 1) < EQUAL for ends in found.values() for end in ends):
        return "equal"
    return ", ".join(f"{name} × {_range(*ends)}" for name, ends in found.items()) or units.MISSING


def ratios_of(rows: Rows, name: str, row: str, others: Sequence[str], score: str = MEAN) -> list[float]:
    """Returns how many times a row spends of a cost what each of some others does; empty where one of them has none.

    Args:
        rows: Row -> its records.
        name: The cost, of `COSTS`.
        row: The row.
        others: The rows that it is compared with, by means over the seeds in which all of them have the cost.
        score: As of `cost_of`.
    """
    spent = {
        one: {record.seed: value for record in rows.get(one, ()) if (value := cost_of(record, name, score)) is not None}
        for one in (row, *others)
    }
    seeds = set.intersection(*({*of_row} for of_row in spent.values()))
    if not seeds:
        return []
    means = {one: fmean(of_row[seed] for seed in seeds) for one, of_row in spent.items()}
    return [_ratio(means[row], means[other]) for other in others]


def _ratio(own: float, other: float) -> float:
    """Returns how many times the other's costs one's own are; infinitely many where only the other's are 0."""
    if other:
        return own / other
    return math.inf if own else 1.0


def _range(smallest: float, largest: float) -> str:
    low, high = times(smallest), times(largest)
    return low if low == high else f"{low} to {high}"


def times(ratio: float) -> str:
    """Returns a ratio with two decimals, below a hundredth with one digit, and from 10 on without decimals."""
    if math.isinf(ratio):
        return "∞"
    if ratio >= 10:
        return f"{ratio:.0f}"
    return f"{ratio:.2f}" if ratio == 0 or ratio >= 0.01 else f"{ratio:.1g}"
