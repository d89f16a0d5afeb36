"""Runs the papers' tables that `docs/methods/records/plan.yaml` lists, and records every cell as soon as it is done.

    python -m tools.records.tables [TABLE …] [--data DIR] [--jobs N]  # run and record what is missing
    python -m tools.records.tables TABLE --rows ROW,ROW [--discard]   # some rows; remove each run once it is recorded
    python -m tools.records.tables [TABLE …] --list                   # list what is missing, and how long it takes

Without --data, `../shared/data` is the folder of the data sets where it exists.

Where the plan says `choose`, a setting of each row is chosen first, by runs of a seed of their own that are scored on
the validation examples; with `together`, all rows get the value that is best in the mean over them. With `repeats`
every value is tried with those seeds as well, and the best in the mean over the seeds is taken; `settings` are those of
the choice's runs alone, such as fewer rounds. With `chance`, the score of guessing, a choice is refused whose best
value is within its spread over the seeds of chance: the row's cells do not run. A table of the same runs on validation
examples, such as flame/rates-smollm2, spares a choice its own. A run that another table has recorded with the very same
settings is not run again, and where the plan says `longer`, a column of fewer rounds is read from the runs of one of
more. The pages are written by `tools/generate.py`, which reads the records and nothing else.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fedguild.config import Config, load_config, table_cells, tables
from fedguild.config.table import TableCell, require_claimed_scores
from fedguild.core.errors import ConfigError
from fedguild.core.score_names import SUMMARIES
from fedguild.measuring.log.folder import load_run
from fedguild.runs.api.launch import Launch
from fedguild.runs.api.run_grid import Cell, plan_grid, table_rows
from tools.records.cells import (
    CPU,
    CellRecord,
    ChoiceRecord,
    best_together,
    choice_path,
    read_records,
    record_of,
    record_path,
)

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "methods" / "records"
RUNS = ROOT / "runs"
DATA = "$DATA"
"""Stands in the plan for the folder of `--data`, and in the records too."""
USUAL_DATA = ROOT.parent / "shared" / "data"
"""The folder of the data sets where none is given and this one exists."""
OF_LENGTH = ("federation.rounds=", "evaluation.every=", "evaluation.eval_on_start=")
"""Settings of how long a run is, which leave a round as long as it was, nearly."""


@dataclass(frozen=True)
class Planned:
    """A run of a table: a cell to record, or a candidate for a row's setting.

    Attributes:
        table: The table.
        column: The cell's column.
        overrides: The settings on top of the table's, as they are recorded.
        fingerprint: Of the config with the settings as they are recorded.
        cell: The config and the run.
        until: The round that is recorded, where the run goes on beyond it; None for its last.
    """

    table: str
    column: str
    overrides: tuple[str, ...]
    fingerprint: str
    cell: Cell
    until: int | None = None

    @property
    def path(self) -> Path:
        """Where its record lies."""
        return record_path(RECORDS, self.table, self.column, self.cell.config.name, self.cell.config.seed)

    def is_recorded(self) -> bool:
        """Returns whether there is a record of this very config, in the present form."""
        try:
            return CellRecord.model_validate_json(self.path.read_bytes()).fingerprint == self.fingerprint
        except (FileNotFoundError, ValidationError):
            return False

    def record(self) -> Path:
        """Writes the record of the finished run."""
        return self.recorded().write(RECORDS)

    def record_as(self, other: CellRecord) -> Path:
        """Writes the record of another table's run with the same settings as that of this one."""
        own = {"table": self.table, "column": self.column, "row": self.cell.config.name, "overrides": self.overrides}
        return other.model_copy(update=own).write(RECORDS)

    def recorded(self) -> CellRecord:
        """Returns the record of the finished run."""
        run = load_run(self.cell.folder)
        run = run if self.until is None else run.until(self.until)
        found = record_of(run, self.table, self.column, self.cell.config.name, self.fingerprint, self.overrides)
        run_rounds = None if self.until is None else self.cell.config.federation.rounds
        return found.model_copy(update={"run_rounds": run_rounds})


@dataclass(frozen=True)
class Plan:
    """What the plan says of a table.

    Attributes:
        name: The table.
        settings: Its entry.
        data: The folder of the data sets; None if not given.
    """

    name: str
    settings: Mapping[str, Any]
    data: Path | None = None

    @cached_property
    def table(self) -> Any:
        """The table's content."""
        content = next(table for table in tables() if table.name == self.name).load()
        require_claimed_scores(self.name, content)
        return content

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings of all cells."""
        return tuple(self.settings.get("settings", ()))

    def overrides_in(self, column: str, overrides: Sequence[str]) -> tuple[str, ...]:
        """Returns the settings of a run in a column: those of the column, where the plan has some, below the others."""
        return (*self.settings.get("columns", {}).get(column, ()), *overrides)

    @property
    def longer(self) -> Mapping[str, str]:
        """Column -> the column of more rounds whose runs it is read from."""
        return dict(self.settings.get("longer", {}))

    @cached_property
    def pace_settings(self) -> tuple[str, frozenset[str]]:
        """What a round's time depends on: the model, and the settings of the plan but for those of the length."""
        cell = next(iter(self.cells_by_place))
        settings = frozenset(one for one in self.overrides if not one.startswith(OF_LENGTH))
        return self.config(*cell, self.seeds[0], self.overrides).model.path, settings

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of every cell."""
        return tuple(self.settings.get("seeds", self.table.seeds))

    def needs_data(self) -> bool:
        """Returns whether a setting names the data folder."""
        columns = self.settings.get("columns", {}).values()
        return any(DATA in override for overrides in (self.overrides, *columns) for override in overrides)

    def runs(
        self, rows: Sequence[str], columns: Sequence[str], overrides: Sequence[str], seeds: Sequence[int], folder: str
    ) -> list[Planned]:
        """Returns the runs of some rows, columns and seeds, below a folder of `runs/`."""
        found = []
        for column in columns:
            of_column = self.overrides_in(column, overrides)
            # Where no data folder is given nothing runs, and the placeholder may stay.
            given = [override.replace(DATA, str(self.data or DATA)) for override in of_column]
            cells = [self.cells_by_place[row, column] for row in rows]
            for cell in plan_grid(table_rows(cells), seeds, RUNS / folder, given).cells:
                fingerprint = self.fingerprint(cell.config.name, column, cell.config.seed, tuple(overrides))
                found.append(Planned(self.name, column, of_column, fingerprint, cell))
        return found

    def runs_that_go_on(self, row: str, overrides: Sequence[str], folder: str) -> list[Planned]:
        """Returns the cells of a row whose columns are read from the runs of a longer one.

        Raises:
            SystemExit: the two differ in more than their length and in when they are evaluated, or the longer one is
                not evaluated where the other ends.
        """
        found = []
        for column, longer in self.longer.items():
            of_column = self.overrides_in(column, overrides)
            for one in self.runs([row], [longer], overrides, self.seeds, folder):
                own, its = (self.config(row, name, one.cell.config.seed, overrides) for name in (column, longer))
                require_longer(f"{self.name}: {column} is read from {longer}", own, its)
                fingerprint, until = own.fingerprint(), own.federation.rounds
                found.append(replace(one, column=column, overrides=of_column, fingerprint=fingerprint, until=until))
        return found

    def candidates(self, row: str) -> dict[str, Planned]:
        """Returns value -> the run that tries it for a row; none where nothing is chosen."""
        choose = self.settings.get("choose")
        if choose is None:
            return {}
        tried = {}
        for value in map(str, choose["values"]):
            overrides = self.candidate_overrides(value)
            folder = f"{self.name.replace('/', '-')}/choices/{value}"
            (tried[value],) = self.runs([row], [choose["column"]], overrides, [choose["seed"]], folder)
        return tried

    def repeats(self, row: str) -> dict[str, list[Planned]]:
        """Returns value -> the runs that try it for a row again, with the further seeds of the plan."""
        choose = self.settings.get("choose", {"values": ()})
        again: dict[str, list[Planned]] = {}
        for value in map(str, choose["values"]):
            folder = f"{self.name.replace('/', '-')}/choices/{value}"
            overrides, seeds = self.candidate_overrides(value), choose.get("repeats", ())
            again[value] = self.runs([row], [choose["column"]], overrides, seeds, folder) if seeds else []
        return again

    def is_refused(self, row: str) -> bool:
        """Whether a row's own choice is refused: its best value is within its spread over the seeds of chance."""
        choice = None if self.chooses_together else self.choice(row)
        return choice is not None and choice.is_near_chance

    def choice(self, row: str) -> ChoiceRecord | None:
        """Returns what was chosen for a row, if by runs that the plan names: by all of them, or before it had more."""
        path = choice_path(RECORDS, self.name, row)
        if "choose" not in self.settings or not path.is_file():
            return None
        choice = ChoiceRecord.model_validate_json(path.read_bytes())
        return choice if choice.fingerprints.items() <= self.tried(row).items() else None

    def tried(self, row: str) -> dict[str, str]:
        """Returns value -> fingerprint of the run that tries it for a row; none where nothing is chosen."""
        choose = self.settings.get("choose", {"values": ()})
        return {
            value: self.fingerprint(row, choose["column"], choose["seed"], self.candidate_overrides(value))
            for value in map(str, choose["values"])
        }

    def is_chosen(self, row: str) -> bool:
        """Returns whether a row's setting was chosen among all the values that the plan has now."""
        choice = self.choice(row)
        if choice is None or choice.tried.keys() != set(map(str, self.settings["choose"]["values"])):
            return False
        again = {value: {one.fingerprint for one in runs} for value, runs in self.repeats(row).items()}
        return all(wanted <= choice.repeats.get(value, {}).keys() for value, wanted in again.items())

    def row_overrides(self, row: str) -> tuple[str, ...] | None:
        """Returns the settings of a row's cells; None where one is still to be chosen."""
        if "choose" not in self.settings:
            return self.overrides
        choices = [self.choice(one) for one in (self.table.rows if self.chooses_together else [row])]
        found = [choice for choice in choices if choice is not None]
        if len(found) < len(choices):
            return None
        return (*self.overrides, f"{found[0].setting}={best_together(found)}")

    @property
    def chooses_together(self) -> bool:
        """Whether one value is chosen for all rows, the best in the mean over them."""
        return bool(self.settings.get("choose", {}).get("together", False))

    def candidate_overrides(self, value: str) -> tuple[str, ...]:
        """Returns the settings of a run that tries a value."""
        choose = self.settings["choose"]
        return (
            *self.overrides,
            *choose.get("settings", ()),
            "evaluation.split=validation",
            f"{choose['setting']}={value}",
        )

    @cached_property
    def fingerprint(self) -> Callable[[str, str, int, tuple[str, ...]], str]:
        """Returns the fingerprint of a cell's config, given its row, its column, its seed and its settings."""
        return cache(lambda row, column, seed, overrides: self.config(row, column, seed, overrides).fingerprint())

    def config(self, row: str, column: str, seed: int, overrides: Sequence[str]) -> Config:
        """Returns a cell's config, which is not held against its model."""
        cell, of_column = self.cells_by_place[row, column], self.overrides_in(column, overrides)
        return load_config(cell.preset, [*of_column, f"seed={seed}"], between=cell.layers)

    @cached_property
    def cells_by_place(self) -> dict[tuple[str, str], TableCell]:
        """Row and column -> the table's cell.

        Raises:
            SystemExit: the plan has settings of a column that the table does not have.
        """
        named = {*self.settings.get("columns", {}), *self.longer, *self.longer.values()}
        if unknown := sorted(named - self.table.columns.keys()):
            raise SystemExit(f"{self.name}: the plan has settings of {unknown[0]}, no column of it.")
        return {(cell.row, cell.column): cell for cell in table_cells(self.name, self.table)}

    def is_current(self, record: CellRecord) -> bool:
        """Returns whether a record of this table is that of a planned cell as it is configured now."""
        if (record.row, record.column) not in self.cells_by_place or record.seed not in self.seeds:
            return False
        overrides = self.row_overrides(record.row)
        if overrides is None:
            return False
        return record.fingerprint == self.fingerprint(record.row, record.column, record.seed, overrides)

    def score_to_choose_by(self, row: str) -> str:
        """Returns the score that decides between a row's candidates."""
        return str(self.settings["choose"].get("score", self.table.scores[row]))

    def untried(self, row: str) -> list[Planned]:
        """Returns the candidates of a row that no table has tried."""
        known = tried_before(self.score_to_choose_by(row))
        again = (one for runs in self.repeats(row).values() for one in runs)
        return [one for one in (*self.candidates(row).values(), *again) if one.fingerprint not in known]

    def chosen(self, row: str) -> Path:
        """Writes the record of what was chosen for a row, from its finished candidates."""
        choose, candidates, score = self.settings["choose"], self.candidates(row), self.score_to_choose_by(row)
        known = tried_before(score)
        ran = {value: one.recorded().scores for value, one in candidates.items() if one.fingerprint not in known}
        repeats = {
            value: {
                one.fingerprint: known[one.fingerprint] if one.fingerprint in known else one.recorded().scores[score]
                for one in runs
            }
            for value, runs in self.repeats(row).items()
            if runs
        }
        tried = {
            value: ran[value][score] if value in ran else known[one.fingerprint] for value, one in candidates.items()
        }
        return ChoiceRecord(
            table=self.name,
            row=row,
            setting=choose["setting"],
            column=choose["column"],
            seed=choose["seed"],
            score=score,
            tried=tried,
            fingerprints={value: one.fingerprint for value, one in candidates.items()},
            others=(before.others if (before := self.choice(row)) else {})
            | {
                value: {name: found for name, found in scores.items() if name in SUMMARIES and name != score}
                for value, scores in ran.items()
            },
            together=self.chooses_together,
            repeats=repeats,
            chance=choose.get("chance"),
            settings=tuple(choose.get("settings", ())),
        ).write(RECORDS)

    def cells(self) -> list[Planned]:
        """Returns the cells to record, of all rows for which a setting has been chosen where one is to be."""
        columns, folder, found = list(self.table.columns), self.name.replace("/", "-"), []
        with_runs = [column for column in columns if column not in self.longer]
        for row in self.table.rows:
            overrides = self.row_overrides(row)
            if overrides is not None and not self.is_refused(row):
                found += self.runs([row], with_runs, overrides, self.seeds, folder)
                found += self.runs_that_go_on(row, overrides, folder)
        return sorted(found, key=lambda one: (columns.index(one.column), one.cell.config.seed))


def require_longer(what: str, short: Config, long: Config) -> None:
    """Checks that a run can be read as one of fewer rounds.

    Raises:
        SystemExit: it cannot.
    """
    rounds, every = short.federation.rounds, long.evaluation.every
    if rounds > long.federation.rounds or (rounds % every and rounds != long.federation.rounds):
        raise SystemExit(f"{what}, which is not evaluated after round {rounds}, but every {every} rounds.")
    if short.training.round_schedule != "constant":
        raise SystemExit(f"{what}, but the learning rate's schedule is over all rounds of a run.")
    if short.evaluation.diagnostics != long.evaluation.diagnostics or _but_for_length(short) != _but_for_length(long):
        raise SystemExit(f"{what}, but their settings differ in more than the number of rounds.")


def _but_for_length(config: Config) -> str:
    """Returns the fingerprint of a config's settings but for how long it runs and when it is evaluated."""
    federation = config.federation.model_copy(update={"rounds": 1})
    evaluation = config.evaluation.model_copy(update={"every": 1, "eval_on_start": False})
    return config.model_copy(update={"federation": federation, "evaluation": evaluation}).fingerprint()


def plans(wanted: Sequence[str] = (), data: Path | None = None) -> list[Plan]:
    """Returns the planned tables, or some of them.

    Raises:
        SystemExit: a wanted table is not in the plan.
    """
    plan = yaml.safe_load((RECORDS / "plan.yaml").read_text("utf-8"))
    for name in wanted:
        if name not in plan:
            raise SystemExit(f"{name} is not in {RECORDS / 'plan.yaml'}, which has {', '.join(plan)}.")
    return [Plan(name, plan[name] or {}, data) for name in wanted or plan]


def planned(wanted: Sequence[str] = ()) -> list[Planned]:
    """Returns the cells of the planned tables, or of some of them.

    Raises:
        SystemExit: a wanted table is not in the plan.
    """
    return [cell for plan in plans(wanted) for cell in plan.cells()]


def outdated() -> list[CellRecord]:
    """Returns the records that are not those of a planned cell as it is configured now."""
    known = {plan.name: plan for plan in plans()}
    return [one for one in read_records(RECORDS) if one.table not in known or not known[one.table].is_current(one)]


def tried_before(score: str) -> dict[str, float]:
    """Returns fingerprint -> score of the runs on validation examples, of tables and of choices."""
    validated = (one for one in valid_records() if one.split == "validation" and score in one.scores)
    found = {one.fingerprint: one.scores[score] for one in validated}
    for path in RECORDS.rglob("choices/*.json"):
        choice = ChoiceRecord.model_validate_json(path.read_bytes())
        found |= {choice.fingerprints[value]: tried for value, tried in choice.by_score(score).items()}
        if choice.score == score:
            found |= {fingerprint: tried for runs in choice.repeats.values() for fingerprint, tried in runs.items()}
    return found


def finish(runs: Sequence[Planned], jobs: int) -> None:
    """Completes runs; a folder of one whose settings have changed since is begun anew."""
    by_folder = {one.cell.folder: one.cell for one in runs}  # cells that are read from one run have one folder
    for folder, cell in by_folder.items():
        try:
            cell.state()
        except ConfigError:
            print(f"{folder.relative_to(ROOT)} held other settings and is removed.", flush=True)
            shutil.rmtree(folder)
    Launch(jobs, tell=print).complete_cells(list(by_folder.values()))


def valid_records() -> list[CellRecord]:
    """Returns the records of the present form; one of an older form is recorded again from its run."""
    found = []
    for path in sorted(RECORDS.rglob("seed-*.json")):
        with suppress(ValidationError):
            found.append(CellRecord.model_validate_json(path.read_bytes()))
    return found


def run(plan: Plan, jobs: int, rows: Sequence[str] = (), *, discard: bool = False) -> None:
    """Chooses what is to be chosen, runs and records what is missing of a table, seed after seed.

    Args:
        plan: The table's plan.
        jobs: Runs at the same time.
        rows: The rows that are run; all if empty.
        discard: Whether a run's folder is removed as soon as all that is read from it is recorded.

    Raises:
        SystemExit: the table has no such row.
    """
    if unknown := sorted(set(rows) - plan.table.rows.keys()):
        raise SystemExit(f"{plan.name} has no row {unknown[0]}, but {', '.join(plan.table.rows)}.")
    wanted = rows or tuple(plan.table.rows)
    to_choose = tuple(plan.table.rows) if plan.chooses_together else wanted
    for row in to_choose if "choose" in plan.settings else ():
        if not plan.is_chosen(row):
            untried = plan.untried(row)
            finish(untried, jobs)
            print(f"recorded {plan.chosen(row).relative_to(ROOT)}", flush=True)
            if discard:
                remove(untried)
    for row in wanted:
        if plan.is_refused(row):
            print(
                f"{plan.name}, {row}: refused, its best value is within its spread over the seeds of chance.",
                flush=True,
            )
    missing = [one for one in plan.cells() if one.cell.config.name in wanted and not one.is_recorded()]
    known = {record.fingerprint: record for record in valid_records()}
    for one in missing:
        # The diagnosis is no part of the fingerprint, as it changes nothing but what is observed.
        if one.fingerprint in known and not one.cell.config.evaluation.diagnostics:
            same = known[one.fingerprint]
            print(f"recorded {one.record_as(same).relative_to(ROOT)}, the run of {same.table}", flush=True)
    missing = [one for one in missing if not one.is_recorded()]
    for start in range(0, len(missing), jobs):
        several = missing[start : start + jobs]
        finish(several, jobs)
        for one in several:
            print(f"recorded {one.record().relative_to(ROOT)}", flush=True)
        if discard:
            read_later = {one.cell.folder for one in missing[start + jobs :]}
            remove([one for one in several if one.cell.folder not in read_later])


def remove(runs: Sequence[Planned]) -> None:
    """Removes the folders of runs."""
    for folder in {one.cell.folder for one in runs}:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Left:
    """What is left to run of a table.

    Attributes:
        table: The table's name.
        cells: How many cells it has, each seed counted.
        recorded: How many of them are recorded.
        shared: How many are not, but are or will be runs of another table.
        choices: How many runs are missing by which settings are chosen.
        rounds: The rounds of all runs that are missing.
        seconds_a_round: How long a round should take; None if nobody knows.
        by: The table whose records say so.
    """

    table: str
    cells: int
    recorded: int
    shared: int
    choices: int
    rounds: int
    seconds_a_round: float | None
    by: str

    @property
    def missing(self) -> int:
        """How many cells are to run for this table alone."""
        return self.cells - self.recorded - self.shared

    @property
    def hours(self) -> float | None:
        """Hours of one core that the missing runs should take; None if nobody knows."""
        if self.rounds == 0:
            return 0.0
        return None if self.seconds_a_round is None else self.rounds * self.seconds_a_round / 3600


class Listing:
    """Counts what is left of tables, one after the other; a run that several of them need counts once.

    Args:
        every: All tables of the plan, by whose records times are estimated.
    """

    def __init__(self, every: Sequence[Plan]) -> None:
        self._every = every
        self._records = valid_records()
        self._places = {one.path(RECORDS): one.fingerprint for one in self._records}
        self._known: set[Hashable] = {one.fingerprint for one in self._records}
        self._scores: dict[str, dict[str, float]] = {}

    def left(self, plan: Plan) -> Left:
        """Returns what is left of a table, apart from what was left of those that were asked for before."""
        found = {"recorded": 0, "shared": 0, "missing": 0}
        rounds = choices = 0
        for row in plan.table.rows:
            for fingerprint in self._untried(plan, row):
                choose = plan.settings["choose"]
                choices += 1
                overrides = plan.candidate_overrides(str(choose["values"][0]))
                rounds += plan.config(row, choose["column"], choose["seed"], overrides).federation.rounds
                self._known.add(("tried", fingerprint))
            for state, number in self._cells(plan, row):
                found[state] += 1
                rounds += number if state == "missing" else 0
        by, seconds = self._pace(plan)
        return Left(plan.name, sum(found.values()), found["recorded"], found["shared"], choices, rounds, seconds, by)

    def _untried(self, plan: Plan, row: str) -> list[str]:
        """Returns the fingerprints of the candidates that are still to run for a row's choice."""
        if "choose" not in plan.settings or plan.is_chosen(row):
            return []
        tried = self._tried(plan.score_to_choose_by(row))
        again = (one.fingerprint for runs in plan.repeats(row).values() for one in runs)
        every = (*plan.tried(row).values(), *again)
        return [one for one in every if one not in tried and ("tried", one) not in self._known]

    def _tried(self, score: str) -> Mapping[str, float]:
        if score not in self._scores:
            self._scores[score] = tried_before(score)
        return self._scores[score]

    def _cells(self, plan: Plan, row: str) -> Iterator[tuple[str, int]]:
        """Yields for each cell of a row whether it is recorded, shared or missing, and the rounds that it runs itself.

        A cell that is read from the run of a longer one runs none. A cell is also that of another table if both choose
        a setting by the same runs, and agree in all others.
        """
        overrides, tried = plan.row_overrides(row), tuple(plan.tried(row).values())
        for column in plan.table.columns:
            for seed in plan.seeds:
                config = plan.config(row, column, seed, plan.overrides)
                keys: set[Hashable] = {(config.fingerprint(), plan.score_to_choose_by(row), *tried)} if tried else set()
                if overrides is not None:
                    config = plan.config(row, column, seed, overrides)
                    keys.add(config.fingerprint())
                if self._places.get(record_path(RECORDS, plan.name, column, row, seed)) in keys:
                    yield "recorded", config.federation.rounds
                elif keys & self._known and not config.evaluation.diagnostics:
                    yield "shared", config.federation.rounds
                else:
                    yield "missing", 0 if column in plan.longer else config.federation.rounds
                self._known |= keys

    def _pace(self, plan: Plan) -> tuple[str, float | None]:
        """Returns the seconds of a round by the records of the table, or of one with the same settings, and which."""
        alike = [one for one in self._every if one.name != plan.name and one.pace_settings == plan.pace_settings]
        for one in (plan, *alike):
            timed = [
                record
                for record in self._records
                if record.table == one.name and record.seconds is not None and record.device == CPU
            ]
            if timed:
                return one.name, math.fsum(record.seconds or 0.0 for record in timed) / sum(one.round for one in timed)
        return "", None


def listing(wanted: Sequence[Plan]) -> str:
    """Returns a line for each table with what is left to run of it, and their sum."""
    counts = Listing(plans())
    every = [counts.left(plan) for plan in wanted]
    known = [left.hours for left in every if left.hours is not None]
    lines = [f"{'table':34}{'cells':>7}{'recorded':>10}{'shared':>8}{'missing':>9}{'choices':>9}  hours of one core"]
    for left in every:
        hours = "unknown" if left.hours is None else f"{left.hours:.1f}"
        by = f", by {left.by}" if left.hours and left.by != left.table else ""
        counted = f"{left.cells:7}{left.recorded:10}{left.shared:8}{left.missing:9}{left.choices:9}"
        lines.append(f"{left.table:34}{counted}  {hours}{by}")
    unknown = len(every) - len(known)
    lines.append(
        f"In all {math.fsum(known):.1f} hours" + (f" and tables of unknown length: {unknown}." if unknown else ".")
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs and records what is missing, or lists it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="tables of the plan; all by default")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        default=USUAL_DATA if USUAL_DATA.is_dir() else None,
        help="folder of the data sets that the plan names; ../shared/data where it exists",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--rows", default="", metavar="ROW,ROW", help="rows to run; all by default")
    parser.add_argument("--discard", action="store_true", help="remove a run's folder once it is recorded")
    parser.add_argument("--list", action="store_true", help="run nothing; say what is missing, and how long it takes")
    options = parser.parse_args(arguments)
    if options.list:
        print(listing(plans(options.tables)))
        return 0
    for plan in plans(options.tables, options.data):
        if plan.data is None and plan.needs_data():
            if options.tables:
                raise SystemExit(f"{plan.name} needs data sets: make tables TABLE={plan.name} DATA=DIR, their folder.")
            print(f"{plan.name}: left out, as it needs data sets: make tables DATA=DIR")
        else:
            run(plan, options.jobs, tuple(filter(None, options.rows.split(","))), discard=options.discard)
    return 0


if __name__ == "__main__":
    sys.exit(main())
