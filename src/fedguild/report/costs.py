"""Costs of a run for each client: FLOPs, bytes, memory and seconds, summed over its rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from fedguild.runs.folder import Run
from fedguild.runs.log import ClientRecord

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Cost:
    """Costs of a client over a whole run, or their mean over clients.

    Attributes:
        training_flops: Floating-point operations of its local training; None where they are withheld for privacy.
        upload_bytes: Bytes that it sent.
        download_bytes: Bytes that it received.
        peak_memory_bytes: Largest peak memory of any of its rounds; None where no device reported it.
        seconds: Wall time of its local training; None alike.
    """

    training_flops: float | None
    upload_bytes: float
    download_bytes: float
    peak_memory_bytes: float | None
    seconds: float | None


@dataclass(frozen=True)
class ClientTotals:
    """A client over a whole run.

    Attributes:
        client: Index of the client.
        budget: Name of its budget.
        active_experts: Active experts per token in its last local training.
        rank: LoRA rank in its last local training.
        rounds: Rounds in which it trained.
        examples: Number of its training examples; None where it is withheld for privacy.
        steps: Optimizer steps; None alike.
        tokens: Tokens of its batches, padding excluded; None alike.
        train_loss: Mean loss of its last local training; None alike.
        cost: Its costs.
    """

    client: int
    budget: str
    active_experts: int
    rank: int
    rounds: int
    examples: int | None
    steps: int | None
    tokens: int | None
    train_loss: float | None
    cost: Cost


def client_totals(run: Run) -> list[ClientTotals]:
    """Returns every client that trained at least once, in client order."""
    by_client: dict[int, list[ClientRecord]] = defaultdict(list)
    for record in run.clients:
        by_client[record.client].append(record)
    return [_totals(by_client[client]) for client in sorted(by_client)]


def mean_cost(costs: Iterable[Cost]) -> Cost | None:
    """Returns the mean of each figure; None where there is no cost to take the mean of."""
    every = list(costs)
    if not every:
        return None
    memory = [cost.peak_memory_bytes for cost in every if cost.peak_memory_bytes is not None]
    return Cost(
        training_flops=_mean(cost.training_flops for cost in every),
        upload_bytes=fmean(cost.upload_bytes for cost in every),
        download_bytes=fmean(cost.download_bytes for cost in every),
        peak_memory_bytes=fmean(memory) if memory else None,
        seconds=_mean(cost.seconds for cost in every),
    )


def budget_costs(run: Run) -> dict[str, Cost]:
    """Returns budget name -> mean cost of its clients that trained, in the config's order, then the others."""
    totals = client_totals(run)
    listed = [str(entry["name"]) for entry in run.setting("federation", "budgets", default=[])]
    names = dict.fromkeys([*listed, *(row.budget for row in totals)])
    costs = {name: mean_cost(row.cost for row in totals if row.budget == name) for name in names}
    return {name: cost for name, cost in costs.items() if cost}


def phase_seconds(run: Run) -> dict[str, float]:
    """Returns the run's wall time by phase, longest first, with `other` for the remaining time."""
    totals: dict[str, float] = defaultdict(float)
    for record in run.rounds:
        for phase, seconds in record.phase_seconds.items():
            totals[phase] += seconds
    rest = sum(record.seconds for record in run.rounds) - sum(totals.values())
    ordered = dict(sorted(totals.items(), key=lambda entry: -entry[1]))
    return {**ordered, "other": max(rest, 0.0)} if ordered else {}


def _totals(records: Sequence[ClientRecord]) -> ClientTotals:
    last = records[-1]
    memory = [record.peak_memory_bytes for record in records if record.peak_memory_bytes is not None]
    return ClientTotals(
        client=last.client,
        budget=last.budget,
        active_experts=last.active_experts,
        rank=last.rank,
        rounds=len(records),
        examples=last.examples,
        steps=_sum(record.steps for record in records),
        tokens=_sum(record.tokens for record in records),
        train_loss=last.train_loss,
        cost=Cost(
            training_flops=_sum(record.training_flops for record in records),
            upload_bytes=sum(record.upload_bytes for record in records),
            download_bytes=sum(record.download_bytes for record in records),
            peak_memory_bytes=max(memory, default=None),
            seconds=_sum(record.seconds for record in records),
        ),
    )


def _sum(values: Iterable[Number | None]) -> Number | None:
    """Returns the sum; None where a value is withheld."""
    every = list(values)
    known = [value for value in every if value is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(every) else None


def _mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean; None where a value is withheld."""
    every = list(values)
    known = [value for value in every if value is not None]
    return fmean(known) if len(known) == len(every) else None
