"""Preparation of a run: its method, data, backbone and clients, the steps that fail fastest first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.config import Config
from fedguild.core.layout import MEMORY
from fedguild.core.plugins import is_target
from fedguild.core.progress import Progress, Silent
from fedguild.core.score_names import metric_name
from fedguild.data.corpora import corpus_spec
from fedguild.data.example import ELSEWHERE
from fedguild.data.given import GivenData
from fedguild.data.partition import PartitionTable
from fedguild.data.rendering import require_chat_template, set_chat_template
from fedguild.data.view import duplicates_between
from fedguild.measuring.scores.metrics import METRICS, Metric, load_metrics, measure
from fedguild.measuring.scores.preferences import ACCURACY
from fedguild.model.backbone import Backbone, inspect_model, later_backbone, load_backbone, pick_device
from fedguild.model.info import ModelInfo
from fedguild.model.pretrained import load_tokenizer
from fedguild.runs.guarantee import rules_of
from fedguild.runs.setup.checks import require_examples, require_room, require_start
from fedguild.runs.setup.data import PreparedData, data_sentences, dropped_of, is_elsewhere, prepare_data
from fedguild.runs.setup.engines import holds_backbone
from fedguild.runs.setup.experiment import Experiment
from fedguild.runs.setup.fitting import budgets_of, fitted, method_of, tell_fitted
from fedguild.runs.setup.method_checks import check_fit


def prepare(
    config: Config,
    output: Path,
    progress: Progress | None = None,
    *,
    data: GivenData | None = None,
    metrics: Mapping[str, Metric] | None = None,
    trains: bool = True,
    scores: bool = True,
) -> Experiment:
    """Builds the method, the data and the backbone of a run, the steps that fail fastest first.

    Everything that follows from the config and the model's `config.json` is checked before data is read or a weight is
    loaded.

    Args:
        output: The run's folder.
        data: Data and partition given in Python; written into the folder.
        metrics: Metrics given in Python, by their names in the config.
        trains: Whether rounds are to follow, here and with simulated clients.
        scores: Whether models are to be scored; if not, the data may be at the clients of a federation alone.
    """
    progress = progress or Silent()
    if trains:
        require_start(config)
    given, own_metrics = method_of(config), dict(metrics or {})
    functions = filter(is_target, config.evaluation.metrics)
    own_metrics |= {name: METRICS.load(name) for name in functions if name not in own_metrics}
    load_metrics(name for name in config.evaluation.metrics if name not in own_metrics)
    model = model_of(config)
    method = fitted(given, config, model)
    check_fit(method, config, model)
    tell_fitted(given, method, progress.message)
    if not model.moe and any(tier.active_experts for tier in config.federation.budgets):
        progress.message("federation.budgets: active_experts has no effect here, as the model has no experts.")
    if scores or not is_elsewhere(config):
        prepared = _read_data(config, output, data, progress, trains=trains)
    else:
        prepared = PreparedData(ELSEWHERE, [], PartitionTable(labels=(), counts=()))
    if trains:
        _try_metrics(config, prepared, own_metrics, progress)
    if any(example.messages for example in prepared.corpus.train[:1]):
        require_chat_template(prepared.corpus.train[0], tokenizer_of(config))
    budgets = budgets_of(config, model)
    return Experiment(
        config,
        output,
        method,
        prepared,
        _backbone(config, model, progress),
        list(budgets.values()),
        _simulated_clients(config, prepared, budgets),
        ClientMemory(output / MEMORY, trained=config.evaluation.trained),
        progress,
        metrics=own_metrics,
    )


def _read_data(
    config: Config, output: Path, given: GivenData | None, progress: Progress, *, trains: bool
) -> PreparedData:
    """Returns the data of a run, checked for what is to be scored; writes what was given in Python first."""
    progress.stage("Reading the data")
    if given is not None:
        given.write(output)
    data, evaluation = prepare_data(config, output, given), config.evaluation
    if trains:
        require_examples(data, evaluation.split)
    scored = data.pooled(evaluation.split, evaluation.max_examples, config.seed)
    require_room(config, generates=any(example.is_open for example in scored))
    for sentence in data_sentences(data.corpus, dropped_of(data, config)):
        progress.message(sentence)
    leak = duplicates_between(data.corpus, data.clients).warning() if trains else ""
    if leak:
        progress.message(leak)
    return data


def _try_metrics(config: Config, data: PreparedData, own: Mapping[str, Metric], progress: Progress) -> None:
    """Says what the scores are, and calls the metrics once, so that a faulty one is found before the training."""
    evaluation, usual = config.evaluation, corpus_spec(config.data.dataset).metric
    scored = data.pooled(evaluation.split, evaluation.max_examples, config.seed)
    kinds = {usual if one.is_open else ACCURACY if one.rejected is not None else "accuracy" for one in scored}
    progress.message(f"Scored by {metric_name(kinds)}.")
    answer = next((one.response for one in scored if one.is_open), None)
    if answer is not None:
        others = load_metrics(name for name in evaluation.metrics if name not in own)
        measure({**own, **others}, answer, answer)


def _backbone(config: Config, model: ModelInfo, progress: Progress) -> Backbone:
    """Returns the backbone, loaded here unless the engine holds it; then it is loaded on first use."""
    if holds_backbone(config):
        later = later_backbone(model, partial(load_model, config), **config.model.model_dump())
        set_chat_template(later.tokenizer, config.data.chat_template)
        return cast(Backbone, later)
    progress.stage(f"Loading the model {config.model.path}")
    return load_model(config)


def _simulated_clients(config: Config, data: PreparedData, budgets: Mapping[str, Budget]) -> list[ClientInfo]:
    """Returns the clients whose data is here, with their budgets and the numbers of examples that they report."""
    rules, tiers = rules_of(config), config.federation.budget_per_client()
    sizes = [len(client.train) for client in data.clients]
    return [
        ClientInfo(index, budgets[tiers[index].name], rules.said_examples(size) if rules else size)
        for index, size in enumerate(sizes)
    ]


def load_model(config: Config) -> Backbone:
    backbone = load_backbone(**config.model.model_dump())
    set_chat_template(backbone.tokenizer, config.data.chat_template)
    return backbone


def tokenizer_of(config: Config) -> Any:
    """Returns the tokenizer of the config's model, with the chat template that the config gives it."""
    model = config.model
    tokenizer = load_tokenizer(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    set_chat_template(tokenizer, config.data.chat_template)
    return tokenizer


def model_of(config: Config) -> ModelInfo:
    """Returns the description of the config's model and checks its folder, without reading a weight.

    Raises:
        ModelError: there is no such model, or it cannot be loaded.
        ConfigError: this machine does not have the device.
    """
    model = config.model
    if config.federation.engine.name != "ray":
        pick_device(model.device)
    return inspect_model(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
