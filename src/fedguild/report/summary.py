"""The outcome of a run or a comparison in plain words, computed from the numbers of a table."""

from __future__ import annotations

import math

from fedguild.core.score_names import MEAN, MTAL, TRAINED
from fedguild.measuring.log.folder import BudgetFacts
from fedguild.measuring.scores.statistics import FEWEST_SEEDS, Spread, interval
from fedguild.report import units
from fedguild.report.comparison import ComparisonTable, MethodRow
from fedguild.report.tables import RunTable


def run_summary(table: RunTable) -> list[str]:
    """Returns sentences on a run's scores, on average and at the smallest budget."""
    after = f"After {units.count_of(table.round, 'round')}" if table.round else "Before training"
    if not table.rows or table.mean is None or table.smallest is None:
        return _personal_summary(table, after)
    gained = ""
    if table.mean_before is not None and table.round:
        gained = _since(table.mean_before, table.mean)
    if len(table.rows) == 1:
        return [f"{after}, {table.method} scores {units.score(table.mean)}{_in(table)}{gained}.", *_on_own_data(table)]
    scored = f"{after}, {table.method} scores {units.score(table.mean)}{_in(table)}"
    text = f"{scored} on average over {len(table.rows)} budgets{gained}."
    largest = max(table.rows, key=lambda row: row.score)
    smallest = table.smallest
    reached = f"The smallest budget, {budget_title(smallest.budget)}, reaches {units.score(smallest.score)}"
    if largest is smallest or not largest.score:
        return [text, f"{reached}, the best of all.", *_on_own_data(table)]
    share = f"{smallest.score / largest.score:.0%}"
    best = f"{largest.budget.name}, {units.score(largest.score)}"
    return [text, f"{reached}, {share} of the best one ({best}).", *_on_own_data(table)]


def _in(table: RunTable | ComparisonTable) -> str:
    return "" if table.metric == "score" else f" in {table.metric}"


def _since(before: float, now: float) -> str:
    """Returns how a score has changed by the training, by the digits that are printed."""
    start, end = units.score(before), units.score(now)
    return f", {'the same as' if start == end else 'up from' if now > before else 'down from'} {start} before training"


def _personal_summary(table: RunTable, after: str) -> list[str]:
    """Returns the sentences about a run in which every client has its own model."""
    score = next((mean for mean in (table.mtal, table.trained) if mean is not None), table.received)
    scored = f"{after}, {table.method} scores {units.score(score)}{_in(table)}"
    text = f"{scored} on average over the clients, each on its own data"
    if table.clients_before is not None and score is not None and table.round:
        text += _since(table.clients_before, score)
    if table.mtal is None or table.received is None:
        return [f"{text}."]
    return [f"{text}.", f"As received next, their models score {units.score(table.received)}."]


def _on_own_data(table: RunTable) -> list[str]:
    parts = [
        f"{whose} score {units.score(score)}"
        for whose, score in (
            ("own models", table.mtal),
            ("models as trained", table.trained),
            ("models as received", table.received),
        )
        if score is not None
    ]
    return [f"On their own data the clients' {' and their '.join(parts)} on average."] if parts else []


def comparison_summary(table: ComparisonTable) -> list[str]:
    """Returns sentences on the leading method at the smallest budget, its lead and its cost.

    The lead is the paired difference over the seeds, with its 95 % interval.
    """
    column = _decisive_column(table)
    rivals = [row.label for row in table.rows if row.label != table.reference and row.spread(column)]
    reference = table.row(table.reference).spread(column)
    if not rivals or reference is None:
        return [f"{units.count_of(len(table.rows), 'method')} over {units.count_of(len(table.seeds), 'seed')}."]
    leader = max(rivals, key=lambda label: _mean(table, label, column))
    smallest = table.smallest if table.smallest and table.smallest.name == column else None
    where = f"At the smallest budget, {budget_title(smallest)}" if smallest else "On the clients' own data"
    scores = f"{leader} scores {_mean(table, leader, column):.3f} and {table.reference} {reference.mean:.3f}"
    text = f"{where}, {scores}{_in(table)}"
    return [f"{text}{_lead(table, leader, column)}.", *_elsewhere(table, leader), *_costs(table, leader, column)]


def _decisive_column(table: ComparisonTable) -> str:
    """Returns the smallest budget if every method has it, else the clients' models on their own data."""
    if table.smallest and all(row.spread(table.smallest.name) for row in table.rows):
        return table.smallest.name
    own = any(row.spread(table.own) for row in table.rows)
    return table.own if own or not table.smallest else table.smallest.name


def _lead(table: ComparisonTable, leader: str, column: str) -> str:
    """Returns the paired difference with its 95 % interval, and whether this includes 0."""
    difference = table.difference(leader, column)
    if difference is None:
        return ""
    text = f": {_signed(difference)}"
    if difference.count < 2:
        return f"{text}, from one seed, so chance is not ruled out"
    if difference.count < FEWEST_SEEDS:
        return f"{text}, from {difference.count} seeds, too few to decide"
    low, high = interval(difference)
    if math.isnan(low):
        return f"{text} over {difference.count} seeds, of which one is infinite"
    others = sum(row.label != table.reference for row in table.rows)
    chosen = f", not corrected for the choice of the best of {others}" if others > 1 else ""
    verdict = "includes 0, so these seeds do not tell them apart" if low <= 0 <= high else f"excludes 0{chosen}"
    return f"{text} over {difference.count} seeds; the 95 % interval {verdict}"


def _elsewhere(table: ComparisonTable, leader: str) -> list[str]:
    """Returns the sentences about the mean over budgets, if there are several, and about the clients' own data."""
    sentences = []
    mean = table.difference(leader, MEAN) if MEAN in table.columns else None
    if mean is not None:
        sentences.append(f"Averaged over the {len(table.budgets)} budgets the difference is {_signed(mean)}.")
    difference = table.difference(leader, table.own) if table.budgets else None
    if difference is not None and _decisive_column(table) != table.own:
        whose = {MTAL: "the clients' own models", TRAINED: "the clients' models as trained"}
        models = whose.get(table.own, "the clients' models as received")
        sentences.append(f"Between {models} on their own data it is {_signed(difference)}.")
    return sentences


def _costs(table: ComparisonTable, leader: str, column: str) -> list[str]:
    """Returns the sentence about the training FLOPs and the upload of a client of the smallest budget."""
    ours, theirs = table.row(leader), table.row(table.reference)
    facts = []
    if column in ours.training_flops and theirs.training_flops.get(column):
        share = _share(ours.training_flops[column], theirs.training_flops[column], "FLOPs")
        facts.append(f"a client of that budget spends {share} in training")
    elif column == MTAL and (spent := _flops(ours)) and (reference := _flops(theirs)):
        share = _share(spent, reference, "FLOPs")
        facts.append(f"the average client spends {share} in training")
    if ours.cost and theirs.cost and theirs.cost.upload_bytes:
        share = _share(ours.cost.upload_bytes, theirs.cost.upload_bytes, "bytes")
        facts.append(f"the average client sends {share}")
    if not facts:
        return []
    same = "Inference costs the same per token under both. " if table.equal_inference and column != MTAL else ""
    return [f"{same}With {leader}, {' and '.join(facts)}, compared with {table.reference}."]


def _flops(row: MethodRow) -> float | None:
    """Returns the training FLOPs of a client; None if withheld for privacy."""
    return row.cost.training_flops if row.cost else None


def _signed(difference: Spread) -> str:
    return units.difference(difference).replace(" ", "\u00a0")


def _share(ours: float, theirs: float, what: str) -> str:
    """Returns `49% of the bytes`, `1.7 times the bytes` or `as many bytes`."""
    if 0.995 <= ours / theirs < 1.05:
        return f"as many {what}"
    return f"{ours / theirs:.0%} of the {what}" if ours < theirs else f"{units.ratio(ours, theirs)} times the {what}"


def _mean(table: ComparisonTable, label: str, column: str) -> float:
    spread = table.row(label).spread(column)
    return spread.mean if spread else float("-inf")


def budget_title(budget: BudgetFacts) -> str:
    """Returns `b4 (1 active expert)`, or the name alone if the experts are unknown."""
    if not budget.active_experts:
        return budget.name
    return f"{budget.name} ({units.count_of(budget.active_experts, 'active expert')})"
