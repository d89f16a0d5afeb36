"""A run from config to report, in one function that reads like the stages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.client.optimizer import OptimizerSettings
from fedguild.client.schedule import TrainingSettings
from fedguild.config import Config, load_config
from fedguild.data import (
    ClientData,
    Corpus,
    Example,
    PartitionTable,
    SplitRule,
    load_corpus,
    partition,
    partition_table,
    pooled_test,
    split_clients,
)
from fedguild.data.batches import encode
from fedguild.engines.local import LocalEngine
from fedguild.environment import describe_environment
from fedguild.errors import CheckpointError, ConfigError
from fedguild.evaluation.profile import cost
from fedguild.evaluation.records import client_records, evaluation_record, routing_record, summary_record
from fedguild.evaluation.tasks import Scoring
from fedguild.evaluation.tasks import evaluate as score
from fedguild.files import write_json, write_text
from fedguild.methods import build_method
from fedguild.model.backbone import Backbone, load_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.progress import Progress, Silent
from fedguild.report.html import write_report
from fedguild.report.tracking import Tracker
from fedguild.seeding import numpy_rng, torch_rng
from fedguild.server import checkpoint
from fedguild.server.method import Deployment, Method, State
from fedguild.server.record import EvaluationRecord, PartitionRecord, Record, Rejection, RoundRecord, RunLog
from fedguild.server.rounds import Outcome, RoundRules, frequencies, run_round

Split = Literal["test", "validation"]
CHECKPOINTS = "checkpoints"
MEMORY = "clients"


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, before any model is loaded.

    Attributes:
        corpus: The corpus.
        clients: Each client's training, validation and test examples.
        partition_table: Clients × labels.
    """

    corpus: Corpus
    clients: list[ClientData]
    partition_table: PartitionTable

    def pooled(self, split: Split) -> tuple[Example, ...]:
        """Returns the held-out examples that the global model is scored on."""
        if split == "test":
            return pooled_test(self.corpus, self.clients)
        return tuple(example for client in self.clients for example in client.validation)


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        folder: Where it was written.
        rounds: Rounds it ran.
        scores: Budget -> score of the global model after the last round, from 0 to 1.
        mean: Mean over the budgets.
        report: The page.
    """

    folder: Path
    rounds: int
    scores: Mapping[str, float]
    mean: float
    report: Path


@dataclass
class Experiment:
    """Everything that a run holds while it runs."""

    config: Config
    folder: Path
    method: Method
    data: PreparedData
    backbone: Backbone
    budgets: list[Budget]
    clients: list[ClientInfo]
    memory: ClientMemory
    progress: Progress


def run(config: Config, output: Path, *, progress: Progress | None = None) -> RunResult:
    """Runs a config in a new folder.

    Raises:
        CheckpointError: the folder holds a run already.
        FedGuildError: anything in the config, the data or the model that the user can mend.
    """
    if (output / "config.yaml").exists():
        raise CheckpointError(
            f"{output} holds a run already.", f"Go on with `fedguild resume {output}`, or choose another folder."
        )
    experiment = prepare(config, output, progress)
    _write_facts(experiment)
    state = experiment.method.start(
        experiment.backbone.info, experiment.budgets, torch_rng(config.seed, "start", config.method.name)
    )
    RunLog(output).append(*evaluate_state(experiment, state, 0))
    _save(experiment, 0, state)
    return _rounds(experiment, state, first=1)


def resume(output: Path, *, progress: Progress | None = None) -> RunResult:
    """Goes on with a run from its last complete round.

    Raises:
        CheckpointError: the folder holds no run, or its newest checkpoint is damaged.
    """
    config = _written_config(output)
    last = checkpoint.latest(output / CHECKPOINTS)
    if last is None:
        for name in ("config.yaml", RunLog.FILE):
            (output / name).unlink(missing_ok=True)
        return run(config, output, progress=progress)
    saved = checkpoint.load(output / CHECKPOINTS, last, fingerprint=config.fingerprint())
    RunLog(output).truncate_after(last)
    return _rounds(prepare(config, output, progress), saved.state, first=last + 1)


def evaluate(output: Path, *, round: int | None = None, split: Split = "test") -> RunResult:
    """Scores the global model of a run's round again.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
    """
    experiment, state, number = restore(output, round)
    records = evaluate_state(experiment, state, number, split)
    return _result(experiment, number, records, output)


def restore(
    output: Path, round: int | None = None, *, progress: Progress | None = None
) -> tuple[Experiment, State, int]:
    """Returns a run as it was after a round (by default its last), with that round's state.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
    """
    config = _written_config(output)
    number = checkpoint.latest(output / CHECKPOINTS) if round is None else round
    if number is None:
        raise CheckpointError(f"{output} has no complete round yet.", f"Go on with `fedguild resume {output}`.")
    saved = checkpoint.load(output / CHECKPOINTS, number, fingerprint=config.fingerprint())
    return prepare(config, output, progress), saved.state, number


def prepare_data(config: Config) -> PreparedData:
    """Loads the corpus, deals it to the clients and splits every client's share.

    Raises:
        DataError: the data is missing, has other columns, or leaves a client empty.
    """
    data, split = config.data, config.data.split
    corpus = load_corpus(
        data.corpus,
        train=data.train,
        test=data.test,
        limit=data.limit,
        seed=config.seed,
        template=data.template,
        **data.options,
    )
    rng = numpy_rng(config.seed, "partition")
    rule = data.partition
    parts = partition(
        rule.scheme, corpus.train, config.federation.clients, rng=rng, alpha=rule.alpha, minimum=rule.minimum
    )
    cut = SplitRule(
        validation=split.validation,
        test=split.test,
        max_train=split.caps.train,
        max_validation=split.caps.validation,
        max_test=split.caps.test,
        test_source=split.test_source,
    )
    clients = split_clients(corpus, parts, cut, seed=config.seed)
    return PreparedData(corpus, clients, partition_table(corpus.train, parts))


def prepare(config: Config, output: Path, progress: Progress | None = None) -> Experiment:
    """Builds the method, the data and the backbone of a run, in the order of what fails fastest."""
    progress = progress or Silent()
    method = build_method(config.method.name, config.method.options)
    progress.stage("Reading the data")
    data = prepare_data(config)
    progress.stage(f"Loading the model {config.model.path}")
    model = config.model
    backbone = load_backbone(
        model.path,
        revision=model.revision,
        dtype=model.dtype,
        device=model.device,
        load_in_4bit=model.load_in_4bit,
        attention=model.attention,
        trust_remote_code=model.trust_remote_code,
        gradient_checkpointing=model.gradient_checkpointing,
    )
    if method.needs_experts:
        backbone.info.require_experts(method.title)
    top_k = backbone.info.top_k
    tiers = {
        tier.name: Budget(tier.name, tier.active_experts or top_k, tier.rank) for tier in config.federation.budgets
    }
    _check_budgets(list(tiers.values()), backbone)
    clients = [
        ClientInfo(index, tiers[tier.name], len(data.clients[index].train))
        for index, tier in enumerate(config.federation.budget_per_client())
    ]
    memory = ClientMemory(output / MEMORY)
    return Experiment(config, output, method, data, backbone, list(tiers.values()), clients, memory, progress)


def _rounds(experiment: Experiment, state: State, first: int) -> RunResult:
    """Runs the rounds from `first` on: train, aggregate, evaluate, record, checkpoint."""
    config, log = experiment.config, RunLog(experiment.folder)
    rules = RoundRules(
        config.federation.participation, config.federation.quorum, config.federation.norm_limit, config.seed
    )
    engine = make_engine(experiment)
    total, saving_seconds = config.federation.rounds, 0.0
    with Tracker(experiment.folder, enabled=config.tracking.tensorboard) as tracker:
        for number in range(first, total + 1):
            experiment.progress.round_started(number, total)
            started = time.perf_counter()
            outcome = run_round(
                number, experiment.method, state, experiment.backbone.info, experiment.clients, engine, rules
            )
            state = outcome.state
            for client, reason in outcome.rejected.items():
                experiment.progress.message(f"Round {number}: the upload of client {client} was rejected: {reason}")
            records: list[Record] = [*client_records(outcome, experiment.backbone.info)]
            records += routing_record(number, frequencies(outcome.deliveries), outcome.tokens())
            with outcome.clock.phase("evaluate"):
                if number % config.evaluation.every == 0 or number == total:
                    records += evaluate_state(experiment, state, number)
            outcome.phase_seconds["checkpoint"] = saving_seconds
            records.append(_round_record(outcome, time.perf_counter() - started))
            log.append(*records)
            tracker.add(records)
            started = time.perf_counter()
            _save(experiment, number, state)
            saving_seconds = time.perf_counter() - started
    experiment.progress.stage("Writing the report")
    last = [record for record in log.read() if isinstance(record, EvaluationRecord) and record.round == total]
    return _result(experiment, total, last, write_report(experiment.folder))


def evaluate_state(experiment: Experiment, state: State, number: int, split: Split | None = None) -> list[Record]:
    """Scores the global model as every budget runs it and, where asked, every client's own model."""
    settings, method, model = experiment.config.evaluation, experiment.method, experiment.backbone.info
    split = split or settings.split
    pooled = experiment.data.pooled(split)[: settings.max_examples]
    budgets = [method.deploy(state, model, budget) for budget in experiment.budgets]
    records = _scored(
        experiment,
        [(budget.name, budget, deployment) for budget, deployment in zip(experiment.budgets, budgets, strict=True)],
        [pooled] * len(budgets),
        ("budget", number, split),
    )
    experiment.progress.evaluated({record.name: record.score for record in records})
    summary: list[Record] = [summary_record("mean", records)]
    if settings.clients:
        own = [
            (client.name, client.budget, _personal(experiment, state, client, number)) for client in experiment.clients
        ]
        held_out = [getattr(data, split)[: settings.max_examples] for data in experiment.data.clients]
        scored = _scored(experiment, own, held_out, ("client", number, split))
        records += scored
        summary.append(summary_record("mtal", scored))
    return [*records, *summary]


def make_engine(experiment: Experiment) -> LocalEngine:
    """Returns the engine that trains the run's clients."""
    config, tokenizer = experiment.config, experiment.backbone.tokenizer
    encoded = {
        index: [encode(example, tokenizer, config.data.max_tokens) for example in data.train]
        for index, data in enumerate(experiment.data.clients)
    }
    return LocalEngine(
        experiment.backbone,
        encoded,
        training_settings(config),
        experiment.memory,
        cohort_size=config.federation.cohort_size,
        seed=config.seed,
        on_step=experiment.progress.step,
    )


def training_settings(config: Config) -> TrainingSettings:
    """Returns the config's training section as the client takes it."""
    training = config.training
    return TrainingSettings(
        optimizer=OptimizerSettings(
            kind=training.optimizer,
            betas=training.betas,
            eps=training.eps,
            weight_decay=training.weight_decay,
            momentum=training.momentum,
        ),
        learning_rate=training.learning_rate,
        batch_size=training.batch_size,
        accumulation=training.accumulation,
        epochs=training.epochs,
        steps=training.steps,
        schedule=training.schedule,
        warmup=training.warmup,
        round_decay=training.round_decay,
        clip_norm=training.clip_norm,
    )


def _scored(
    experiment: Experiment,
    models: Sequence[tuple[str, Budget, Deployment]],
    examples: Sequence[Sequence[Example]],
    where: tuple[Literal["budget", "client"], int, Split],
) -> list[EvaluationRecord]:
    """Scores several models, as many at once as a cohort holds."""
    config, backbone = experiment.config, experiment.backbone
    settings = config.evaluation
    records: list[EvaluationRecord] = []
    width = len(models) if config.federation.cohort_size == "auto" else config.federation.cohort_size
    for start in range(0, len(models), width):
        part = models[start : start + width]
        plans = [_evaluated_plan(experiment, budget, deployment) for _, budget, deployment in part]
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


def _evaluated_plan(experiment: Experiment, budget: Budget, deployment: Deployment) -> AdapterPlan:
    """Returns a deployment's plan, with the budget's active experts unless the method's are wanted."""
    if not experiment.backbone.info.moe or experiment.config.evaluation.active_experts == "method":
        return deployment.plan
    return replace(deployment.plan, active_experts=budget.active_experts)


def _scoring(config: Config) -> Scoring:
    settings = config.evaluation
    return Scoring(
        choices="generation" if settings.by == "generation" else "likelihood",
        normalise=settings.normalise,
        responses="exact_match" if config.data.corpus == "tasks" else "rouge_l",
    )


def _personal(experiment: Experiment, state: State, client: ClientInfo, number: int) -> Deployment:
    kept = experiment.memory.load(client.name, number + 1)
    return experiment.method.personalize(state, experiment.backbone.info, client, kept)


def _check_budgets(budgets: Sequence[Budget], backbone: Backbone) -> None:
    top_k = backbone.info.top_k
    for budget in budgets:
        if top_k and budget.active_experts > top_k:
            raise ConfigError(
                f"federation.budgets: '{budget.name}' has active_experts {budget.active_experts}, but "
                f"{backbone.info.name} runs {top_k} of {backbone.info.moe[0].num_experts} experts per token.",
                f"Choose active_experts from 1 to {top_k}.",
            )


def _round_record(outcome: Outcome, seconds: float) -> RoundRecord:
    return RoundRecord(
        round=outcome.round,
        seconds=seconds,
        phase_seconds=outcome.phase_seconds,
        participants=[client.index for client in outcome.asked],
        rejected=[Rejection(client=client, reason=reason) for client, reason in sorted(outcome.rejected.items())],
    )


def _save(experiment: Experiment, number: int, state: State) -> None:
    folder = experiment.folder / CHECKPOINTS
    checkpoint.save(
        folder,
        number,
        state,
        fingerprint=experiment.config.fingerprint(),
        keep=experiment.config.federation.keep_checkpoints,
    )
    experiment.memory.forget(checkpoint.rounds(folder)[0])


def _write_facts(experiment: Experiment) -> None:
    """Writes what a run knows before its first round; the config last, as it marks the folder as a run's."""
    folder, table, backbone = experiment.folder, experiment.data.partition_table, experiment.backbone
    write_json(folder / "environment.json", describe_environment(backbone.device, backbone.dtype))
    split = {
        name: [len(getattr(client, name)) for client in experiment.data.clients]
        for name in ("train", "validation", "test")
    }
    partition_record = PartitionRecord(
        labels=list(table.labels), counts=[list(row) for row in table.counts], split=split
    )
    write_json(folder / "partition.json", partition_record.model_dump(mode="json"))
    write_text(folder / "config.yaml", experiment.config.resolved_yaml())


def _written_config(folder: Path) -> Config:
    path = folder / "config.yaml"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is not the folder of a run: it has no config.yaml.",
            "Give the folder that `fedguild run` wrote, for example runs/flame-tiny-tasks.",
        )
    return load_config(str(path))


def _result(experiment: Experiment, number: int, records: Sequence[Record], report: Path) -> RunResult:
    scored = [record for record in records if isinstance(record, EvaluationRecord)]
    scores = {record.name: record.score for record in scored if record.scope == "budget"}
    mean = next(record.score for record in scored if record.scope == "summary" and record.name == "mean")
    return RunResult(experiment.folder, number, scores, mean, report)
