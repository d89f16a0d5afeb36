"""Recorded cells of the papers' tables: a small JSON for each.

A record lies at `FOLDER/{table}/{column}/{row}/seed-{n}.json`. Nothing else is read for a page (`pages.py`),
so that it can be written again anywhere, in seconds, and a test can hold it equal to the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import fedguild
from fedguild.core.errors import DataError
from fedguild.core.files import write_text
from fedguild.core.score_names import MEAN, SUMMARIES
from fedguild.measuring.log.folder import MEANS, Run
from fedguild.report.costs import budget_costs, client_totals, mean_cost
from fedguild.report.observations import MOST_ROUNDS, evenly, observed_means
from fedguild.report.table_figures import CellScores
from fedguild.report.tables import run_table

USE = "use of experts"
"""The figure of every method on a mixture of experts: `use of experts / Gini` and `use of experts / entropy`."""


CPU = "CPU"
"""What a run's environment calls a machine without a GPU."""


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
        perplexity: Budget -> perplexity, where it was recorded and is finite; `trained`, `received`, `pooled` or
            `mtal` -> its mean over the clients with examples, where that is.
        nats: `trained`, `received`, `pooled` or `mtal` -> nats per token, the mean over clients with examples; older
            records have none.
        observations: Figure that the method or the diagnosis reported, `figure / column` where it has columns ->
            round -> mean over its rows, in up to six of the rounds that have it; of a figure with rows
            alone, their mean and `figure / row`.
        training_flops: Budget -> training FLOPs of one of its clients over the run.
        upload_bytes: Of a client over the run, mean over the clients; None where none trained.
        download_bytes: Alike.
        seconds: Wall time of its rounds, evaluation included, on the machine that ran it; None if not recorded.
        run_rounds: Rounds of the run that it is read from, where that goes on beyond `round`; else None.
        device: The device that it ran on, and the dtype of its model where that is no CPU.
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
    nats: dict[str, float] = Field(default_factory=dict)
    observations: dict[str, dict[int, float]] = Field(default_factory=dict)
    training_flops: dict[str, float] = Field(default_factory=dict)
    upload_bytes: float | None = None
    download_bytes: float | None = None
    seconds: float | None = None
    run_rounds: int | None = None
    device: str = CPU

    @property
    def drawn(self) -> CellScores:
        """What figures draw of it."""
        return CellScores(self.row, self.column, self.seed, self.scores, self.observations, nats_per_token(self))

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
        others: Value -> the run's other summaries, for a table that decides by another of them.
        together: Whether all rows of the table get one value, the best in the mean over them (`best_together`).
        repeats: Value -> fingerprint -> score of its runs with further seeds.
        chance: The score of guessing; None if the choice is not held against it.
        settings: The settings of these runs alone, such as fewer rounds.
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
    others: dict[str, dict[str, float]] = Field(default_factory=dict)
    together: bool = False
    repeats: dict[str, dict[str, float]] = Field(default_factory=dict)
    chance: float | None = None
    settings: tuple[str, ...] = ()

    def by_score(self, score: str) -> dict[str, float]:
        """Returns value -> a score of its run, of the values whose runs have it."""
        if score == self.score:
            return self.tried
        return {value: scores[score] for value, scores in self.others.items() if score in scores}

    @property
    def chosen(self) -> str:
        """The value with the highest mean score over the seeds; of equal ones the first that was tried."""
        means = self.means
        return max(means, key=lambda value: means[value])

    @property
    def means(self) -> dict[str, float]:
        """Value -> its mean score over the seeds."""
        return {value: fmean(self.over_seeds(value)) for value in self.tried}

    def over_seeds(self, value: str) -> list[float]:
        """Returns a value's score with each seed."""
        return [self.tried[value], *self.repeats.get(value, {}).values()]

    @property
    def is_near_chance(self) -> bool:
        """Whether the best value's mean is within its sample deviation over the seeds of chance.

        A choice by one seed has no deviation, so that nothing tells it from chance.
        """
        if self.chance is None:
            return False
        best = self.over_seeds(self.chosen)
        return len(best) < 2 or fmean(best) - self.chance <= stdev(best)

    def write(self, folder: Path) -> Path:
        """Writes the record; returns its file.

        Raises:
            FedGuildError: the file cannot be written.
        """
        path = choice_path(folder, self.table, self.row)
        write_text(path, self.model_dump_json(indent=1, exclude_defaults=True) + "\n")
        return path


def _use_of_experts(run: Run) -> dict[str, dict[int, float]]:
    """Returns the Gini coefficient and the entropy of all clients' use of the experts, by round, mean over layers.

    Every method has them, so that they compare.
    """
    found: dict[str, dict[int, float]] = {}
    for record in evenly(run.routing, MOST_ROUNDS):
        for name, values in (("Gini", record.gini), ("entropy", record.entropy)):
            found.setdefault(f"{USE} / {name}", {})[record.round] = float(f"{fmean(values):.6g}")
    return found


def mean_over_rows(choices: Sequence[ChoiceRecord]) -> dict[str, float]:
    """Returns value -> its mean score over the rows for which it was tried, of the values that all of them tried."""
    everywhere = [value for value in choices[0].tried if all(value in choice.tried for choice in choices)]
    return {value: fmean(choice.means[value] for choice in choices) for value in everywhere}


def best_together(choices: Sequence[ChoiceRecord]) -> str:
    """Returns the value with the highest mean score over the rows; of equal ones the first that was tried."""
    means = mean_over_rows(choices)
    return max(means, key=lambda value: means[value])


def nats_per_token(record: CellRecord) -> dict[str, float]:
    """Returns score -> the loss in nats per token of the reference responses, the logarithm of its perplexity.

    That of `mean` is the mean over the budgets where all of them have one; that of a mean over clients is the mean of
    theirs, and of an older record the logarithm of their mean perplexity.
    """
    nats = {name: math.log(perplexity) for name, perplexity in record.perplexity.items()} | record.nats
    budgets = [name for name in record.scores if name not in SUMMARIES]
    if budgets and all(name in nats for name in budgets):
        nats[MEAN] = fmean(nats[name] for name in budgets)
    return nats


def perplexities(record: CellRecord) -> dict[str, float]:
    """Returns score -> its perplexity; that of a mean is the geometric mean, except for clients of older records."""
    return {name: math.exp(nats) for name, nats in nats_per_token(record).items()}


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
    cost = mean_cost(client_totals(run))
    trained = {name: cost.training_flops for name, cost in budget_costs(run).items() if cost.training_flops is not None}
    perplexity = {row.budget.name: row.metrics["perplexity"] for row in found.rows if "perplexity" in row.metrics}
    nats = {}
    for scope, mean in MEANS.items():
        scored = [record for record in run.scored(scope, run.last_round).values() if record.examples]
        of_clients = [record.metrics["perplexity"] for record in scored if "perplexity" in record.metrics]
        if of_clients:
            perplexity[mean] = fmean(of_clients)
            nats[mean] = fmean(map(math.log, of_clients))
    perplexity = {name: value for name, value in perplexity.items() if math.isfinite(value)}
    device, dtype = run.environment.get("device", CPU), run.environment.get("dtype")
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
        scores=found.scores,
        perplexity=perplexity,
        nats={name: value for name, value in nats.items() if math.isfinite(value)},
        observations=observed_means(run) | _use_of_experts(run),
        training_flops=trained,
        upload_bytes=cost.upload_bytes if cost else None,
        download_bytes=cost.download_bytes if cost else None,
        seconds=round(sum(record.seconds for record in run.rounds), 1),
        device=device if device == CPU else f"{device}, {dtype}",
    )


def read_records(folder: Path) -> list[CellRecord]:
    """Returns all records below a folder, sorted by their files.

    Clients' nats are left out in a column where an older record lacks them, so that one quantity is compared.

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
    older = {
        (one.table, one.column)
        for one in records
        if not one.nats and not one.perplexity.keys().isdisjoint(MEANS.values())
    }
    return [one.model_copy(update={"nats": {}}) if (one.table, one.column) in older else one for one in records]
