"""Remarks on recorded tables: paragraphs of Markdown, every figure of which is read from the table's records.

A remark is a Jinja2 template. Its figures are calls of the public methods of `Vocabulary`:

    With the basis Guild gains {{ gain('guild', 'no-basis', 'rounds-8') }} after 8 rounds.

Where a row, a column, a score or an observation may be a list, the smallest and the largest figure are written,
`0.103 to 0.265`; Jinja2's filters `min` and `max` pick one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Literal, Self

from jinja2 import Environment, StrictUndefined, TemplateError

from fedguild.config.table import Table
from fedguild.core.errors import DataError, nearest
from fedguild.measuring.scores.statistics import Spread, half_width
from fedguild.report import units
from tools.records.cells import CellRecord, nats_per_token, perplexities
from tools.records.claims import difference, interval, scores_of
from tools.records.summary import COSTS, by_row, cost_of, first_and_last, ratios_of, times

Names = str | Sequence[str]
"""A name, or several."""
End = Literal["first", "last"]
"""An end of an observation's rounds."""
Recorded = Mapping[str, tuple[Table, Sequence[CellRecord]]]
"""A table's name -> the table and its records."""
NEARLY = 0.02
"""The part of a cost by which another may be less and still count as equal, for `Vocabulary.nearest_rival`."""


def render_remark(text: str, name: str, recorded: Recorded) -> str:
    """Returns a remark with its figures: paragraphs of one line each, with an empty line between two.

    Beside the calls of its own table, `of(table)` has those of another: `of('guild/steps-english').gain(...)`.

    Args:
        text: The template; the lines of a paragraph are joined.
        name: The table's name.
        recorded: The table, and all that it calls.

    Raises:
        DataError: the template is not one, calls something unknown, or names a table, row, column, score, cost or
            observation that the records do not have.
    """
    what = f"The remark of {name}"
    vocabulary = Vocabulary(what, *recorded[name])
    own = {call: getattr(vocabulary, call) for call in CALLS}
    return _rendered(text, what, {**own, "of": _of(what, recorded)})


def render_overview(text: str, name: str, recorded: Recorded) -> str:
    """Returns what a method's tables say together, with its figures; its one call is `of`, as in `render_remark`.

    Args:
        text: The template.
        name: The method's name, for messages.
        recorded: The tables that it calls.

    Raises:
        DataError: as `render_remark` does.
    """
    what = f"The overview of {name}"
    return _rendered(text, what, {"of": _of(what, recorded)})


def _of(what: str, recorded: Recorded) -> Callable[[str], Vocabulary]:
    """Returns the call that gives another table's vocabulary."""

    def of(table: str) -> Vocabulary:
        if table not in recorded:
            raise DataError(f"{what}: there are no records of '{table}'.", nearest(table, recorded))
        return Vocabulary(f"{what}, of('{table}')", *recorded[table])

    return of


def _rendered(text: str, what: str, calls: Mapping[str, Callable[..., object]]) -> str:
    """Returns a template's paragraphs, each in one line; the rows of a table of Markdown keep theirs."""
    environment = Environment(autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    try:
        rendered = environment.from_string(text).render(calls)
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(f"{what}: {error}.", f"It may call {', '.join(calls)}.") from error
    paragraphs = re.split(r"\n\s*\n", rendered.strip())
    return "\n\n".join(
        ("\n" if lines.lstrip().startswith("|") else " ").join(line.strip() for line in lines.splitlines())
        for lines in paragraphs
    )


class Figure(float):
    """A number with the text that it is written as."""

    text: str

    def __new__(cls, value: float, text: str) -> Self:
        """Returns the number with its text."""
        made = super().__new__(cls, value)
        made.text = text
        return made

    def __str__(self) -> str:
        return self.text


class Figures(tuple[Figure, ...]):
    """Figures of one kind, written as the smallest and the largest: `0.103 to 0.265`; once if both read alike."""

    def __str__(self) -> str:
        ends = dict.fromkeys(str(end) for end in (min(self), max(self)))
        return " to ".join(ends)


class Vocabulary:
    """What a remark can call; figures are means over the seeds.

    The column may be left out of a table that has one. Without a score it is the one that the table shows: of a row, or
    of the table where rows are compared.
    """

    def __init__(self, what: str, table: Table, records: Iterable[CellRecord]) -> None:
        self._what, self._table, self._records = what, table, list(records)

    def score(self, row: Names, column: Names = (), score: Names = (), digits: int = 3) -> Figures:
        """Returns a score from 0 to 1: `0.754`."""
        return self._means(row, column, score, scores_of, "score", digits)

    def perplexity(self, row: Names, column: Names = (), score: Names = (), digits: int = 2) -> Figures:
        """Returns the perplexity of the models that a score is of: `1.26`; over budgets, the geometric mean."""
        return self._means(row, column, score, perplexities, "perplexity of the score", digits)

    def gain(self, row: str, other: str, column: str = "", score: str = "", over: str = "") -> str:
        """Returns how much higher a row scores than another, with the 95 % interval: `0.075 ± 0.054`.

        Args:
            row: The row.
            other: The other row.
            column: The column.
            score: The score.
            over: The other row's score, where it is another one.
        """
        gaps = self._gaps(row, other, column, score, over)
        if len(gaps) != 1:
            raise self._error("gain is of one row over one other, mean_gain may be of several")
        return interval(gaps[0]).removeprefix("+")

    def mean_gain(
        self, row: Names, other: Names, column: Names = (), score: Names = (), over: str = "", digits: int = 3
    ) -> Figures:
        """Returns the mean of `gain` alone: `0.075`."""
        return Figures(_figure(gap.mean, digits) for gap in self._gaps(row, other, column, score, over))

    def half_width(
        self, row: Names, other: Names, column: Names = (), score: Names = (), over: str = "", digits: int = 3
    ) -> Figures:
        """Returns the half width of the 95 % interval of `gain` alone: `0.054`."""
        gaps = self._gaps(row, other, column, score, over)
        if any(gap.count < 2 for gap in gaps):
            raise self._error(f"{row} and {other} have one seed in common, which has no interval")
        return Figures(_figure(half_width(gap), digits) for gap in gaps)

    def nats(self, row: str, other: str, column: str = "", score: str = "", over: str = "") -> str:
        """Returns how many more nats per token a row's models lose than another's, with the interval: `−0.045 ± 0.014`.

        Less is better. The arguments are those of `gain`.
        """
        gaps = self._gaps(row, other, column, score, over, nats_per_token)
        if len(gaps) != 1:
            raise self._error("nats is of one row over one other")
        return interval(gaps[0]).removeprefix("+")

    def nearest_rival(
        self,
        row: str,
        column: str = "",
        score: str = "",
        over: str = "",
        without: Sequence[str] = (),
        *,
        among: Sequence[str] = (),
        at_any_cost: bool = False,
    ) -> str:
        """Returns the least `gain` over a row that costs no less, and that row: `0.052 ± 0.020 (fedex-lora)`.

        Costs are the bytes that a client sends and receives and its training FLOPs, as far as both rows have them; one
        that is less by no more than two per cent counts as equal. A row that lacks a seed of the first is left out.

        Args:
            row: The row.
            column: The column.
            score: The score.
            over: The other rows' score, where it is another one.
            without: Rows that are not compared, for example the row's own variants.
            among: The only rows that are compared; all without it.
            at_any_cost: Whether rows that cost less are compared, too.
        """
        for name in (*without, *among):
            self._require(name, self._table.rows, "row")
        place = self._column(column)
        seeds = {record.seed for record in self._cell(row, place)}
        recorded = by_row(self._table, [record for record in self._records if record.column == place])
        complete = [other for other, members in recorded.items() if seeds <= {record.seed for record in members}]
        gains = {}
        for other in complete:
            if other in {row, *without} or (among and other not in among):
                continue
            cells = {one: recorded[one] for one in (row, other)}
            ratios = [ratio for name in COSTS for ratio in ratios_of(cells, name, row, [other])]
            if at_any_cost or all(ratio < 1 + NEARLY for ratio in ratios):
                (gains[other],) = self._gaps(row, other, column, score, over)
        if not gains:
            raise self._error(f"every other row costs less than {row} in some way")
        least = min(gains, key=lambda name: gains[name].mean)
        return f"{interval(gains[least]).removeprefix('+')} ({least})"

    def cost(self, name: str, row: str, column: str = "", budget: str = "") -> str:
        """Returns what a client spends over the run: `163 MB`, `800 GFLOP`.

        Args:
            name: `up` or `down`, bytes, or `FLOPs`, of training.
            row: The row.
            column: The column.
            budget: The budget whose FLOPs are meant; without one, they are the mean over the budgets.
        """
        self._require(name, COSTS, "cost")
        members = self._cell(row, self._column(column))
        if budget:
            if name != "FLOPs":
                raise self._error(f"{name} is of all budgets, FLOPs may be of one")
            flops = [record.training_flops for record in members]
            self._require(budget, {one for of_seed in flops for one in of_seed}, "budget with FLOPs", row)
            known = [of_seed[budget] for of_seed in flops if budget in of_seed]
        else:
            known = [value for record in members if (value := cost_of(record, name)) is not None]
        if not known:
            raise self._error(f"{row} has no {name} on record")
        return (units.flops if name == "FLOPs" else units.byte_count)(fmean(known))

    def cost_ratio(self, name: str, row: str, other: str, column: str = "") -> str:
        """Returns how many times what another row spends a row does, as beside a claim: `1.94`."""
        self._require(name, COSTS, "cost")
        cells = {one: self._cell(one, self._column(column)) for one in (row, other)}
        if not (ratios := ratios_of(cells, name, row, [other])):
            raise self._error(f"{row} and {other} have {name} on record of no seed in common")
        return times(ratios[0])

    def observation(
        self,
        figure: str,
        row: Names,
        column: Names = (),
        at: End | Sequence[End] = "last",
        digits: int | None = None,
        percent: bool = False,
    ) -> Figures:
        """Returns a figure that a method reported: `0.259`, with three significant digits.

        Args:
            figure: The figure: `figure`, or `figure / column`.
            row: The row.
            column: The column.
            at: Whether of the first or the last of its rounds.
            digits: Decimals; None: three significant digits.
            percent: Whether it is written in per cent, without the sign.
        """
        found = []
        for one_row, one_column in product(_each(row), self._columns(column)):
            members = self._cell(one_row, one_column)
            known = {name for record in members for name in record.observations}
            self._require(figure, known, "observation", one_row)
            ends = first_and_last(record.observations.get(figure, {}) for record in members) or ()
            by_end = dict(zip(("first", "last"), ends, strict=True))
            for end in _each(at):
                self._require(end, by_end, "end", "an observation")
                value = by_end[end] * (100 if percent else 1)
                found.append(Figure(value, f"{value:.3g}") if digits is None else _figure(value, digits))
        return Figures(found)

    def _means(
        self,
        rows: Names,
        columns: Names,
        scores: Names,
        values: Callable[[CellRecord], Mapping[str, float]],
        kind: str,
        digits: int,
    ) -> Figures:
        found = []
        for row, column in product(_each(rows), self._columns(columns)):
            of_seeds = [values(record) for record in self._cell(row, column)]
            for score in _each(scores) or [self._table.scores[row]]:
                self._require(score, {name for of_seed in of_seeds for name in of_seed}, kind, row)
                found.append(_figure(fmean(of_seed[score] for of_seed in of_seeds if score in of_seed), digits))
        return Figures(found)

    def _gaps(
        self,
        rows: Names,
        others: Names,
        columns: Names,
        scores: Names,
        over: str,
        values: Callable[[CellRecord], Mapping[str, float]] = scores_of,
    ) -> list[Spread]:
        """Returns the paired differences of rows to others, by the code of the claims."""
        kind = "score" if values is scores_of else "perplexity of the score"
        gaps = []
        for column, row, other in product(self._columns(columns), _each(rows), _each(others)):
            cells = {one: self._cell(one, column) for one in (row, other)}
            for score in _each(scores) or [self._table.score]:
                for one, of in ((row, score), (other, over or score)):
                    self._require(of, {name for record in cells[one] for name in values(record)}, kind, one)
                gap = difference(cells, row, other, score, over or None, values=values)
                if gap is None:
                    raise self._error(f"{row} and {other} have no seed in common in {column}")
                gaps.append(gap)
        return gaps

    def _cell(self, row: str, column: str) -> list[CellRecord]:
        """Returns the records of a row in a column, of which there is at least one."""
        self._require(row, self._table.rows, "row")
        recorded = by_row(self._table, [record for record in self._records if record.column == column])
        if row not in recorded:
            raise self._error(f"row '{row}' has no records in {column}", f"Recorded there: {', '.join(recorded)}.")
        return recorded[row]

    def _column(self, column: str) -> str:
        """Returns the column wanted, or the only one."""
        return self._columns([column] if column else [])[0]

    def _columns(self, columns: Names) -> list[str]:
        """Returns the columns wanted; the only one where none is named."""
        wanted = _each(columns)
        for column in wanted:
            self._require(column, self._table.columns, "column")
        if not wanted and len(self._table.columns) > 1:
            raise self._error(
                "the table has several columns, and none is named", f"Known: {', '.join(self._table.columns)}."
            )
        return wanted or list(self._table.columns)

    def _require(self, name: str, known: Iterable[str], kind: str, owner: str = "the table") -> None:
        if name not in (choices := list(known)):
            raise self._error(f"{owner} has no {kind} '{name}'", nearest(name, choices))

    def _error(self, what: str, hint: str = "") -> DataError:
        return DataError(f"{self._what}: {what}.", hint)


CALLS = tuple(call for call in vars(Vocabulary) if not call.startswith("_"))
"""What a remark can call."""


def _each(names: Names) -> list[str]:
    """Returns the names; none for an empty one."""
    return [names] if isinstance(names, str) and names else list(names)


def _figure(value: float, digits: int) -> Figure:
    """Returns a number with so many decimals, with a true minus and without one before zeros."""
    text = f"{value:.{digits}f}"
    return Figure(value, text.replace("-", "\u2212" if float(text) else ""))
