"""What a run holds, built from its config: method, data, backbone, clients and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.client.optimizer import OptimizerSettings
from fedguild.client.schedule import TrainingSettings
from fedguild.config import Config
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
from fedguild.data.sampling import sample
from fedguild.engines.local import LocalEngine
from fedguild.errors import ConfigError
from fedguild.methods import build_method
from fedguild.model.backbone import Backbone, load_backbone
from fedguild.progress import Progress, Silent
from fedguild.seeding import numpy_rng
from fedguild.server.method import Method

Split = Literal["test", "validation"]
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

    def pooled(self, split: Split, limit: int | None, seed: int) -> tuple[Example, ...]:
        """Returns the held-out examples that the global model is scored on, at most `limit` of them."""
        if split == "test":
            return pooled_test(self.corpus, self.clients, limit=limit, seed=seed)
        validation = tuple(example for client in self.clients for example in client.validation)
        return sample(validation, limit, numpy_rng(seed, "pooled validation"))


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


def _check_budgets(budgets: Sequence[Budget], backbone: Backbone) -> None:
    top_k = backbone.info.top_k
    for budget in budgets:
        if top_k and budget.active_experts > top_k:
            raise ConfigError(
                f"federation.budgets: '{budget.name}' has active_experts {budget.active_experts}, but "
                f"{backbone.info.name} runs {top_k} of {backbone.info.moe[0].num_experts} experts per token.",
                f"Choose active_experts from 1 to {top_k}.",
            )
