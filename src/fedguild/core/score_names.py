"""Names of a run's scores: means over its budgets or its clients, and the metrics that they are means of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, get_args

Score = Literal["mean", "mtal", "trained", "received", "pooled"]
"""The mean over budgets of the global model, or a mean over clients; see `MEANINGS`."""
Scope = Literal["budget", "client", "trained", "received", "pooled", "summary"]
"""Whose score a record has: the global model at a budget; a client's own model, the same as trained, as received, and
as received on all clients' data; or one of `SCORES`.
"""
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
MEAN: Final = "mean"
MTAL: Final = "mtal"
TRAINED: Final = "trained"
RECEIVED: Final = "received"
POOLED: Final = "pooled"
SCORES: Final[tuple[Score, ...]] = (MEAN, MTAL, TRAINED, RECEIVED, POOLED)
SUMMARIES: Final[tuple[Score, ...]] = (MEAN, TRAINED, RECEIVED, POOLED, MTAL)
"""The scores in the order of a table's columns."""
HEADLINES: Final[tuple[Score, ...]] = (MEAN, MTAL, TRAINED, RECEIVED)
"""The scores of which the first that a run has stands for it."""
MEANINGS: Final[Mapping[str, str]] = {
    MEAN: "global model, mean over budgets",
    MTAL: "own models on own data (MTAL)",
    TRAINED: "clients' models as trained, on own data",
    RECEIVED: "clients' models as received, on own data",
    POOLED: "clients' models as received, on all data",
}
TITLES: Final[Mapping[str, str]] = {
    MEAN: "mean",
    MTAL: "MTAL",
    TRAINED: "as trained",
    RECEIVED: "as received",
    POOLED: "pooled",
}
"""The columns' titles in a table."""
METRICS: Final[Mapping[str, str]] = {
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "exact_match": "exact match",
    "token_f1": "token F1",
    "rouge_l": "ROUGE\u2011L",
    "preference_accuracy": "preference accuracy",
    "reward_margin": "reward margin",
    "nats": "nats per token",
}
"""Name of a metric -> what pages and tables call it, where that is not the name itself."""


def joined(metrics: Iterable[str]) -> str:
    """Returns the names of the metrics that a score is the mean of as a record has them; none for an empty one."""
    return " and ".join(sorted({*metrics} - {""}))


def names_of(metric: str) -> list[str]:
    """Returns the names in a record's `metric`; see `joined`."""
    return metric.split(" and ") if metric else []


def metric_name(metrics: Iterable[str]) -> str:
    """Returns what the score of some examples is: a metric, several, or `score` where records do not say.

    Args:
        metrics: `metric` of each record.
    """
    found = sorted({name for metric in metrics for name in names_of(metric)})
    return " and ".join(METRICS.get(name, name.replace("_", " ")) for name in found) or "score"


def metric_heading(metric: str) -> str:
    """Returns a metric, in words, as the title of a column."""
    return metric[:1].upper() + metric[1:]


def scores_line(scores: Mapping[str, float], metric: str) -> str:
    """Returns scores by budget or summary as a sentence that begins with their metric."""
    return f"{metric_heading(metric)}: {', '.join(f'{name} {score:.3f}' for name, score in scores.items())}."
