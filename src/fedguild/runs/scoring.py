"""Scoring of a run's models: the global model at every budget, and each client's own, as trained and as received."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby, islice, zip_longest
from typing import TypeVar

import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.merge_ledger import MERGE, merge_version, reaches
from fedguild.config import Config
from fedguild.core.payload import Payload, digest_of
from fedguild.core.score_names import metric_name
from fedguild.data import Example
from fedguild.data.corpora import corpus_spec
from fedguild.engines.cohorts import MEMORY_SHARE, free_bytes
from fedguild.measuring.costs.flops import cost
from fedguild.measuring.costs.memory import evaluation_batch_tokens
from fedguild.measuring.log.records import EvaluationRecord, Record
from fedguild.measuring.log.samples import Sample
from fedguild.measuring.scores.generation import generate_texts
from fedguild.measuring.scores.likelihood import Candidates, candidate_losses, encode_candidates
from fedguild.measuring.scores.metrics import METRICS, load_metrics
from fedguild.measuring.scores.mismatch import Mismatch
from fedguild.measuring.scores.preferences import ACCURACY, MARGIN, pair_losses
from fedguild.measuring.scores.tasks import EvaluatedModel, Scoring, encoded_pairs, likeliest, pad_id
from fedguild.measuring.scores.tasks import evaluate as score
from fedguild.model.plan import AdapterPlan, adapter_shapes
from fedguild.model.slots import SlotModel
from fedguild.runs.guarantee import require_public_scores
from fedguild.runs.recording import DEVIATION, Where, evaluation_record, observation_records, own_mean, summary_record
from fedguild.runs.setup import Experiment, OwnScope, Split
from fedguild.server.method import Deployment, Method, client_model, excerpt_of
from fedguild.server.optimizer import own_state

Found = TypeVar("Found")
Model = tuple[str, Budget, Deployment]
"""A model's name (that of its budget or client), the budget that it runs at, and its deployment."""
Scored = tuple[Model, Sequence[Example]]
"""A model with the examples that it answers."""
Content = tuple[tuple[str, Budget, AdapterPlan, str], ...]
Known = dict[Content, list[EvaluationRecord]]
"""Scores by what the scored models are."""
MODELS_AT_ONCE = 8
"""Number of models that share a forward pass if the cohort size is `auto`."""
DIAGNOSED_TEXTS = 32
"""Number of held-out texts by which the diagnosis compares numbers of active experts."""
UNTRAINED_TEXTS = 16
"""Number of training texts by which the backbone's own loss is estimated."""
SAMPLED_TOKENS = 64
"""Longest answer that the report shows."""
CPU_BATCH_TOKENS, LEAST_BATCH_TOKENS = 8192, 64
"""Tokens of a batch that `evaluation.batch_tokens: auto` takes on a CPU, where more make nothing faster; the fewest."""


def evaluate_state(experiment: Experiment, state: Payload, number: int, split: Split | None = None) -> list[Record]:
    """Scores the global model at every budget and, if the config asks for it, every client's own model."""
    settings = experiment.config.evaluation
    split = split or settings.split
    pooled = experiment.data.pooled(split, settings.max_examples, experiment.config.seed)
    global_models = _global_models(experiment, state) if pooled or experiment.remote is None else []
    records = _scored(experiment, global_models, [pooled] * len(global_models), ("budget", number, split))
    summary: list[Record] = [summary_record("mean", records)] if records else []
    own = _scores_own_models(experiment, has_global_model=bool(global_models))
    known: Known | None = {} if own + settings.trained + settings.received > 1 else None
    if own:
        require_public_scores(experiment.config)
    scopes: list[OwnScope] = ["client"] if own else []
    scopes += ["trained"] if settings.trained else []
    scopes += ["received"] if settings.received else []
    for scope in scopes:
        scored = _client_scores(experiment, scope, state, number, split, known)
        each = [record for record in scored if record.scope != "summary"]
        summary += [summary_record(own_mean(scope), each)] if each else scored  # a secure run has the mean alone
        records += each
    if settings.pooled:
        models = _models(experiment, "received", _excerpts(experiment, state), number)
        scored = _scored_once(experiment, models, pooled, ("pooled", number, split))
        summary.append(summary_record("pooled", scored))
        records += scored
    shown = {record.name: record.score for record in records if record.scope == "budget"}
    shown = shown or {record.name: record.score for record in summary if isinstance(record, EvaluationRecord)}
    if shown:
        told = [record for record in [*records, *summary] if isinstance(record, EvaluationRecord)]
        experiment.progress.evaluated(shown, metric_name(record.metric for record in told))
    return [*records, *summary]


def sampled(experiment: Experiment, state: Payload, number: int) -> list[Sample]:
    """Returns what the global model answers at every budget to a few of the examples that it is scored on.

    Empty for a method without a global model, if the server has no examples, and if differential privacy protects the
    clients that hold them.
    """
    config, tokenizer = experiment.config, experiment.backbone.tokenizer
    settings, corpus = config.evaluation, experiment.data.corpus
    examples = experiment.data.pooled(settings.split, settings.samples, config.seed) if settings.samples else ()
    of_clients = experiment.remote is None and not (settings.split == "test" and corpus.test)
    if not examples or (of_clients and config.privacy.unit != "none"):
        return []
    rows = [encode_candidates(example, tokenizer, config.data.max_length) for example in examples]

    def answers(members: Sequence[Scored], _: Sequence[AdapterPlan], model: EvaluatedModel, size: int) -> list[Sample]:
        texts = generate_texts(
            model,
            [examples] * len(members),
            tokenizer,
            max_tokens=config.data.max_length,
            max_new_tokens=min(SAMPLED_TOKENS, settings.max_new_tokens, config.data.max_length // 2),
            batch_tokens=size,
        )
        losses = candidate_losses(model, [rows] * len(members), size, pad_id(tokenizer))
        return [
            Sample(
                round=number,
                budget=name,
                prompt=example.prompt,
                reference=example.response,
                likeliest=_chosen(example, row, nll, _scoring(experiment)),
                generated=text,
            )
            for ((name, _, _), _), of_slot, nlls in zip(members, texts, losses, strict=True)
            for example, row, text, nll in zip(examples, rows, of_slot, nlls, strict=True)
        ]

    models = _global_models(experiment, state)
    return _in_slots(experiment, models, [examples] * len(models), answers)


def _chosen(example: Example, row: Candidates, nll: Sequence[float], scoring: Scoring) -> str:
    if not example.choices:
        return ""
    return example.choices[likeliest(nll, [len(response) for response in row.responses], scoring)]


def _global_models(experiment: Experiment, state: Payload) -> list[Model]:
    """Returns the global model at every budget; empty if the method has none."""
    method, model = experiment.method, experiment.backbone.info
    deployed = [(budget, method.deploy(state, model, budget)) for budget in experiment.budgets]
    return [(budget.name, budget, deployment) for budget, deployment in deployed if deployment is not None]


def diagnosed(experiment: Experiment, state: Payload, number: int) -> list[Record]:
    """Returns what the budgets' active experts change in the layers of the global model, on some of the scored texts.

    Empty for a dense model, for a method without a global model, and if the engine's processes hold the weights.
    """
    settings, model = experiment.config.evaluation, experiment.backbone.info
    texts = experiment.data.pooled(settings.split, DIAGNOSED_TEXTS, experiment.config.seed)
    if not model.moe or not texts or experiment.scorer is not None:
        return []
    deployed = [(budget, one) for _, budget, one in _global_models(experiment, state)]
    if not deployed or any(_identity(one.merged) != _identity(deployed[0][1].merged) for _, one in deployed):
        return []
    plans = [evaluated_plan(experiment, budget, deployment) for budget, deployment in deployed]
    tokenizer, max_tokens = experiment.backbone.tokenizer, experiment.config.data.max_length
    rows = [encode_candidates(example, tokenizer, max_tokens) for example in texts]
    mismatch = Mismatch(experiment.backbone.moe, len(plans))
    with (
        experiment.backbone.merged(deployed[0][1].merged),
        _loaded(experiment, plans, [deployment for _, deployment in deployed]) as (model_in_slots, batch_tokens),
        mismatch.observing(),
    ):
        candidate_losses(model_in_slots, [rows] * len(plans), batch_tokens, pad_id(tokenizer))
    observations = mismatch.observations([budget.name for budget, _ in deployed])
    return list(observation_records(number, observations))


def require_scorable(experiment: Experiment) -> None:
    """Checks, before anything is trained, that a run may take the scores that its config asks for.

    Raises:
        ConfigError: only the clients' own models can be scored, and those scores are not public.
    """
    settings, is_local = experiment.config.evaluation, experiment.remote is None
    pooled = experiment.data.pooled(settings.split, settings.max_examples, experiment.config.seed)
    has_global_model = experiment.method.facts.has_global_model and (is_local or bool(pooled))
    if _scores_own_models(experiment, has_global_model=has_global_model):
        require_public_scores(experiment.config)


def _scores_own_models(experiment: Experiment, *, has_global_model: bool) -> bool:
    """Whether every client's own model is scored: if the config asks for it, or there is nothing else to score."""
    settings = experiment.config.evaluation
    return settings.clients or not (has_global_model or settings.trained)


def recorded_scores(config: Config, method: Method) -> dict[str, set[str]]:
    """Returns the scores of a run's budgets and means, as far as its config determines them, and the metrics of each.

    A metric may still be missing if no example of the data has it. With real clients the server may lack examples for a
    global model, and then has the clients' mean.
    """
    settings, real = config.evaluation, config.federation.engine.name == "flower"
    measures = {"accuracy", "macro_f1", corpus_spec(config.data.dataset).metric, *settings.metrics}
    measures |= {"nats", "perplexity"} if settings.perplexity else set()
    measures |= {ACCURACY, MARGIN} if config.training.objective != "sft" else set()
    scores: dict[str, set[str]] = {}
    if method.facts.has_global_model:
        scores |= {"mean": set(), **{tier.name: measures for tier in config.federation.budgets}}
    if settings.clients or real or not (method.facts.has_global_model or settings.trained):
        scores["mtal"] = {DEVIATION}
    scores |= {name: {DEVIATION} for name in ("trained", "received", "pooled") if getattr(settings, name)}
    return scores


def _client_scores(
    experiment: Experiment, scope: OwnScope, state: Payload, number: int, split: Split, known: Known | None
) -> list[EvaluationRecord]:
    """Returns every client's score on its own held-out examples, computed where the examples are stored."""
    if experiment.remote is not None:
        return experiment.remote.score(scope, state, number, split)
    return score_clients(experiment, scope, _excerpts(experiment, state), number, split, known)


def score_clients(
    experiment: Experiment,
    scope: OwnScope,
    excerpts: Callable[[ClientInfo], Payload],
    number: int,
    split: Split,
    known: Known | None = None,
) -> list[EvaluationRecord]:
    """Scores an experiment's clients on their own held-out examples.

    With most methods a client's own model is the one that it trained or the one that it receives, which is then scored
    once.

    Args:
        experiment: The run; with real clients, the run of one of them.
        scope: `client` for a client's own model, `trained` for its model right after training, `received` for the one
            with which it would begin its next round.
        excerpts: Returns a client's excerpt of the state.
        number: The round that led to the state.
        known: Scores of the same examples by the models that have them; those of other models are added.
    """
    models = _models(experiment, scope, excerpts, number)
    content = None if known is None else _content(models)
    if known is not None and content is not None and content in known:
        return [record.model_copy(update={"scope": scope}) for record in known[content]]
    limit = experiment.config.evaluation.max_examples
    held_out = [getattr(data, split)[:limit] for data in experiment.data.clients]
    records = _scored(experiment, models, held_out, (scope, number, split))
    if known is not None and content is not None:
        known[content] = records
    return records


def _content(models: Sequence[Model]) -> Content | None:
    """Returns a key of several models, equal only for the same ones; None if the backbone was changed."""
    if any(deployment.merged for _, _, deployment in models):
        return None
    return tuple((name, budget, one.plan, digest_of(one.tensors)) for name, budget, one in models)


def _scored(
    experiment: Experiment,
    models: Sequence[Model],
    examples: Sequence[Sequence[Example]],
    where: Where,
) -> list[EvaluationRecord]:
    """Scores several models."""
    _refer(experiment, models, examples)
    return _in_slots(experiment, models, examples, partial(_scored_at_once, experiment, where))


def _in_slots(
    experiment: Experiment,
    models: Sequence[Model],
    examples: Sequence[Sequence[Example]],
    use: Callable[[Sequence[Scored], Sequence[AdapterPlan], EvaluatedModel, int], list[Found]],
) -> list[Found]:
    """Uses several models; those with the same merged backbone together, in groups of a cohort's size.

    Args:
        use: Takes models with their examples, their plans, the loaded slots, and the tokens of a batch.
    """
    width = _width(experiment)
    found: list[Found] = []
    for _, group in groupby(zip(models, examples, strict=True), key=lambda pair: _identity(pair[0][2].merged)):
        members = list(group)
        here = experiment.scorer is None
        with experiment.backbone.merged(members[0][0][2].merged) if here else nullcontext():
            for start in range(0, len(members), width):
                chosen = members[start : start + width]
                plans = [evaluated_plan(experiment, budget, deployment) for (_, budget, deployment), _ in chosen]
                with _loaded(experiment, plans, [deployment for (_, _, deployment), _ in chosen]) as (model, size):
                    found += use(chosen, plans, model, size)
    return found


def _scored_at_once(
    experiment: Experiment,
    where: Where,
    members: Sequence[Scored],
    plans: Sequence[AdapterPlan],
    model: EvaluatedModel,
    batch_tokens: int,
) -> list[EvaluationRecord]:
    """Scores several models, each on its examples, in one pass."""
    config, backbone = experiment.config, experiment.backbone
    settings = config.evaluation
    scores = score(
        model,
        [examples for _, examples in members],
        backbone.tokenizer,
        max_tokens=config.data.max_length,
        max_new_tokens=settings.max_new_tokens,
        batch_tokens=batch_tokens,
        scoring=_scoring(experiment),
        references=[
            [experiment.references[one, plan.active_experts] for one in own if one.rejected is not None]
            for (_, own), plan in zip(members, plans, strict=True)
        ],
    )
    flops = [cost(backbone.info, plan).table_flops(1, adapters=False) for plan in plans]
    return [
        evaluation_record(name, where, result, plan, per_token, perplexity=settings.perplexity)
        for ((name, _, _), _), plan, result, per_token in zip(members, plans, scores, flops, strict=True)
    ]


def _width(experiment: Experiment) -> int:
    """Returns how many models share a forward pass."""
    at_once = experiment.config.federation.cohort_size
    return MODELS_AT_ONCE if at_once == "auto" else at_once


def _refer(experiment: Experiment, models: Sequence[Model], examples: Sequence[Sequence[Example]]) -> None:
    """Fills `Experiment.references` for the preference pairs of these models' examples."""
    known = experiment.references
    wanted: dict[int | None, dict[Example, None]] = {}
    for (_, budget, deployment), own in zip(models, examples, strict=True):
        active = evaluated_plan(experiment, budget, deployment).active_experts
        new = {one: None for one in own if one.rejected is not None and (one, active) not in known}
        wanted.setdefault(active, {}).update(new)
    left = [(active, list(missing)) for active, missing in wanted.items() if missing]
    tokenizer, longest = experiment.backbone.tokenizer, experiment.config.data.max_length
    width = _width(experiment)
    for start in range(0, len(left), width):
        members = left[start : start + width]
        plans = [AdapterPlan((), active) for active, _ in members]
        pairs = encoded_pairs([missing for _, missing in members], tokenizer, longest)
        with _loaded(experiment, plans, [Deployment(plan, {}) for plan in plans]) as (model, batch_tokens):
            losses = pair_losses(model, pairs, batch_tokens, pad_id(tokenizer))
        for (active, missing), found in zip(members, losses, strict=True):
            known.update({(one, active): pair for one, pair in zip(missing, found, strict=True)})


def untrained_loss(experiment: Experiment) -> float:
    """Returns the backbone's loss on some of the clients' training texts, in nats per response token."""
    turns = zip_longest(*experiment.encoded.values())
    texts = islice((text for turn in turns for text in turn if text is not None), UNTRAINED_TEXTS)
    rows = [Candidates(text.input_ids[: text.prompt_length], (text.response,)) for text in texts if text.prompt_length]
    nothing = AdapterPlan(())
    with _loaded(experiment, [nothing], [Deployment(nothing, {})]) as (model, batch_tokens):
        (losses,) = candidate_losses(model, [rows], batch_tokens, pad_id(experiment.backbone.tokenizer))
    tokens = sum(len(row.responses[0]) for row in rows)
    return sum(loss for (loss,) in losses) / max(1, tokens)


@contextmanager
def _loaded(
    experiment: Experiment, plans: Sequence[AdapterPlan], deployments: Sequence[Deployment]
) -> Iterator[tuple[EvaluatedModel, int]]:
    """Loads models for the duration of the block, here or in the engine's processes.

    Yields:
        The models, and the tokens of a batch.
    """
    backbone, scorer = experiment.backbone, experiment.scorer
    tensors = [deployment.tensors for deployment in deployments]
    if scorer is not None:
        with scorer.slots(plans, tensors, deployments[0].merged, backbone.info) as workers:
            yield workers, _batch_tokens(experiment, plans, scorer.device, scorer.free_bytes)
        return
    with SlotModel(backbone, plans) as model:
        for slot, own in enumerate(tensors):
            model.load(slot, own)
        with backbone.without_gradients():
            yield model, _batch_tokens(experiment, plans, backbone.device, lambda: free_bytes(backbone.device))


def _batch_tokens(
    experiment: Experiment, plans: Sequence[AdapterPlan], device: torch.device, free: Callable[[], int]
) -> int:
    """Returns the tokens of a batch: the config's, or as many as fit a GPU's memory besides the loaded slots."""
    wanted, backbone = experiment.config.evaluation.batch_tokens, experiment.backbone
    if wanted != "auto":
        return wanted
    if device.type == "cpu":
        return CPU_BATCH_TOKENS
    dtype, model = backbone.dtype, backbone.info
    casts = dtype.itemsize * sum(math.prod(shape) for plan in plans for shape in adapter_shapes(model, plan).values())
    room = int(MEMORY_SHARE * max(0, free() - casts))
    row = experiment.config.data.max_length
    largest = max(plans, key=lambda plan: plan.active_experts or model.top_k)
    return max(LEAST_BATCH_TOKENS, evaluation_batch_tokens(model, largest, dtype=dtype, free=room, row_tokens=row))


def _identity(merged: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """Returns a key that is equal for models whose backbones hold the same tensors."""
    return [(name, id(tensor)) for name, tensor in merged.items()]


def evaluated_plan(experiment: Experiment, budget: Budget, deployment: Deployment) -> AdapterPlan:
    """Returns a deployment's plan, with the budget's active experts unless the method's are wanted."""
    model, plan = experiment.backbone.info, deployment.plan
    if not model.moe:
        return plan
    as_method = experiment.config.evaluation.active_experts == "method"
    return replace(plan, active_experts=(plan.active_experts or model.top_k) if as_method else budget.active_experts)


def measures_of(config: Config) -> tuple[str, ...]:
    """Returns the metrics that a score can be the mean of: of choices, of preference pairs and of written answers."""
    return ("accuracy", ACCURACY, corpus_spec(config.data.dataset).metric)


def _scoring(experiment: Experiment) -> Scoring:
    config, given = experiment.config, experiment.metrics
    settings, primary = config.evaluation, corpus_spec(config.data.dataset).metric
    found = load_metrics(name for name in settings.metrics if name not in given)
    return Scoring(
        choices="generation" if settings.answer_mode == "generation" else "likelihood",
        length_normalization=settings.length_normalization,
        metrics={
            **{name: given[name] if name in given else found[name] for name in settings.metrics},
            primary: METRICS.load(primary),
        },
        responses=primary,
        beta=config.training.dpo_beta,
    )


def _excerpts(experiment: Experiment, state: Payload) -> Callable[[ClientInfo], Payload]:
    return lambda client: excerpt_of(experiment.method, own_state(state), experiment.backbone.info, client)


def _models(
    experiment: Experiment, scope: OwnScope, excerpts: Callable[[ClientInfo], Payload], number: int
) -> list[Model]:
    """Returns a model of every client after a round, as `score_clients` names them."""
    return [
        (client.name, client.budget, _model(experiment, scope, excerpts(client), client, number))
        for client in experiment.clients
    ]


def _model(experiment: Experiment, scope: OwnScope, excerpt: Payload, client: ClientInfo, number: int) -> Deployment:
    method, info = experiment.method, experiment.backbone.info
    kept, trained = experiment.memory.load(client.name, number + 1), experiment.memory.trained
    left = Payload() if scope != "trained" or trained is None else trained.load(client.name, number + 1)
    if not reaches(excerpt.part(MERGE), merge_version(left)):  # its backbone is part of a later one
        left = Payload()
    return client_model(method, excerpt, info, client, kept, scope, left)


def _scored_once(
    experiment: Experiment, models: Sequence[Model], examples: Sequence[Example], where: Where
) -> list[EvaluationRecord]:
    """Scores several models on the same examples; identical models are scored once."""
    distinct: dict[object, Model] = {}
    keys = []
    for model in models:
        _, budget, deployment = model
        tensors = tuple(_identity(deployment.tensors))
        key = (budget, deployment.plan, tensors, tuple(_identity(deployment.merged)))
        keys.append(key)
        distinct.setdefault(key, model)
    scored = _scored(experiment, list(distinct.values()), [examples] * len(distinct), where)
    by_key = dict(zip(distinct, scored, strict=True))
    return [by_key[key].model_copy(update={"name": name}) for key, (name, _, _) in zip(keys, models, strict=True)]
