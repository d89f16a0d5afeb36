"""Several methods over several seeds: a paper's table, with scores and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import pandas

from fedguild.core.errors import ConfigError, nearest
from fedguild.core.score_names import MEAN, MTAL, POOLED, RECEIVED, SCORES, TRAINED
from fedguild.measuring.log.folder import BudgetFacts, Run
from fedguild.measuring.scores.statistics import Spread, interval, paired_difference, spread
from fedguild.report import units
from fedguild.report.costs import COSTS, Cost, client_totals, mean_cost
from fedguild.report.grid import Cell, Grid
from fedguild.report.tables import RunTable, metric_title, metrics_beside_the_score, run_table, size_of

_SAME_FLOPS = 0.01
_PROTOCOLS = (
    (MTAL, "clients", "The clients' own models (MTAL)"),
    (TRAINED, "trained", "The clients' models as trained"),
    (RECEIVED, "received", "The clients' models as received"),
    (POOLED, "pooled", "The clients' models on all data (pooled)"),
)
"""Mean over clients, the setting that asks for it, and whose scores they are."""


@dataclass(frozen=True)
class MethodRow:
    """A method over its seeds.

    Attributes:
        scores: Column -> seed -> score; a column is a budget's name, `mean`, `mtal`, `trained`, `received` or `pooled`.
        training_flops: Budget name -> training FLOPs of one of its clients over a run, mean over clients and seeds;
            budgets without a client that trained are left out.
        metrics: Metric beside the score -> seed -> its mean over the budgets.
        cost: Mean over clients, then seeds; None if no client trained.
        run_seconds: Wall time of a run, mean over seeds.
    """

    label: str
    scores: Mapping[str, Mapping[int, float]]
    training_flops: Mapping[str, float]
    cost: Cost | None
    run_seconds: float
    metrics: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def spread(self, column: str) -> Spread | None:
        return _spread(self.scores.get(column))


@dataclass(frozen=True)
class ComparisonTable:
    """The table of a comparison.

    Attributes:
        budgets: The columns, largest first.
        rows: The methods, in the order given.
        reference: Label of the row that the others are compared with.
        round: The last evaluated round.
        split: The split of the scores.
        metric: What the scores are, in words; `score` where that is not recorded.
        equal_inference: Whether every budget was scored with the same active experts and inference FLOPs in all runs,
            as far as they are recorded.
        warnings: Reasons why the comparison may be unfair, one sentence each.
    """

    budgets: tuple[BudgetFacts, ...]
    rows: tuple[MethodRow, ...]
    reference: str
    seeds: tuple[int, ...]
    round: int
    split: str
    equal_inference: bool
    warnings: tuple[str, ...]
    metric: str = "score"

    @property
    def columns(self) -> tuple[str, ...]:
        """The budgets' names, then `mean`, `mtal`, `trained`, `received`, `pooled` if some method has them."""
        present = [column for column in SCORES if any(row.scores.get(column) for row in self.rows)]
        names = [budget.name for budget in self.budgets]
        return tuple(names + [column for column in present if column != MEAN or len(names) != 1])

    @property
    def own(self) -> str:
        """The first of `mtal`, `trained` and `received` that some method has: its clients' models on their own data."""
        return next(
            (name for name in (MTAL, TRAINED, RECEIVED) if any(row.scores.get(name) for row in self.rows)), MTAL
        )

    @property
    def smallest(self) -> BudgetFacts | None:
        return min(self.budgets, key=size_of, default=None)

    def row(self, label: str) -> MethodRow:
        return next(row for row in self.rows if row.label == label)

    def difference(self, label: str, column: str, against: str | None = None) -> Spread | None:
        """Returns mean and deviation of the seedwise differences to the reference, over the seeds of both.

        None without such a seed.

        Args:
            column: The row's score.
            against: The reference's score; None for the same.
        """
        ours = self.row(label).scores.get(column, {})
        theirs = self.row(self.reference).scores.get(against or column, {})
        return paired_difference(ours, theirs)

    def best(self, column: str | Mapping[str, str]) -> str | None:
        """Returns the label of the highest mean; None if fewer than two methods have one, or two share it.

        Args:
            column: The score to compare, for all or by label.
        """
        of = dict.fromkeys((row.label for row in self.rows), column) if isinstance(column, str) else column
        scored = {row.label: mean.mean for row in self.rows if (mean := row.spread(of[row.label]))}
        highest = [label for label, mean in scored.items() if mean == max(scored.values())]
        return highest[0] if len(scored) > 1 and len(highest) == 1 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "seeds": list(self.seeds),
            "round": self.round,
            "split": self.split,
            "equal_inference": self.equal_inference,
            "budgets": [asdict(budget) for budget in self.budgets],
            "methods": [self._method_json(row) for row in self.rows],
            "warnings": list(self.warnings),
        }

    def _method_json(self, row: MethodRow) -> dict[str, Any]:
        spreads = {column: row.spread(column) for column in self.columns}
        differences = {column: self.difference(row.label, column) for column in self.columns}
        return {
            "label": row.label,
            "scores": {
                column: {**asdict(value), "by_seed": {str(seed): score for seed, score in row.scores[column].items()}}
                for column, value in spreads.items()
                if value
            },
            "difference": {column: _with_interval(value) for column, value in differences.items() if value}
            if row.label != self.reference
            else {},
            "training_flops": dict(row.training_flops),
            "cost": asdict(row.cost) if row.cost else None,
            "run_seconds": row.run_seconds,
            "metrics": {name: asdict(spread(list(values.values()))) for name, values in row.metrics.items()},
        }

    def grids(self) -> list[Grid]:
        """Returns the scores, the other metrics if there are any, and the costs."""
        return [grid for grid in (self.score_grid(), self.metric_grid(), self.cost_grid()) if grid]

    def score_grid(self) -> Grid:
        """Returns methods × budgets: mean ± sample deviation over seeds, then the differences paired by seed."""
        body = [self._score_row(row) for row in self.rows]
        rules = {len(body)}
        body += [self._difference_row(row) for row in self.rows if row.label != self.reference]
        seeds = units.count_of(len(self.seeds), "seed")
        title = (
            f"{self.split.capitalize()} {self.metric} after round {self.round}, mean ± sample deviation over {seeds}"
        )
        title += "; differences with their 95 % interval" if len(self.rows) > 1 and len(self.seeds) > 1 else ""
        title += "; under each budget its active experts and inference FLOPs per token" if self.budgets else ""
        return Grid(title, (Cell("Method"), *map(self._heading, self.columns)), tuple(body), frozenset(rules))

    def metric_grid(self) -> Grid | None:
        """Returns methods × metrics beside the score, then the differences paired by seed; None for no such metric."""
        names = list(dict.fromkeys(name for row in self.rows for name in row.metrics))
        if not names:
            return None
        theirs, body = self.row(self.reference).metrics, list[tuple[Cell, ...]]()
        for row in self.rows:
            means = [_spread(row.metrics.get(name)) for name in names]
            body.append((Cell(row.label), *(Cell(units.score_spread(one)) for one in means)))
        for row in self.rows:
            if row.label != self.reference:
                apart = [paired_difference(row.metrics.get(name, {}), theirs.get(name, {})) for name in names]
                cells = (Cell(units.difference(one).replace(" [", "\n[")) for one in apart)
                body.append((Cell(f"{row.label}\n\u2212 {self.reference}", "paired by seed"), *cells))
        over = "mean over budgets, " if len(self.budgets) > 1 else ""
        title = f"Other metrics of the global model after round {self.round}, {over}mean ± sample deviation over seeds"
        header = (Cell("Method"), *(Cell(metric_title(name)) for name in names))
        return Grid(title, header, tuple(body), frozenset({len(self.rows)}))

    def cost_grid(self) -> Grid:
        """Returns methods × costs: a client's mean over the whole run."""
        budgets = [budget.name for budget in self.budgets]
        header = [Cell("Method"), *(Cell("Training FLOPs", name) for name in budgets if len(budgets) > 1)]
        header += [Cell("Training FLOPs", "mean"), Cell("Upload"), Cell("Download"), Cell("Peak memory")]
        header += [Cell("Training time"), Cell("Whole run")]
        body = []
        for row in self.rows:
            per_budget = [units.si(row.training_flops.get(name)) for name in budgets if len(budgets) > 1]
            cost = row.cost
            entries = [row.label, *per_budget, units.si(cost.training_flops if cost else None)]
            entries += [units.byte_count(cost.upload_bytes if cost else None)]
            entries += [units.byte_count(cost.download_bytes if cost else None)]
            entries += [units.byte_count(cost.peak_memory_bytes if cost else None)]
            entries += [units.duration(cost.seconds if cost else None), units.duration(row.run_seconds)]
            body.append(tuple(map(Cell, entries)))
        return Grid("Costs of a client over the whole run, mean over clients and seeds", tuple(header), tuple(body))

    def _heading(self, column: str) -> Cell:
        if column == MEAN:
            return Cell("Mean", "over budgets")
        if column == MTAL:
            return Cell("MTAL", "own models, own data")
        if column == RECEIVED:
            return Cell("As received", "own data")
        if column == TRAINED:
            return Cell("As trained", "own data")
        if column == POOLED:
            return Cell("Pooled", "as received, all data")
        budget = next(budget for budget in self.budgets if budget.name == column)
        facts = [units.count_of(budget.active_experts, "expert")] if budget.active_experts else []
        if budget.inference_flops_per_token and self.equal_inference:
            facts.append(units.flops(budget.inference_flops_per_token))
        return Cell(column, ", ".join(facts))

    def _score_row(self, row: MethodRow) -> tuple[Cell, ...]:
        cells = [Cell(row.label, "reference" if row.label == self.reference else "")]
        for column in self.columns:
            paid = row.training_flops.get(column)
            note = f"{units.flops(paid)} trained" if paid is not None else ""
            cells.append(Cell(units.score_spread(row.spread(column)), note, strong=self.best(column) == row.label))
        return tuple(cells)

    def _difference_row(self, row: MethodRow) -> tuple[Cell, ...]:
        texts = [units.difference(self.difference(row.label, column)) for column in self.columns]
        cells = [Cell(text.replace(" [", "\n[")) for text in texts]
        return (Cell(f"{row.label}\n\u2212 {self.reference}", "paired by seed"), *cells)


def compare(runs: Mapping[str, Sequence[Run]], reference: str | None = None) -> ComparisonTable:
    """Returns the table of several methods over several seeds.

    Args:
        runs: Label -> the method's runs, one per seed.
        reference: Label of the method that the others are compared with; by default the last.

    Raises:
        ConfigError: there is no run, a seed occurs twice under one label, or the reference is unknown.
    """
    if not runs or not all(runs.values()):
        empty = [label for label, members in runs.items() if not members]
        raise ConfigError(
            f"A comparison needs at least one run per method; none given for {', '.join(empty) or 'any'}."
        )
    chosen = reference if reference is not None else list(runs)[-1]
    if chosen not in runs:
        raise ConfigError(f"The reference '{chosen}' is not one of the compared methods.", nearest(chosen, runs))
    tables = {label: [run_table(run) for run in members] for label, members in runs.items()}
    every = [table for members in tables.values() for table in members]
    by_budget: dict[str, list[BudgetFacts]] = {}
    for row in (row for table in every for row in table.rows):
        by_budget.setdefault(row.budget.name, []).append(row.budget)
    unequal = [name for name, facts in by_budget.items() if not _equal_inference(facts)]
    warnings = _differing_runs(tables)
    warnings += [f"Budget {name} was not scored at equal inference FLOPs in all runs." for name in unequal]
    with_budgets = [table for table in every if table.rows]
    partly = [name for name in by_budget if len(by_budget[name]) < len(with_budgets)]
    warnings += [f"Budget {name} was not scored in all runs." for name in partly]
    without = (
        [label for label, members in tables.items() if not any(table.rows for table in members)] if by_budget else []
    )
    has_mtal = any(table.mtal is not None for table in every)
    compares = "MTAL" if has_mtal else "the clients' models as trained or received"
    warnings += [
        f"{label} has no global model, so it has no score at a budget; {compares} compares it." for label in without
    ]
    for name, setting, whose in _PROTOCOLS:
        scored = [getattr(table, name) is not None for table in every]
        if any(scored) and not all(scored):
            warnings.append(f"{whose} were not scored in all runs: set evaluation.{setting}=true.")
    beside = metrics_beside_the_score(every)
    return ComparisonTable(
        budgets=tuple(facts[0] for facts in by_budget.values()),
        rows=tuple(_method_row(label, runs[label], tables[label], beside) for label in runs),
        reference=chosen,
        seeds=tuple(sorted({table.seed for table in every})),
        round=max(table.round for table in every),
        split=every[0].split,
        equal_inference=not unequal,
        warnings=tuple(warnings),
        metric=every[0].metric if len({table.metric for table in every}) == 1 else "score",
    )


def _method_row(label: str, runs: Sequence[Run], tables: Sequence[RunTable], names: Sequence[str]) -> MethodRow:
    seeds = [table.seed for table in tables]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"{label} has two runs of one seed (seeds: {', '.join(map(str, seeds))}); give each once.")
    scores: dict[str, dict[int, float]] = {}
    flops: dict[str, list[float]] = {}
    metrics: dict[str, dict[int, float]] = {}
    for table in tables:
        for name in names:
            if values := [row.metrics[name] for row in table.rows if name in row.metrics]:
                metrics.setdefault(name, {})[table.seed] = fmean(values)
        summaries = {name: getattr(table, name) for name in SCORES}
        for column, value in [*((row.budget.name, row.score) for row in table.rows), *summaries.items()]:
            if value is not None:
                scores.setdefault(column, {})[table.seed] = value
        for row in table.rows:
            if row.cost and row.cost.training_flops is not None:
                flops.setdefault(row.budget.name, []).append(row.cost.training_flops)
    per_run = [cost for run in runs if (cost := mean_cost(client_totals(run)))]
    return MethodRow(
        label=label,
        scores=scores,
        training_flops={name: fmean(values) for name, values in flops.items()},
        cost=mean_cost(pandas.DataFrame(per_run, columns=COSTS).astype(float)),
        run_seconds=fmean(sum(record.seconds for record in run.rounds) for run in runs),
        metrics=metrics,
    )


def _spread(by_seed: Mapping[int, float] | None) -> Spread | None:
    return spread(list(by_seed.values())) if by_seed else None


def _with_interval(difference: Spread) -> dict[str, Any]:
    low, high = interval(difference) if difference.count > 1 else (None, None)
    return {**asdict(difference), "low": low, "high": high}


def _equal_inference(facts: Sequence[BudgetFacts]) -> bool:
    flops = [budget.inference_flops_per_token for budget in facts if budget.inference_flops_per_token]
    same_flops = not flops or math.isclose(min(flops), max(flops), rel_tol=_SAME_FLOPS)
    return same_flops and len({budget.active_experts for budget in facts}) == 1


def _differing_runs(tables: Mapping[str, Sequence[RunTable]]) -> list[str]:
    every = [table for members in tables.values() for table in members]
    warnings = []
    if len({table.round for table in every}) > 1:
        warnings.append(f"The runs stopped after different rounds: {_by_label(tables, 'round')}.")
    if len({table.split for table in every}) > 1:
        warnings.append(f"The runs were scored on different splits: {_by_label(tables, 'split')}.")
    if len({table.metric for table in every}) > 1:
        warnings.append(f"The runs' scores are of different metrics: {_by_label(tables, 'metric')}.")
    if len({tuple(sorted(table.seed for table in members)) for members in tables.values()}) > 1:
        warnings.append(f"The methods were run with different seeds: {_by_label(tables, 'seed')}.")
    return warnings


def _by_label(tables: Mapping[str, Sequence[RunTable]], field: str) -> str:
    return "; ".join(
        f"{label} {', '.join(str(value) for value in sorted({getattr(table, field) for table in members}))}"
        for label, members in tables.items()
    )
