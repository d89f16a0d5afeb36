"""Conversion of a round's outcome and of scores to a run's records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median_low, stdev
from typing import Literal

import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.privacy_rules import PrivacyRules, said
from fedguild.client.schedule import steps_in_round
from fedguild.config.training import TrainingSettings
from fedguild.core.score_names import Scope, Score, joined, names_of
from fedguild.measuring.costs.flops import cost
from fedguild.measuring.log.records import ClientRecord, EvaluationRecord, ObservationRecord, RoutingRecord
from fedguild.measuring.scores.expert_usage import expert_utilisation
from fedguild.measuring.scores.scores import Scores, Summary
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.server.engine import Delivery
from fedguild.server.method import Observation
from fedguild.server.round import Outcome

LONGEST_TEXTS = 2.0
"""How much longer than the median client's the texts of a real client count, where tokens are weights."""
DEVIATION = "deviation"
"""The metric of a mean over clients: the sample standard deviation of their scores."""
Where = tuple[Scope, int, Literal["test", "validation"]]


def client_records(
    outcome: Outcome, model: ModelInfo, rules: PrivacyRules | None = None, *, checkpointing: bool = False
) -> list[ClientRecord]:
    """Returns a record for each client that trained in the round, without what it withholds.

    All of a client's tokens are priced in sequences of the mean length of those that it trained on.

    Args:
        checkpointing: Whether activations are recomputed in the backward pass.
    """
    records = []
    for delivery in outcome.deliveries:
        client, plan, report = delivery.task.client, delivery.plan, delivery.report
        traffic = outcome.traffic[client.index]
        rows = report.examples * (2 if report.reference_tokens else 1)
        sequence, told = max(1, round(report.tokens / max(1, rows))), not report.withheld
        costs = cost(model, plan)
        flops = costs.training_flops(report.tokens, sequence, checkpointing=checkpointing)
        flops += costs.forward_flops(report.forward_tokens, sequence)
        flops += cost(model, AdapterPlan((), plan.active_experts)).forward_flops(report.reference_tokens, sequence)
        steps = report.steps if told or rules is None else _public_steps(rules, delivery)
        records.append(
            ClientRecord(
                round=outcome.round,
                client=client.index,
                budget=client.budget.name,
                active_experts=plan.active_experts or model.top_k,
                rank=plan.rank,
                examples=said(rules, client),
                steps=steps if told or rules is not None else None,
                tokens=report.tokens if told else None,
                train_loss=report.loss if told else None,
                upload_bytes=traffic.upload_bytes,
                download_bytes=traffic.download_bytes,
                upload_parts=dict(traffic.upload_by_part),
                training_flops=float(flops) if told else None,
                peak_memory_bytes=delivery.peak_memory_bytes,
                seconds=report.seconds if told else None,
            )
        )
    return records


def _public_steps(rules: PrivacyRules, delivery: Delivery) -> int | None:
    """Returns a training's steps if they follow from what is public, 0 for one that failed; else None."""
    public = rules.said_steps(delivery.task.client.examples)
    if public is None:
        return None
    return delivery.report.steps or (0 if delivery.failure else public)


def evaluation_record(
    name: str, where: Where, scores: Scores, plan: AdapterPlan, flops_per_token: float, *, perplexity: bool
) -> EvaluationRecord:
    """Returns the record of one model's scores.

    Args:
        name: The budget's or the client's name.
        where: Scope, round and split.
        scores: Its scores; a client without examples scores 0 of 0.
        plan: The plan that was evaluated.
        flops_per_token: Forward FLOPs of a token, adapters merged.
        perplexity: Whether to record the perplexity of the reference responses.
    """
    scope, number, split = where
    of_tasks = {task: summary.metric for task, summary in scores.by_task.items() if summary.score is not None}
    return EvaluationRecord(
        round=number,
        scope=scope,
        name=name,
        split=split,
        score=scores.overall.score or 0.0,
        metric=scores.overall.metric,
        metrics=_measures(scores.overall, perplexity),
        by_task={task: summary.score for task, summary in scores.by_task.items() if summary.score is not None},
        task_metrics=of_tasks if len({*of_tasks.values()}) > 1 else {},
        examples=scores.overall.count,
        active_experts=plan.active_experts,
        inference_flops_per_token=float(flops_per_token),
    )


def summary_record(name: Score, records: Sequence[EvaluationRecord]) -> EvaluationRecord:
    """Returns the record of a mean over budgets (`mean`), or over the clients with examples (the others).

    With at least two clients the metric `deviation` is the sample standard deviation of their scores.
    """
    counted = [record.score for record in records if record.examples]
    deviation = stdev(counted) if name != "mean" and len(counted) > 1 else None
    metrics = {part for record in records for part in names_of(record.metric)}
    mean = fmean(counted) if counted else 0.0
    return mean_record(name, records[0].round, records[0].split, mean, deviation, metrics)


def mean_record(
    name: Score,
    number: int,
    split: Literal["test", "validation"],
    mean: float,
    deviation: float | None,
    metrics: Iterable[str],
) -> EvaluationRecord:
    """Returns the record of a mean over budgets or clients, and of the sample standard deviation over them.

    Args:
        metrics: Those that the scores are of.
    """
    return EvaluationRecord(
        round=number,
        scope="summary",
        name=name,
        split=split,
        score=mean,
        metric=joined(metrics),
        metrics={} if deviation is None else {DEVIATION: deviation},
    )


def own_mean(scope: Literal["client", "trained", "received"]) -> Score:
    """Returns the name of the mean over the clients of the scores of their own models."""
    return "mtal" if scope == "client" else scope


def believable_tokens(
    clients: Sequence[ClientInfo], tokens: Mapping[int, int], training: TrainingSettings
) -> dict[int, int]:
    """Returns client index -> the tokens with which its activations are weighted among those of all clients.

    They are what it reports, but per step no more than `LONGEST_TEXTS` times the median client's, so that no single
    client's number can determine the run's recorded expert usage.

    Args:
        clients: The clients, with the examples by which they are weighted, which determine their steps.
        tokens: Client index -> the training tokens that it reports.
    """
    steps = {client.index: steps_in_round(max(1, client.examples), training) for client in clients}
    rates = [tokens[client] / steps[client] for client in tokens if tokens[client]]
    usual = LONGEST_TEXTS * (median_low(rates) if rates else 0.0)
    return {client: min(reported, math.ceil(usual * steps[client])) for client, reported in tokens.items()}


def routing_record(number: int, frequency: Mapping[int, Tensor], tokens: Mapping[int, int]) -> list[RoutingRecord]:
    """Returns the round's expert activations; nothing for a dense model.

    Args:
        number: The round.
        frequency: Client index -> [L, M] share of its tokens that activated each expert.
        tokens: Client index -> its training tokens.
    """
    if not frequency:
        return []
    clients = sorted(frequency)
    stacked = torch.stack([frequency[client] for client in clients])
    seen = torch.tensor([tokens[client] for client in clients], dtype=torch.float64)
    counts = (stacked.double() * seen[:, None, None]).sum(0)
    pooled = expert_utilisation(counts, int(seen.sum()))
    return [
        RoutingRecord(
            round=number,
            layers=stacked.shape[1],
            experts=stacked.shape[2],
            clients=clients,
            frequency=[[[round(value, 6) for value in row] for row in layers] for layers in stacked.tolist()],
            entropy=[float(value) for value in pooled.entropy],
            normalised_entropy=[float(value) for value in pooled.normalised_entropy],
            gini=[float(value) for value in pooled.gini],
        )
    ]


def observation_records(number: int, observations: Sequence[Observation]) -> list[ObservationRecord]:
    return [
        ObservationRecord(
            round=number,
            name=seen.name,
            rows=list(seen.rows),
            columns=list(seen.columns),
            values=[[round(value, 6) for value in row] for row in _matrix(seen)],
            unit=seen.unit,
        )
        for seen in observations
    ]


def _matrix(seen: Observation) -> list[list[float]]:
    rows: list[list[float]] = seen.values.double().reshape(len(seen.rows), -1).tolist()
    return rows


def _measures(summary: Summary, perplexity: bool) -> dict[str, float]:
    measures: dict[str, float | None] = {
        "accuracy": summary.accuracy,
        "macro_f1": summary.macro_f1,
        **summary.metrics,
        "nats": summary.nats if perplexity else None,
        "perplexity": summary.perplexity if perplexity else None,
    }
    return {name: value for name, value in measures.items() if value is not None}
