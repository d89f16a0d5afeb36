"""Recorded cells of the papers' tables: a small JSON for each, and the pages that are written from them alone.

A record lies at `FOLDER/{table}/{column}/{row}/seed-{n}.json`. Nothing else is read for a page, so that it can be
written again anywhere, in seconds, and a test can hold it equal to the records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import fedguild
from fedguild.config.table import ONLY_COLUMN, Table
from fedguild.errors import DataError
from fedguild.evaluation.statistics import Spread, half_width, paired_difference, spread
from fedguild.files import write_text
from fedguild.report import units
from fedguild.report.costs import client_totals, mean_cost
from fedguild.report.grid import Cell, Grid
from fedguild.report.observations import observed
from fedguild.report.run_folder import MEANS, Run
from fedguild.report.tables import run_table
from fedguild.score_names import MEAN, MTAL, POOLED, RECEIVED, TITLES, TRAINED
from fedguild.server.run_log import ObservationRecord

Kept = TypeVar("Kept")
Word = Literal["holds", "does not hold", "undecided at this scale", "not recorded"]
SUMMARIES = (MEAN, TRAINED, RECEIVED, POOLED, MTAL)
"""Scores that are means over budgets or clients, in the order of their columns."""
MOST_ROUNDS = 6
"""Rounds of a figure that a record keeps: all of them, or so many, evenly spread from the first to the last."""
MOST_COLUMNS = 8
"""Columns of a figure that a record keeps apart; where there are more, one for each client or expert, their mean."""
_ROUNDING = 1e-9
"""A deviation of scores below this is rounding."""


class CellRecord(BaseModel):
    """What is kept of a cell's run.

    Attributes:
        table: The table's name.
        column: The column.
        row: The row.
        seed: The seed.
        fingerprint: Of the run's config; a record of another one is out of date.
        overrides: Settings on top of the table's, as on the command line.
        fedguild: The version that ran it (of its first part, where a run was resumed).
        round: The last evaluated round.
        split: What was scored.
        scores: Budget, `mean`, `trained`, `received`, `pooled` or `mtal` -> score after the round, from 0 to 1.
        perplexity: Budget -> perplexity, where it was recorded; `trained`, `received`, `pooled` or `mtal` -> its mean
            over the clients with examples.
        observations: Figure that the method or the diagnosis reported, `figure / column` where it has columns ->
            round -> mean over its rows, in up to `MOST_ROUNDS` of the rounds that have it.
        training_flops: Budget -> training FLOPs of one of its clients over the run.
        upload_bytes: Of a client over the run, mean over the clients; None where none trained.
        download_bytes: Alike.
        seconds: Wall time of its rounds, evaluation included, on the machine that ran it; None if not recorded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    table: str
    column: str
    row: str
    seed: int
    fingerprint: str
    overrides: tuple[str, ...] = ()
    fedguild: str
    round: int
    split: str
    scores: dict[str, float]
    perplexity: dict[str, float] = Field(default_factory=dict)
    observations: dict[str, dict[int, float]] = Field(default_factory=dict)
    training_flops: dict[str, float] = Field(default_factory=dict)
    upload_bytes: float | None = None
    download_bytes: float | None = None
    seconds: float | None = None

    def path(self, folder: Path) -> Path:
        """Returns where the record lies."""
        return record_path(folder, self.table, self.column, self.row, self.seed)

    def write(self, folder: Path) -> Path:
        """Writes the record; returns its file.

        Raises:
            FedGuildError: the file cannot be written.
        """
        path = self.path(folder)
        write_text(path, self.model_dump_json(indent=1, exclude_defaults=True) + "\n")
        return path


class ChoiceRecord(BaseModel):
    """A setting that was chosen for a row before its cells ran, by runs scored on the validation examples.

    Attributes:
        table: The table's name.
        row: The row.
        setting: The setting, dotted.
        column: The column in which it was tried.
        seed: The seed, which is none of the table's.
        score: The score that decided.
        tried: Value, as on the command line -> score on the validation examples.
        fingerprints: Value -> fingerprint of the run's config.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    table: str
    row: str
    setting: str
    column: str
    seed: int
    score: str
    tried: dict[str, float] = Field(min_length=1)
    fingerprints: dict[str, str]

    @property
    def chosen(self) -> str:
        """The value with the highest score; of equal ones the first that was tried."""
        return max(self.tried, key=lambda value: self.tried[value])

    def write(self, folder: Path) -> Path:
        """Writes the record; returns its file.

        Raises:
            FedGuildError: the file cannot be written.
        """
        path = choice_path(folder, self.table, self.row)
        write_text(path, self.model_dump_json(indent=1) + "\n")
        return path


def choice_path(folder: Path, table: str, row: str) -> Path:
    """Returns the file of what was chosen for a row."""
    return folder / table / "choices" / f"{row}.json"


def read_choices(folder: Path, table: str) -> list[ChoiceRecord]:
    """Returns what was chosen for the rows of a table, sorted by row.

    Raises:
        DataError: a file is not the record of a choice.
    """
    choices = []
    for path in sorted((folder / table / "choices").glob("*.json")):
        try:
            choices.append(ChoiceRecord.model_validate_json(path.read_bytes()))
        except ValidationError as error:
            raise DataError(f"{path} is not the record of a choice: {error.errors()[0]['msg']}.") from error
    return choices


def record_path(folder: Path, table: str, column: str, row: str, seed: int) -> Path:
    """Returns the file of a cell's record."""
    return folder / table / column / row / f"seed-{seed}.json"


def record_of(
    run: Run, table: str, column: str, row: str, fingerprint: str, overrides: Sequence[str] = ()
) -> CellRecord:
    """Returns the record of a finished run.

    Args:
        run: The run.
        table: The table's name.
        column: The cell's column.
        row: The cell's row.
        fingerprint: Of its config.
        overrides: Settings on top of the table's.
    """
    found = run_table(run)
    summaries = {name: getattr(found, name) for name in SUMMARIES}
    cost = mean_cost(totals.cost for totals in client_totals(run))
    trained = {
        row.budget.name: row.cost.training_flops
        for row in found.rows
        if row.cost and row.cost.training_flops is not None
    }
    perplexity = {row.budget.name: row.metrics["perplexity"] for row in found.rows if "perplexity" in row.metrics}
    for scope, mean in MEANS.items():
        scored = [record for record in run.scored(scope, run.last_round).values() if record.examples]
        of_clients = [record.metrics["perplexity"] for record in scored if "perplexity" in record.metrics]
        perplexity |= {mean: fmean(of_clients)} if of_clients else {}
    return CellRecord(
        table=table,
        column=column,
        row=row,
        seed=found.seed,
        fingerprint=fingerprint,
        overrides=tuple(overrides),
        fedguild=str(run.environment.get("fedguild", fedguild.__version__)),
        round=found.round,
        split=found.split,
        scores={
            **{row.budget.name: row.score for row in found.rows},
            **{name: value for name, value in summaries.items() if value is not None},
        },
        perplexity=perplexity,
        observations=_observed(run),
        training_flops=trained,
        upload_bytes=cost.upload_bytes if cost else None,
        download_bytes=cost.download_bytes if cost else None,
        seconds=round(sum(record.seconds for record in run.rounds), 1),
    )


def _observed(run: Run) -> dict[str, dict[int, float]]:
    """Returns `figure` or `figure / column` -> round -> the mean of its finite values, with six digits."""
    found: dict[str, dict[int, float]] = {}
    for series in sorted(observed(run), key=lambda one: one.name):
        for record in evenly(series.records, MOST_ROUNDS):
            for name, values in _by_column(record).items():
                if finite := [value for value in values if math.isfinite(value)]:
                    found.setdefault(name, {})[record.round] = float(f"{fmean(finite):.6g}")
    return found


def _by_column(record: ObservationRecord) -> dict[str, list[float]]:
    """Returns the values of a figure by column, or all of them where it has none or more than `MOST_COLUMNS`."""
    if not 0 < len(record.columns) <= MOST_COLUMNS:
        return {record.name: [value for row in record.values for value in row]}
    by_column = zip(*record.values, strict=True)
    return {f"{record.name} / {column}": list(values) for column, values in zip(record.columns, by_column, strict=True)}


def evenly(members: Sequence[Kept], most: int) -> list[Kept]:
    """Returns up to `most` members, evenly spread, the first and the last among them."""
    if len(members) <= most:
        return list(members)
    return [members[round(place * (len(members) - 1) / (most - 1))] for place in range(most)]


def read_records(folder: Path) -> list[CellRecord]:
    """Returns all records below a folder, sorted by their files.

    Raises:
        DataError: a file is not a record, or lies at another one's place.
    """
    records = []
    for path in sorted(folder.rglob("seed-*.json")):
        try:
            record = CellRecord.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise DataError(f"{path} is not a record: {error.errors()[0]['msg']}.") from error
        if record.path(folder) != path:
            raise DataError(f"{path} is the record of {record.table}, {record.column}, {record.row}, {record.seed}.")
        records.append(record)
    return records


def table_page(
    name: str, description: str, table: Table, records: Sequence[CellRecord], choices: Sequence[ChoiceRecord] = ()
) -> str:
    """Returns a table as Markdown: scores, paired differences, what the seeds could have shown, and the claims.

    Args:
        name: The table's name.
        description: What it is.
        table: The table.
        records: Its records.
        choices: What was chosen for its rows.
    """
    parts = [f"### {description}\n", f"`{_command(name, records)}`\n"]
    parts += [f"{_chosen(choices)}\n"] if choices else []
    parts += [f"{sentence}\n" for sentence in _duration(records)]
    for column in table.columns:
        cells = by_row(table, [record for record in records if record.column == column])
        if not cells:
            continue
        parts += [f"#### {column}\n"] if column != ONLY_COLUMN else []
        parts.append(score_grid(cells, table.shows).to_markdown())
        differences = difference_grid(cells, table.reference)
        if differences is not None:
            parts.append(differences.to_markdown())
        parts.append(f"{_resolution(cells, table)}\n")
    if table.claims:
        parts.append(claims_markdown(table, records))
    return "\n".join(parts)


def claims_markdown(table: Table, records: Sequence[CellRecord]) -> str:
    """Returns a table of the claims: for each of its columns a word, and the differences that it rests on."""
    lines = [
        "| claim | column | verdict | seeds | differences, 95 % interval |",
        "| :--- | :--- | :--- | ---: | :--- |",
    ]
    for claim in table.claims:
        for column in claim.columns or table.columns:
            cells = by_row(table, [record for record in records if record.column == column])
            score = claim.score or table.score
            found = {row: difference(cells, claim.higher, row, score) for row in claim.lower}
            shown = "; ".join(f"− {row}: {_interval(gap)}" for row, gap in found.items())
            where = "" if column == ONLY_COLUMN else column
            word = f"**{verdict(found.values())}**{_reservation(found.values())}"
            lines.append(f"| {claim.says} | {where} | {word} | {_seeds(found.values())} | {shown} |")
    return "\n".join([*lines, ""])


def _reservation(differences: Iterable[Spread | None]) -> str:
    """Returns what a verdict is to be read with: one seed shows no spread, and some differences do not vary."""
    known = [gap for gap in differences if gap is not None]
    if any(gap.count == 1 for gap in known):
        return ", with one seed"
    return ", without any spread over the seeds" if any(_is_constant(gap) for gap in known) else ""


def _is_constant(gap: Spread) -> bool:
    """Whether several seeds gave one and the same difference, which leaves the interval without a width."""
    return gap.count > 1 and gap.std < _ROUNDING


def _seeds(differences: Iterable[Spread | None]) -> str:
    """Returns how many seeds a verdict rests on: 5, or 3 to 5 where the differences have unequally many."""
    counts = sorted({0 if gap is None else gap.count for gap in differences})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def verdict(differences: Iterable[Spread | None]) -> Word:
    """Returns what the paired differences of a row to those that it should be above say.

    It holds where every difference's 95 % interval lies above 0, and does not where some interval lies below it.
    """
    every = list(differences)
    if not every or any(gap is None for gap in every):
        return "not recorded"
    ends = [(gap.mean - half_width(gap), gap.mean + half_width(gap)) for gap in every if gap is not None]
    if all(low > 0 for low, _ in ends):
        return "holds"
    return "does not hold" if any(high < 0 for _, high in ends) else "undecided at this scale"


def by_row(table: Table, records: Sequence[CellRecord]) -> dict[str, list[CellRecord]]:
    """Returns row -> its records, in the table's order; rows without records are left out."""
    rows = {row: [record for record in records if record.row == row] for row in table.rows}
    return {row: members for row, members in rows.items() if members}


def difference(cells: Mapping[str, Sequence[CellRecord]], row: str, other: str, score: str) -> Spread | None:
    """Returns the spread of the seedwise differences of two rows in a score; None without a seed that both have."""
    first, second = (
        {record.seed: record.scores[score] for record in cells.get(name, ()) if score in record.scores}
        for name in (row, other)
    )
    shared = first.keys() & second.keys()
    if not shared:
        return None
    return paired_difference({seed: first[seed] for seed in shared}, {seed: second[seed] for seed in shared})


def score_grid(cells: Mapping[str, Sequence[CellRecord]], shows: Sequence[str] = ()) -> Grid:
    """Returns rows × scores, figures, perplexity and costs: the mean over seeds, with the sample deviation of scores.

    Args:
        cells: Row -> its records.
        shows: The figures to show: `figure`, or `figure / column`.
    """
    columns = _columns(cells)
    perplexed = [name for name in columns if any(name in record.perplexity for record in _all(cells))]
    smallest = _smallest_budget(cells)
    header = [Cell("row"), *(Cell(TITLES.get(name, name)) for name in columns)]
    header += [Cell(name) for name in shows]
    header += [Cell("perplexity", name) for name in perplexed]
    header += [Cell("training FLOPs", smallest)] if smallest else []
    header += [Cell("up"), Cell("down"), Cell("seeds")]
    body = []
    for row, members in cells.items():
        line = [Cell(row)]
        for name in columns:
            scored = [record.scores[name] for record in members if name in record.scores]
            line.append(Cell(units.score_spread(spread(scored) if scored else None), strong=_best(cells, name) == row))
        line += [Cell(_first_to_last([record.observations.get(name, {}) for record in members])) for name in shows]
        for name in perplexed:
            line.append(Cell(_mean_of([record.perplexity[name] for record in members if name in record.perplexity])))
        if smallest:
            flops = [record.training_flops[smallest] for record in members if smallest in record.training_flops]
            line.append(Cell(units.si(fmean(flops) if flops else None)))
        for sizes in ([record.upload_bytes for record in members], [record.download_bytes for record in members]):
            known = [size for size in sizes if size is not None]
            line.append(Cell(units.byte_count(fmean(known) if known else None)))
        line.append(Cell(str(len(members))))
        body.append(tuple(line))
    last = next(iter(_all(cells)))
    title = f"{last.split.capitalize()} scores after round {last.round}, mean ± sample deviation over the seeds"
    title += "; figures in the first → the last round" if shows else ""
    return Grid(title, tuple(header), tuple(body))


def difference_grid(cells: Mapping[str, Sequence[CellRecord]], reference: str) -> Grid | None:
    """Returns rows × scores: the mean difference to the reference, paired by seed, with its 95 % interval.

    None where the reference, or every other row, has no record.
    """
    others = [row for row in cells if row != reference]
    if reference not in cells or not others:
        return None
    columns = _columns(cells)
    body = [
        (Cell(f"{row} − {reference}"), *(Cell(_interval(difference(cells, row, reference, name))) for name in columns))
        for row in others
    ]
    header = (Cell("difference"), *(Cell(TITLES.get(name, name)) for name in columns))
    return Grid("Paired by seed, with the 95 % interval", header, tuple(body))


def smallest_shown(cells: Mapping[str, Sequence[CellRecord]], reference: str, score: str) -> float | None:
    """Returns the smallest mean difference to the reference that the seeds could have shown.

    It is the half width of the 95 % interval at the typical spread: the root mean square over the rows of the deviation
    of their paired differences. None with fewer than two seeds.
    """
    gaps = [difference(cells, row, reference, score) for row in cells if row != reference]
    known = [gap for gap in gaps if gap is not None and gap.count > 1]
    if not known:
        return None
    typical = math.sqrt(fmean(gap.std**2 for gap in known))
    return half_width(Spread(0.0, typical, min(gap.count for gap in known)))


def _resolution(cells: Mapping[str, Sequence[CellRecord]], table: Table) -> str:
    found = smallest_shown(cells, table.reference, table.score)
    if found is None:
        return "One seed, or none in common, cannot show any difference."
    if found < _ROUNDING:
        return "The differences are the same in every seed, which leaves open what these seeds could have shown."
    return (
        f"The smallest difference in the {TITLES[table.score]} score that these seeds could have shown is {found:.3f}."
    )


def _command(name: str, records: Sequence[CellRecord]) -> str:
    """Returns the command with the settings that all records share; `_chosen` has those of single rows."""
    every = [record.overrides for record in records]
    overrides = [override for override in (every[0] if every else ()) if all(override in each for each in every)]
    seeds = ",".join(str(seed) for seed in sorted({record.seed for record in records}))
    return " ".join(["fedguild compare", name, *overrides, f"--seeds {seeds}"])


def _duration(records: Sequence[CellRecord]) -> list[str]:
    """Returns a sentence on how long the runs took, where that is recorded."""
    seconds = [record.seconds for record in records if record.seconds is not None]
    if not seconds:
        return []
    which = f"These {len(seconds)} runs" if len(seconds) == len(records) else f"{len(seconds)} of these runs"
    return [f"{which} took {units.duration(sum(seconds))} in all, one after the other."]


def _first_to_last(figures: Sequence[Mapping[int, float]]) -> str:
    """Returns a figure's mean over the seeds in the first and the last of its rounds: `0.31 → 0.74`."""
    ends = [(min(rounds), max(rounds)) for rounds in figures if rounds]
    if not ends:
        return units.MISSING
    known = [rounds for rounds in figures if rounds]
    first, last = (fmean(rounds[end[place]] for rounds, end in zip(known, ends, strict=True)) for place in (0, 1))
    return f"{last:.3g}" if all(start == end for start, end in ends) else f"{first:.3g} → {last:.3g}"


def _chosen(choices: Sequence[ChoiceRecord]) -> str:
    """Returns sentences for each way of choosing: the values that were tried, the rows' best, and which are ends."""
    ways: dict[tuple[str, ...], list[ChoiceRecord]] = {}
    for choice in choices:
        way = (choice.setting, ", ".join(choice.tried), choice.score, choice.column, str(choice.seed))
        ways.setdefault(way, []).append(choice)
    sentences = []
    for (setting, values, score, column, seed), members in ways.items():
        where = "" if column == ONLY_COLUMN else f", {column}"
        found = "; ".join(f"{choice.row} {choice.chosen}" for choice in members)
        sentences.append(
            f"`{setting}` was chosen for each row before, among {values}, by the {TITLES.get(score, score)} score on "
            f"the validation examples (seed {seed}{where}): {found}."
        )
        for end, name in ((max, "largest"), (min, "smallest")):
            edge = end((value for value in members[0].tried if _is_number(value)), key=float, default=None)
            rows = [choice.row for choice in members if len(choice.tried) > 1 and choice.chosen == edge]
            if rows:
                sentences.append(f"{', '.join(rows)} chose the {name} value offered; nothing beyond it was tried.")
    return "\n".join(sentences)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _columns(cells: Mapping[str, Sequence[CellRecord]]) -> list[str]:
    """Returns the budgets in the order of the records, then the summaries that some record has."""
    names = {name: None for record in _all(cells) for name in record.scores}
    budgets = [name for name in names if name not in SUMMARIES]
    return budgets + [name for name in SUMMARIES if name in names and (name != "mean" or len(budgets) != 1)]


def _all(cells: Mapping[str, Sequence[CellRecord]]) -> list[CellRecord]:
    return [record for members in cells.values() for record in members]


def _best(cells: Mapping[str, Sequence[CellRecord]], score: str) -> str | None:
    means = {
        row: fmean(scored)
        for row, members in cells.items()
        if (scored := [record.scores[score] for record in members if score in record.scores])
    }
    return max(means, key=lambda row: means[row]) if len(means) > 1 else None


def _smallest_budget(cells: Mapping[str, Sequence[CellRecord]]) -> str:
    """Returns the budget whose clients train with the fewest FLOPs; empty where none is known."""
    flops: dict[str, list[float]] = {}
    for record in _all(cells):
        for budget, value in record.training_flops.items():
            flops.setdefault(budget, []).append(value)
    return min(flops, key=lambda budget: min(flops[budget]), default="")


def _interval(gap: Spread | None) -> str:
    if gap is None:
        return units.MISSING
    return f"{units.signed(gap.mean)} ± {half_width(gap):.3f}" if gap.count > 1 else units.signed(gap.mean)


def _mean_of(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" if values else units.MISSING
