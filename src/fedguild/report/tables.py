"""Tables of one run: the scores and costs of every budget and every client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import pandas

from fedguild.core.layout import client_name
from fedguild.core.plugins import is_target
from fedguild.core.score_names import SUMMARIES, metric_heading, metric_name
from fedguild.measuring.log.folder import MEANS, BudgetFacts, ClientScope, Run
from fedguild.measuring.log.records import EvaluationRecord, RoutingRecord
from fedguild.report import units
from fedguild.report.costs import Cost, client_totals, mean_cost
from fedguild.report.grid import Cell, Grid

_OWN_DATA: tuple[ClientScope, ...] = ("client", "received", "trained")
"""The scores of clients' models on their own data; before training, the first that a run has stands for all."""


@dataclass(frozen=True)
class BudgetRow:
    """A budget at the last evaluated round.

    Attributes:
        before: Score before training; None if it was not evaluated.
        score: Score of the global model at this budget.
        metrics: Every metric by name.
        clients: Clients of this budget that trained.
        cost: Mean over those clients; None if none trained.
    """

    budget: BudgetFacts
    before: float | None
    score: float
    metrics: Mapping[str, float]
    clients: int
    cost: Cost | None


@dataclass(frozen=True)
class ClientRow:
    """A client's scores on its own held-out data at the last evaluated round; None if not evaluated.

    Attributes:
        budget: Name of its budget; empty if it never trained.
        examples: Number of examples scored; None if not recorded.
        before: Score of its model before training.
        own: Score of the model that it uses after the round.
        trained: Score of the model as its own training left it.
        received: Score of the model with which it would begin its next round.
    """

    client: str
    budget: str
    examples: int | None
    before: float | None
    own: float | None
    trained: float | None
    received: float | None


@dataclass(frozen=True)
class RunTable:
    """The table of one run.

    Attributes:
        round: The last evaluated round.
        split: The split of the scores, `test` or `validation`.
        metric: What the scores are, in words; `score` where that is not recorded.
        rows: One per evaluated budget; empty if only clients' own models were scored.
        mean: Mean over budgets; None without budgets.
        mean_before: The mean before training.
        mtal: Mean over clients of their own models' scores on their own data; None if not evaluated.
        clients_before: Mean over clients of their scores before training; None if not evaluated.
        trained: Mean over clients of the scores of their models as trained, on their own data.
        received: Mean over clients of the scores of their models as received, on their own data.
        pooled: Mean over clients of the scores of their models as received, on all clients' data.
        deviations: `mtal`, `trained`, `received` and `pooled` -> sample deviation over the clients, if there are two or
            more.
        clients: One row per client with a score of its own; empty if none was evaluated.
    """

    name: str
    method: str
    seed: int
    round: int
    split: str
    rows: tuple[BudgetRow, ...]
    mean: float | None
    mean_before: float | None
    mtal: float | None
    clients_before: float | None
    trained: float | None
    received: float | None
    pooled: float | None
    deviations: Mapping[str, float]
    clients: tuple[ClientRow, ...]
    metric: str = "score"

    @property
    def scores(self) -> dict[str, float]:
        summaries = {name: getattr(self, name) for name in SUMMARIES}
        return {row.budget.name: row.score for row in self.rows} | {
            name: value for name, value in summaries.items() if value is not None
        }

    @property
    def smallest(self) -> BudgetRow | None:
        return min(self.rows, key=lambda row: size_of(row.budget), default=None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def grid(self) -> Grid:
        """Returns the printable form: the budgets, or the clients if every client has its own model."""
        clients = self.client_grid()
        if not self.rows and clients:
            return clients
        metric_names = metrics_beside_the_score([self])
        header = ["Budget", "Active experts", "Before", self.heading, *map(metric_title, metric_names)]
        header += ["FLOPs per token", "Training FLOPs", "Upload", "Download"]
        body = [tuple(map(Cell, self._entries(row, metric_names))) for row in self.rows]
        rules = set()
        if self.mean is not None and len(self.rows) > 1:
            rules.add(len(body))
            body.append(_summary_row("Mean over budgets", self.mean_before, units.score(self.mean), len(header)))
        for name, (title, before) in self._summaries().items():
            mean = getattr(self, name)
            if mean is not None:
                rules.add(len(self.rows))
                body.append(_summary_row(title, before, units.score_over(mean, self.deviations.get(name)), len(header)))
        title = f"{self._after()}{self._over()}; costs per client over the run"
        return Grid(title, tuple(map(Cell, header)), tuple(body), frozenset(rules))

    def _summaries(self) -> dict[str, tuple[str, float | None]]:
        """Returns each mean over clients -> its title, and the score before training."""
        return {
            "mtal": ("Clients' own models, own data", self.clients_before),
            "trained": ("Clients' models as trained, own data", None),
            "received": ("Clients' models as received, own data", None),
            "pooled": ("Clients' models as received, all data", None),
        }

    def client_grid(self) -> Grid | None:
        """Returns clients × models: before training, their own, as trained, as received; None if none was scored."""
        if not self.clients:
            return None
        header = [Cell("Client"), Cell("Budget"), Cell("Examples"), Cell("Before")]
        header += [Cell("Own model")] if self.mtal is not None else []
        header += [Cell("As trained")] if self.trained is not None else []
        header += [Cell("As received")] if self.received is not None else []
        body = [
            (
                *map(Cell, (row.client, row.budget or units.MISSING, _count(row.examples))),
                *self._scores(row),
            )
            for row in self.clients
        ]
        mean = (Cell("Mean over clients"), Cell(""), Cell(""))
        means = [Cell(units.score(self.clients_before))]
        for name, value in (("mtal", self.mtal), ("trained", self.trained), ("received", self.received)):
            if value is not None:
                means.append(Cell(units.score_over(value, self.deviations.get(name)), strong=True))
        title = f"{self._after()}, each client on its own data{self._over()}"
        return Grid(title, tuple(header), (*body, (*mean, *means)), frozenset({len(body)}))

    def _scores(self, row: ClientRow) -> tuple[Cell, ...]:
        after = [(row.own, self.mtal), (row.trained, self.trained), (row.received, self.received)]
        shown = [Cell(units.score(value)) for value, mean in after if mean is not None]
        return (Cell(units.score(row.before)), *shown)

    @property
    def heading(self) -> str:
        """The title of the column of scores."""
        return metric_heading(self.metric)

    def _after(self) -> str:
        scores = "scores" if self.metric == "score" else self.metric
        return f"{self.name}: {self.split} {scores} after round {self.round}"

    def _over(self) -> str:
        """Returns the meaning of ± in a title, if a mean over clients has a deviation."""
        return "; ± sample deviation over clients" if self.deviations else ""

    def _entries(self, row: BudgetRow, metric_names: Iterable[str]) -> list[str]:
        cost = row.cost
        return [
            row.budget.name,
            str(row.budget.active_experts or units.MISSING),
            units.score(row.before),
            units.score(row.score),
            *(_metric(name, row.metrics.get(name)) for name in metric_names),
            units.si(row.budget.inference_flops_per_token),
            units.si(cost.training_flops if cost else None),
            units.byte_count(cost.upload_bytes if cost else None),
            units.byte_count(cost.download_bytes if cost else None),
        ]


def run_table(run: Run) -> RunTable:
    last, first = run.scored("budget", run.last_round), run.scored("budget", 0)
    totals = client_totals(run)
    rows = tuple(_budget_row(budget, first, last, totals) for budget in run.budgets())
    before = [row.before for row in rows if row.before is not None]
    return RunTable(
        name=run.name,
        method=run.method,
        seed=run.seed,
        round=run.last_round,
        split=run.split,
        rows=rows,
        mean=fmean(row.score for row in rows) if rows else None,
        mean_before=fmean(before) if before and len(before) == len(rows) else None,
        mtal=run.client_mean("client", run.last_round),
        clients_before=next((mean for scope in _OWN_DATA if (mean := run.client_mean(scope, 0)) is not None), None),
        trained=run.client_mean("trained", run.last_round),
        received=run.client_mean("received", run.last_round),
        pooled=run.client_mean("pooled", run.last_round),
        deviations=_deviations(run),
        clients=_client_rows(run),
        metric=run.metric,
    )


def size_of(budget: BudgetFacts) -> tuple[float, float]:
    """Returns a sort key of budgets by size: active experts, then rank; unknown counts as largest."""
    return (budget.active_experts or float("inf"), budget.rank or float("inf"))


def training_grid(totals: pandas.DataFrame) -> Grid:
    """Returns the table of clients' training: the data and the costs of each."""
    header = ["Client", "Budget", "Experts", "Rank", "Examples", "Steps", "Tokens", "Train loss"]
    header += ["Training FLOPs", "Upload", "Download", "Peak memory", "Time"]
    body = []
    for row in totals.astype(object).where(totals.notna(), None).itertuples():
        entries = [str(row.Index), row.budget, str(row.active_experts or units.MISSING), str(row.rank)]
        entries += [*map(_count, (row.examples, row.steps, row.tokens))]
        entries += [units.MISSING if row.train_loss is None else f"{row.train_loss:.3f}"]
        entries += [units.si(row.training_flops), units.byte_count(row.upload_bytes)]
        entries += [units.byte_count(row.download_bytes), units.byte_count(row.peak_memory_bytes)]
        entries += [units.duration(row.seconds)]
        body.append(tuple(map(Cell, entries)))
    return Grid("Clients, over the whole run", tuple(map(Cell, header)), tuple(body))


def privacy_grid(run: Run) -> Grid | None:
    """Returns the privacy spent by every client; None without differential privacy."""
    if not run.privacy:
        return None
    last = run.privacy[-1]
    body = [
        (
            Cell(str(client)),
            Cell(f"{spent:.3f}"),
            Cell(f"{last.delta:g}"),
            Cell(f"{noise:.3f}"),
            Cell("stopped: budget spent" if client in last.stopped else "takes part"),
        )
        for client, spent, noise in zip(last.clients, last.epsilon, last.noise_multiplier, strict=True)
    ]
    header = (Cell("Client"), Cell("ε", "spent"), Cell("δ"), Cell("Noise multiplier"), Cell("After this round"))
    return Grid(f"Differential privacy per {last.unit} after round {last.round}", header, tuple(body))


def task_grid(run: Run) -> Grid | None:
    """Returns task × budget scores at the last evaluated round; None for a single task.

    A task is named with its metric where the tasks' metrics differ.
    """
    scored = run.scored("budget", run.last_round)
    names = [budget.name for budget in run.budgets()]
    tasks = sorted({task for name in names for task in scored[name].by_task})
    if len(tasks) < 2:
        return None
    measured = {task: metric for name in names for task, metric in scored[name].task_metrics.items()}
    titles = {task: f"{task} ({metric_name([metric])})" for task, metric in measured.items()}
    body = [
        (Cell(titles.get(task, task)), *(Cell(units.score(scored[name].by_task.get(task))) for name in names))
        for task in tasks
    ]
    return Grid(
        f"{metric_heading(run.metric)} by task after round {run.last_round}",
        (Cell("Task"), *map(Cell, names)),
        tuple(body),
    )


def routing_grid(routing: RoutingRecord) -> Grid:
    """Returns the evenness of each layer's expert use in a round."""
    columns = zip(routing.entropy, routing.normalised_entropy, routing.gini, strict=True)
    body = [(Cell(str(layer)), *(Cell(f"{value:.3f}") for value in values)) for layer, values in enumerate(columns)]
    header = (Cell("Layer"), Cell("Entropy", "nats"), Cell("Normalised", "1 = even"), Cell("Gini", "0 = even"))
    return Grid(f"Evenness of expert use, round {routing.round}", header, tuple(body))


def metric_title(name: str) -> str:
    """Returns a metric's name as a column title, `Exact match` for `exact_match`."""
    return name if is_target(name) else metric_heading(metric_name([name]))


def _budget_row(
    budget: BudgetFacts, first: Mapping[str, Any], last: Mapping[str, Any], totals: pandas.DataFrame
) -> BudgetRow:
    members = totals[totals["budget"] == budget.name]
    return BudgetRow(
        budget=budget,
        before=first[budget.name].score if budget.name in first else None,
        score=last[budget.name].score,
        metrics=last[budget.name].metrics,
        clients=len(members),
        cost=mean_cost(members),
    )


def _deviations(run: Run) -> dict[str, float]:
    """Returns the deviations over clients at the last evaluated round, by the name of their mean."""
    deviations = {name: run.client_deviation(scope, run.last_round) for scope, name in MEANS.items()}
    return {name: value for name, value in deviations.items() if value is not None}


def _client_rows(run: Run) -> tuple[ClientRow, ...]:
    """Returns the clients with a score of their own, by name; one without examples has none."""
    budgets = {client_name(record.client): record.budget for record in run.clients}
    first = next((scored for scope in _OWN_DATA if (scored := run.scored(scope, 0))), {})
    own, received, trained = (run.scored(scope, run.last_round) for scope in _OWN_DATA)
    known = {**trained, **received, **own}
    return tuple(
        ClientRow(
            client=name,
            budget=budgets.get(name, ""),
            examples=record.examples,
            before=_score_of(first.get(name)),
            own=_score_of(own.get(name)),
            trained=_score_of(trained.get(name)),
            received=_score_of(received.get(name)),
        )
        for name, record in sorted(known.items())
    )


def _score_of(record: EvaluationRecord | None) -> float | None:
    return record.score if record and record.examples != 0 else None


def _count(number: float | None) -> str:
    return units.MISSING if number is None else units.count(int(number))


def metrics_beside_the_score(tables: Iterable[RunTable]) -> list[str]:
    """Returns the metrics that some table has beside its score; one that is the score itself is not among them."""
    found = [(name, table) for table in tables for row in table.rows for name in row.metrics]
    return sorted({name for name, table in found if not _is_score(name, table)})


def _is_score(name: str, table: RunTable) -> bool:
    is_named = table.metric in (metric_name([name]), metric_name([]))
    return is_named and all(row.metrics.get(name) == row.score for row in table.rows)


def _metric(name: str, value: float | None) -> str:
    return f"{value:.2f}" if name == "perplexity" and value is not None else units.score(value)


def _summary_row(title: str, before: float | None, score: str, width: int) -> tuple[Cell, ...]:
    cells = [Cell(title), Cell(""), Cell(units.score(before)), Cell(score, strong=True)]
    return tuple(cells + [Cell("")] * (width - len(cells)))
