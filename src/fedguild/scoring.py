"""Scoring a run's models: the global one as every budget runs it, and each client's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config import Config
from fedguild.data import Example
from fedguild.evaluation.profile import cost
from fedguild.evaluation.records import evaluation_record, summary_record
from fedguild.evaluation.tasks import Scoring
from fedguild.evaluation.tasks import evaluate as score
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.payload import Payload
from fedguild.server.method import Deployment, State
from fedguild.server.record import EvaluationRecord, Record
from fedguild.setup import Experiment, Split

MODELS_AT_ONCE = 8
"""How many models share a forward pass where the cohort size is `auto`."""


def evaluate_state(experiment: Experiment, state: State, number: int, split: Split | None = None) -> list[Record]:
    """Scores the global model as every budget runs it and, where asked, every client's own model."""
    settings, method, model = experiment.config.evaluation, experiment.method, experiment.backbone.info
    split = split or settings.split
    pooled = experiment.data.pooled(split, settings.max_examples, experiment.config.seed)
    deployed = [(budget, method.deploy(state, model, budget)) for budget in experiment.budgets]
    global_models = [(budget.name, budget, deployment) for budget, deployment in deployed if deployment is not None]
    records = _scored(experiment, global_models, [pooled] * len(global_models), ("budget", number, split))
    summary: list[Record] = [summary_record("mean", records)] if records else []
    held_out = [getattr(data, split)[: settings.max_examples] for data in experiment.data.clients]
    if settings.clients or not global_models:
        scored = _scored(experiment, _own_models(experiment, state, number), held_out, ("client", number, split))
        summary.append(summary_record("mtal", scored))
        records += scored
    if settings.received:
        scored = _scored(experiment, _next_models(experiment, state), held_out, ("received", number, split))
        summary.append(summary_record("received", scored))
        records += scored
    if settings.pooled:
        own = _own_models(experiment, state, number)
        scored = _scored(experiment, own, [pooled] * len(own), ("pooled", number, split))
        summary.append(summary_record("pooled", scored))
        records += scored
    experiment.progress.evaluated(
        {record.name: record.score for record in records if record.scope == "budget"}
        or {record.name: record.score for record in summary if isinstance(record, EvaluationRecord)}
    )
    return [*records, *summary]


def _scored(
    experiment: Experiment,
    models: Sequence[tuple[str, Budget, Deployment]],
    examples: Sequence[Sequence[Example]],
    where: tuple[Literal["budget", "client", "received", "pooled"], int, Split],
) -> list[EvaluationRecord]:
    """Scores several models, as many at once as a cohort holds."""
    config, backbone = experiment.config, experiment.backbone
    settings = config.evaluation
    records: list[EvaluationRecord] = []
    width = MODELS_AT_ONCE if config.federation.cohort_size == "auto" else config.federation.cohort_size
    for start in range(0, len(models), width):
        part = models[start : start + width]
        plans = [evaluated_plan(experiment, budget, deployment) for _, budget, deployment in part]
        with SlotModel(backbone, plans) as model:
            for slot, (_, _, deployment) in enumerate(part):
                model.load(slot, deployment.tensors)
            with torch.inference_mode():
                scores = score(
                    model,
                    examples[start : start + width],
                    backbone.tokenizer,
                    max_tokens=config.data.max_tokens,
                    max_new_tokens=settings.max_new_tokens,
                    batch_tokens=settings.batch_tokens,
                    scoring=_scoring(config),
                )
        for (name, _, _), plan, result in zip(part, plans, scores, strict=True):
            flops = cost(backbone.info, plan).table_flops(1, adapters=False)
            records.append(evaluation_record(name, where, result, plan, flops, perplexity=settings.perplexity))
    return records


def evaluated_plan(experiment: Experiment, budget: Budget, deployment: Deployment) -> AdapterPlan:
    """Returns a deployment's plan, with the budget's active experts unless the method's are wanted."""
    model, plan = experiment.backbone.info, deployment.plan
    if not model.moe:
        return plan
    own = experiment.config.evaluation.active_experts == "method"
    return replace(plan, active_experts=(plan.active_experts or model.top_k) if own else budget.active_experts)


def _scoring(config: Config) -> Scoring:
    settings = config.evaluation
    return Scoring(
        choices="generation" if settings.by == "generation" else "likelihood",
        normalise=settings.normalise,
        responses="exact_match" if config.data.corpus == "tasks" else "rouge_l",
    )


def _own_models(experiment: Experiment, state: State, number: int) -> list[tuple[str, Budget, Deployment]]:
    """Returns each client's model as it uses it after the round."""
    kept = [experiment.memory.load(client.name, number + 1) for client in experiment.clients]
    return [
        _personal(experiment, state, client, memory) for client, memory in zip(experiment.clients, kept, strict=True)
    ]


def _next_models(experiment: Experiment, state: State) -> list[tuple[str, Budget, Deployment]]:
    """Returns the model that each client would receive next."""
    return [_personal(experiment, state, client, Payload()) for client in experiment.clients]


def _personal(
    experiment: Experiment, state: State, client: ClientInfo, memory: Payload
) -> tuple[str, Budget, Deployment]:
    deployment = experiment.method.personalize(state, experiment.backbone.info, client, memory)
    return client.name, client.budget, deployment
