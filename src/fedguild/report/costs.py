"""Costs of a run for each client: FLOPs, bytes, memory and seconds, summed over its rounds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pandas

from fedguild.measuring.log.folder import Run


@dataclass(frozen=True)
class Cost:
    """Costs of a client over a whole run, or their mean over clients.

    Attributes:
        training_flops: Floating-point operations of its local updates; None if withheld for privacy.
        peak_memory_bytes: Largest peak memory of any of its rounds; None if no device reported it.
        seconds: Wall time of its local updates; None if withheld for privacy.
    """

    training_flops: float | None
    upload_bytes: float
    download_bytes: float
    peak_memory_bytes: float | None
    seconds: float | None


COSTS = [field.name for field in fields(Cost)]
_SUMMED = ["steps", "tokens", "training_flops", "upload_bytes", "download_bytes", "seconds"]
_OF_THE_LAST_ROUND = ["budget", "active_experts", "rank", "examples", "train_loss"]


def client_totals(run: Run) -> pandas.DataFrame:
    """Returns a row for each client that trained at least once, by its index.

    The columns are `rounds`, the number of its trainings; `budget`, `active_experts`, `rank`, `examples` and
    `train_loss` of its last training; the sums of `steps`, `tokens` and the costs, and its largest peak memory. Figures
    that a client withholds for privacy in some round are missing.
    """
    summed = [*_SUMMED, "peak_memory_bytes"]
    frame = run.frame("clients").reindex(columns=["client", *_OF_THE_LAST_ROUND, *summed])
    by_client = frame.astype(dict.fromkeys(summed, float)).groupby("client")
    sums = by_client[_SUMMED].sum().where(by_client[_SUMMED].count().eq(by_client.size(), axis=0))
    last = by_client.tail(1).set_index("client").sort_index()
    return last.assign(rounds=by_client.size(), peak_memory_bytes=by_client["peak_memory_bytes"].max(), **sums)


def mean_cost(costs: pandas.DataFrame) -> Cost | None:
    """Returns the mean of each figure over the rows; None without a row. A figure that a row lacks is None.

    Peak memory is the mean of the rows that have it.
    """
    if costs.empty:
        return None
    means = {**costs[COSTS].mean(skipna=False), "peak_memory_bytes": costs["peak_memory_bytes"].mean()}
    known: dict[str, Any] = {name: None if pandas.isna(value) else float(value) for name, value in means.items()}
    return Cost(**known)


def budget_costs(run: Run) -> dict[str, Cost]:
    """Returns budget name -> mean cost of its clients that trained, in the config's order, then the others."""
    totals = client_totals(run)
    listed = [str(entry["name"]) for entry in run.setting("federation", "budgets", default=[])]
    names = dict.fromkeys([*listed, *totals["budget"]])
    costs = {name: mean_cost(totals[totals["budget"] == name]) for name in names}
    return {name: cost for name, cost in costs.items() if cost}


def phase_seconds(run: Run) -> dict[str, float]:
    """Returns the run's wall time by phase, longest first, with `other` for the remaining time."""
    frame = run.frame("rounds")
    phases = frame.filter(like="seconds_").rename(columns=lambda name: name.removeprefix("seconds_")).sum()
    if phases.empty:
        return {}
    return {
        **phases.sort_values(ascending=False, kind="stable"),
        "other": max(frame["seconds"].sum() - phases.sum(), 0.0),
    }
