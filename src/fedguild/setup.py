"""Assembly of a run from its config: method, data, backbone, clients and engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args
from uuid import uuid4

import torch
from torch import Tensor

from fedguild.activity import ActivityLog
from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.config import Config
from fedguild.config.data import GIVEN
from fedguild.config.federation import FederationSettings
from fedguild.costs.shapes_only import ShapesOnly
from fedguild.data import (
    ClientData,
    Corpus,
    Example,
    PartitionTable,
    load_corpus,
    partition,
    partition_table,
    pooled_test,
    split_clients,
)
from fedguild.data.batches import Cut, Encoded, count_cut, encode
from fedguild.data.corpora import checked_options, corpus_spec
from fedguild.data.given import GivenData, given_parts, source
from fedguild.data.sampling import sample
from fedguild.engines.coded import CodedEngine
from fedguild.engines.cohorts import OnStep
from fedguild.engines.local import LocalEngine
from fedguild.engines.torchrun import TorchrunEngine, torchrun_ranks
from fedguild.errors import ConfigError, FedGuildError
from fedguild.evaluation.metrics import Metric, load_metrics
from fedguild.evaluation.tasks import EvaluatedModel
from fedguild.files import write_text
from fedguild.guarantee import Privacy, check_privacy, privacy_of, rules_of
from fedguild.methods import build_method
from fedguild.model.backbone import (
    Backbone,
    describe_config,
    inspect_model,
    is_at_hand,
    later_backbone,
    load_backbone,
    pick_device,
)
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, adapter_shapes
from fedguild.payload import Payload
from fedguild.progress import Progress, Silent
from fedguild.secure.fixed_point import MOST_CLIENTS
from fedguild.secure.form import require_disclosure
from fedguild.secure.graph import FEWEST_CLIENTS
from fedguild.seeding import numpy_rng
from fedguild.server.engine import Engine
from fedguild.server.guard import LARGEST_VALUE, NORM_FACTOR, Guard
from fedguild.server.method import Method, starting_rng
from fedguild.server.optimizer import takes_steps
from fedguild.server.private_mean import PrivateMean
from fedguild.server.round import Outcome
from fedguild.server.run_log import EvaluationRecord
from fedguild.server.secure_round import SecureAggregation, unnoted

Split = Literal["test", "validation"]
OwnScope = Literal["client", "trained", "received"]
"""Whose scores a client takes on its own examples: its own model, the same as trained, and as received."""
MEMORY, SPOOL = "clients", "spool"
IDENTITY = "run-id"


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, prepared before any model is loaded.

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

    def sizes(self) -> dict[str, list[int]]:
        """Returns the number of each client's examples by split."""
        return {
            name: [len(getattr(client, name)) for client in self.clients] for name in ("train", "validation", "test")
        }


class Remote(Protocol):
    """Clients on their own machines, where they train and score their own models."""

    @property
    def engine(self) -> Engine:
        """The engine that trains these clients."""
        ...

    def current(self) -> list[ClientInfo]:
        """Returns all clients of the federation, as they are known before a round; some may be away."""
        ...

    def is_revoked(self, client: int) -> bool:
        """Whether a client's key was revoked: nothing of it is used from then on."""
        ...

    def note(self, outcome: Outcome) -> None:
        """Takes note of a complete round, for those who audit it."""
        ...

    def note_asked(self, *, round: int, attempt: int, clients: Sequence[int]) -> None:
        """Takes note of whom a round asks to train."""
        ...

    def note_failure(self, round: int, reason: str) -> None:
        """Takes note of a round that failed."""
        ...

    def note_session(self, facts: Mapping[str, Any]) -> None:
        """Takes note of a session of a secure aggregation that has ended, well or not."""
        ...

    def score(self, scope: OwnScope, state: Payload, number: int, split: Split) -> list[EvaluationRecord]:
        """Returns the scores of every client's own model, or of the model as it was trained or would be received."""
        ...


class Scorer(Protocol):
    """An engine that scores models in its own processes, which hold the backbone instead of this one."""

    @property
    def device(self) -> torch.device:
        """The kind of device that they compute on."""
        ...

    def slots(
        self,
        plans: Sequence[AdapterPlan],
        tensors: Sequence[Mapping[str, Tensor]],
        merged: Mapping[str, Tensor],
        model: ModelInfo,
    ) -> AbstractContextManager[EvaluatedModel]:
        """Loads models for the duration of a block, on a backbone with the given changes."""
        ...

    def free_bytes(self) -> int:
        """Returns the free bytes of the fullest device."""
        ...


@dataclass
class Experiment:
    """The objects of a run.

    `scorer` is None if this process scores models itself. `remote` is None if the clients are simulated, by the engine
    that the config names. `metrics` are those that were given in Python, by the names that the config has.
    """

    config: Config
    folder: Path
    method: Method
    data: PreparedData
    backbone: Backbone
    budgets: list[Budget]
    clients: list[ClientInfo]
    memory: ClientMemory
    progress: Progress
    remote: Remote | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    scorer: Scorer | None = None

    @cached_property
    def privacy(self) -> Privacy | None:
        """The run's differential privacy; None without."""
        return privacy_of(self.config, self.folder, self._training_examples, real=self.remote is not None)

    @cached_property
    def encoded(self) -> dict[int, list[Encoded]]:
        """Client index -> its training examples as token ids."""
        return encoded_texts(self.data, self.backbone.tokenizer, self.config.data.max_tokens)

    def _training_examples(self, client: int) -> int:
        """Returns the number of a client's training examples; of a real one as it says, of which weights may differ."""
        if self.remote is None:
            return len(self.data.clients[client].train)
        said = self.data.sizes()["train"][client]  # 0 for one that joined later
        return said or next(each.examples for each in self.clients if each.index == client)


def prepare_data(config: Config, folder: Path | None = None, given: GivenData | None = None) -> PreparedData:
    """Loads the corpus, partitions it over the clients and splits every client's share.

    Args:
        config: The config.
        folder: The run's folder, with data and the partition if they were given in Python.
        given: The objects behind them; None if the folder has them.

    Raises:
        DataError: the data is missing, has the wrong columns, or leaves a client without examples.
    """
    data = config.data
    options = checked_options(corpus_spec(data.corpus), data.options)
    corpus = load_corpus(
        data.corpus,
        train=source(data.train, folder),
        test=source(data.test, folder),
        limit=data.limit,
        seed=config.seed,
        template=data.template,
        **options,
    )
    rng = numpy_rng(config.seed, "partition")
    rule = data.partition
    clients_wanted = config.federation.clients
    if rule.scheme.startswith(GIVEN):
        scheme = None if given is None else given.partition
        parts = given_parts(corpus.train, clients_wanted, rng, scheme, folder)
    else:
        parts = partition(rule.scheme, corpus.train, clients_wanted, rng=rng, alpha=rule.alpha, minimum=rule.minimum)
    clients = split_clients(corpus, parts, data.split, seed=config.seed)
    return PreparedData(corpus, clients, partition_table(corpus.train, parts))


def dropped_of(data: PreparedData, config: Config) -> dict[str, int]:
    """Returns why examples of the source take no part in a run -> how many."""
    dropped = dict(data.corpus.dropped)
    shares = sum(data.partition_table.client_sizes)
    own_test = config.data.split.test_source == "client"
    used = sum(len(one.train) + len(one.validation) + own_test * len(one.test) for one in data.clients)
    for reason, count in (
        ("training examples that the partition gives to no client", len(data.corpus.train) - shares),
        ("examples above data.split.caps", shares - used),
    ):
        if count > 0:
            dropped[reason] = count
    return dropped


def dropped_sentences(dropped: Mapping[str, int]) -> list[str]:
    """Returns a sentence for each reason to leave examples out."""
    return [f"Left out: {count} {reason}." for reason, count in dropped.items()]


def encoded_texts(data: PreparedData, tokenizer: Any, max_tokens: int) -> dict[int, list[Encoded]]:
    """Returns client index -> its training examples as token ids."""
    return {
        index: [encode(example, tokenizer, max_tokens) for example in client.train]
        for index, client in enumerate(data.clients)
    }


def cut_of(data: PreparedData, encoded: Mapping[int, list[Encoded]], tokenizer: Any, max_tokens: int) -> Cut:
    """Returns how many of all clients' training texts are cut to `data.max_tokens`."""
    pairs = (pair for index, one in enumerate(data.clients) for pair in zip(one.train, encoded[index], strict=True))
    return count_cut(pairs, tokenizer, max_tokens)


def method_of(config: Config) -> Method:
    """Returns the config's method with the options that the config gives.

    Raises:
        ConfigError: the method or an option is unknown, or out of range.
    """
    return build_method(config.method.name, config.method.options)


def check_config(config: Config) -> None:
    """Raises any fault of a config that can be found without the network, before anything else is done with it.

    The check covers the model if its config is on this machine: the embedded one, a local folder, or one that ships
    with FedGuild.

    Raises:
        ModelError, ConfigError: as `fit_method`.
    """
    method, model = method_of(config), config.model
    if is_at_hand(model.path, model.revision):
        described = describe_config(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
        fit_method(method, config, described)


def fit_method(method: Method, config: Config, model: ModelInfo) -> tuple[Method, dict[str, Budget]]:
    """Returns the method fitted to the model and the config's federation, and the config's budgets by name.

    Raises:
        ModelError: the method needs experts, and the model has none.
        ConfigError: an option does not fit the model or the federation, a budget asks for more active experts than
            the model has, a plan does not fit the model, for example because a target names no layer of it, or the
            method cannot begin with these budgets and clients.
    """
    federation = config.federation
    if method.needs_experts:
        model.require_experts(method.title)
    method = method.fitted(model, federation.clients, exact=federation.codec == "fp32")
    budgets = {
        tier.name: Budget(tier.name, tier.active_experts or model.top_k, tier.rank) for tier in federation.budgets
    }
    for budget in budgets.values():
        if model.moe:
            model.require_active_experts(budget.active_experts, f"federation.budgets: '{budget.name}'")
    shapes = [adapter_shapes(model, method.plan(model, budget)) for budget in budgets.values()]
    if not any(shapes):
        raise ConfigError(
            f"{method.name} would train nothing with these options: none of its clients has an adapter.",
            "Give it targets, for example method.targets=[attention].",
        )
    equal_shapes = all(one == shapes[0] for one in shapes)
    require_split(config, config.evaluation.split)
    if method.merges_weights and config.model.load_in_4bit:
        raise ConfigError(
            f"{method.name} adds its rounds to the backbone's weights, which model.load_in_4bit keeps in 4 bit.",
            "Set model.load_in_4bit=false, or choose a method that merges nothing.",
        )
    _require_steps(method, federation)
    _require_adapters(method, config)
    _require_mean(method, federation.robust, equal_shapes=equal_shapes)
    if federation.secure:
        _require_secure(method, federation, model, list(budgets.values()))
    if config.evaluation.diagnosis and (federation.secure or config.privacy.unit != "none"):
        raise ConfigError(
            "evaluation.diagnosis compares single uploads, which this run keeps from the server or puts noise on.",
            "Set evaluation.diagnosis=false, or diagnose a run without federation.secure and privacy.unit.",
        )
    check_privacy(method, config, equal_shapes=equal_shapes)
    _require_room(config, generates=config.evaluation.by == "generation")
    _require_device(method, config)
    _require_beginning(method, config, model, budgets)
    return method, budgets


def _require_room(config: Config, *, generates: bool) -> None:
    """Raises ConfigError if answers are generated, and nothing of the longest sequence is left for their prompts."""
    longest, new = config.data.max_tokens, config.evaluation.max_new_tokens
    if generates and new >= longest:
        raise ConfigError(
            f"evaluation.max_new_tokens is {new}, which leaves no room for a prompt within data.max_tokens {longest}.",
            "Lower evaluation.max_new_tokens or raise data.max_tokens.",
        )


def _require_beginning(method: Method, config: Config, model: ModelInfo, budgets: Mapping[str, Budget]) -> None:
    """Raises ConfigError if the method refuses these budgets or clients as it begins, before any round.

    It begins on shapes alone, with one example for each client. What only values or examples can tell, the run tells as
    it begins itself; that is also where anything but a refusal belongs that a method runs into here.
    """
    clients = [
        ClientInfo(index, budgets[tier.name], 1) for index, tier in enumerate(config.federation.budget_per_client())
    ]
    rng = starting_rng(method, config.seed)
    try:
        with ShapesOnly():
            method.enroll(method.start(model, list(budgets.values()), rng), model, clients)
    except FedGuildError:
        raise
    except Exception:
        return


def _require_device(method: Method, config: Config) -> None:
    """Raises ConfigError if the config wants of Apple's GPUs (`mps`) what torch does not support on them."""
    if config.model.device != "mps":
        return
    lacking = {
        f"method.name={method.name}": method.needs_float64 and f"it {method.needs_float64} in fp64",
        "privacy.unit=example": config.privacy.unit == "example" and "it clips gradients in fp64",
        "model.load_in_4bit": config.model.load_in_4bit and "bitsandbytes needs CUDA",
        "federation.engine.name=ray": config.federation.engine.name == "ray" and "Ray assigns CUDA's GPUs",
        "torchrun": torchrun_ranks() > 1 and "its processes communicate by NCCL or on CPUs",
    }
    for setting, reason in lacking.items():
        if reason:
            raise ConfigError(f"model.device=mps does not go with {setting}: {reason}.", "Set model.device=cpu.")


def require_split(config: Config, split: Split) -> None:
    """Raises ConfigError if a split that is to be scored is none, or has no example."""
    if split not in get_args(Split):
        raise ConfigError(f"There is no split '{split}' to score.", f"Known: {', '.join(get_args(Split))}.")
    if split == "validation" and config.data.split.validation == 0:
        raise ConfigError(
            "The validation examples are to be scored, but data.split.validation is 0.",
            "Set data.split.validation=0.1, or evaluation.split=test.",
        )


def require_examples(data: PreparedData, split: Split) -> None:
    """Raises ConfigError if a split of data that is all on this machine has no example to score on."""
    if not data.pooled(split, 1, seed=0):
        held_out = "data.test=FILE, or data.split.test=0.1" if split == "test" else "data.split.validation=0.1"
        raise ConfigError(
            f"There is no {split} example to score on: the data has none of its own, and none is held out.",
            f"Give {held_out}.",
        )


def require_start(config: Config) -> None:
    """Checks what the rounds of a run on this machine need beside its method and model.

    Raises:
        ConfigError: the engine is that of real clients, or its extra is not installed, or its processes do
            not go with the rest of the config.
    """
    engine = config.federation.engine.name
    if engine == "flower":
        raise ConfigError(
            "federation.engine.name is flower, but a run with real clients cannot be started from here.",
            "`fedguild federation init` writes a federation, `fedguild federation run` runs it; to simulate the "
            "clients on this machine, set federation.engine.name=local.",
        )
    if engine == "ray" and find_spec("ray") is None:
        raise ConfigError(
            "federation.engine.name is ray, but the package 'ray' is not installed.",
            "Install the extra: pip install 'fedguild[ray]'.",
        )
    if engine == "ray" and torchrun_ranks() > 1:
        raise ConfigError(
            "federation.engine.name is ray, but torchrun started several processes.",
            "Start one process: federation.engine.ray.gpus_per_actor shards the backbone.",
        )
    if engine == "ray" and config.federation.engine.ray.gpus_per_actor > 1 and config.model.load_in_4bit:
        raise ConfigError(
            "federation.engine.ray.gpus_per_actor is above 1, but weights in 4 bit cannot be sharded.",
            "Set model.load_in_4bit=false, or gpus_per_actor=1.",
        )


def _require_mean(method: Method, robust: str, *, equal_shapes: bool) -> None:
    """Raises ConfigError if the config wants a robust mean where the method's aggregate is none."""
    if robust == "none" or (method.is_mean and equal_shapes):
        return
    reason = (
        f"the aggregate of {method.name} is not a mean of the clients' adapters, weighted by client alone"
        if not method.is_mean
        else "the clients' adapters differ in shape between the budgets"
    )
    raise ConfigError(
        f"federation.robust is {robust}, but {reason}.",
        "Set federation.robust=none; federation.norm_factor bounds what one upload can change with every method.",
    )


def _require_secure(
    method: Method, federation: FederationSettings, model: ModelInfo, budgets: Sequence[Budget]
) -> None:
    """Raises ConfigError if a run cannot be aggregated securely."""
    try:
        import Crypto
        import cryptography
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"federation.secure: the package '{error.name}' is not installed.",
            "Install the extra: pip install 'fedguild[secure]'.",
        ) from error
    del Crypto, cryptography
    wanted = federation.wanted_uploads
    beside = {
        "codec": federation.codec != "fp32" and "masked uploads are words of 32 bits, which cannot be rounded",
        "robust": federation.robust != "none" and "it needs single uploads",
        "norm_factor": federation.norm_factor not in ("auto", None)
        and "it compares single uploads; each client checks norm_limit itself",
        "late": federation.late != "drop" and "a late upload would be in no sum",
        "clients": not FEWEST_CLIENTS <= wanted <= MOST_CLIENTS
        and f"a round has {wanted} of them, but {FEWEST_CLIENTS} to {MOST_CLIENTS} can be aggregated securely",
        "byte_limit": federation.byte_limit is not None and "the messages of its protocol are not planned",
        "secure_clients": federation.secure_clients > wanted and f"a round has {wanted} clients only",
    }
    for setting, reason in beside.items():
        if reason:
            raise ConfigError(f"federation.secure does not go with federation.{setting} as it is: {reason}.")
    require_disclosure(method.linear_form(model, budgets), federation.secure_disclose, method.name)


def _require_steps(method: Method, federation: FederationSettings) -> None:
    """Raises ConfigError if the config wants a server's step or momentum with a method that has none."""
    if takes_steps(method) or (federation.server_step, federation.server_momentum) == (1.0, 0.0):
        return
    reason = f"the aggregate of {method.name} is not a mean towards which the server could take a step"
    if method.not_adapters:
        reason = f"{method.name} {method.not_adapters}, and the server finds other factors after each round"
    elif method.is_mean:
        reason = f"{method.name} has a server's step of its own"
    raise ConfigError(
        f"federation.server_step is {federation.server_step:g} and federation.server_momentum is "
        f"{federation.server_momentum:g}, but {reason}.",
        f"Leave federation.server_step at 1 and federation.server_momentum at 0; `fedguild methods {method.name}` "
        "lists the method's own options.",
    )


def _require_adapters(method: Method, config: Config) -> None:
    """Raises ConfigError if the config wants of single uploads what only adapters give."""
    asked = {
        "evaluation.diagnosis=true compares the clients' adapters": config.evaluation.diagnosis,
        "federation.late=next_round uses an upload in another round": config.federation.late != "drop",
    }
    for use, wanted in asked.items():
        if wanted and method.not_adapters:
            raise ConfigError(
                f"{use}, but {method.name} {method.not_adapters}.",
                f"Leave {use.partition('=')[0]} at its default, or choose another method.",
            )


def method_record(given: Method, method: Method) -> dict[str, Any]:
    """Returns a run's record of its method.

    Args:
        given: The method with the config's options.
        method: The method as it runs.

    Returns:
        `name`; `options`, every option as the method runs; `fitted`, the options that differ from the config or their
        default, each with the original value.
    """
    options = method.settings.model_dump(mode="json")
    before = given.settings.model_dump(mode="json")
    fitted = {name: value for name, value in before.items() if value != options[name]}
    return {"name": method.name, "options": options, "fitted": fitted}


def tell_fitted(given: Method, method: Method, tell: Callable[[str], None]) -> None:
    """Reports the options that differ from the config or their defaults."""
    record = method_record(given, method)
    for name, value in record["fitted"].items():
        used = json.dumps(record["options"][name])
        tell(f"method.{name} is {used} here, not {json.dumps(value)}, to fit the model and the federation.")


def prepare(
    config: Config,
    output: Path,
    progress: Progress | None = None,
    *,
    data: GivenData | None = None,
    metrics: Mapping[str, Metric] | None = None,
    trains: bool = True,
) -> Experiment:
    """Builds the method, the data and the backbone of a run, the steps that fail fastest first.

    Everything that follows from the config and the model's `config.json` is checked before data is read or a weight is
    loaded.

    Args:
        config: The run's config.
        output: Its folder.
        progress: Receiver of progress reports.
        data: Data and partition that were given in Python; written into the folder.
        metrics: Metrics that were given in Python, by the names that the config has.
        trains: Whether rounds are to follow, here and with simulated clients.
    """
    progress = progress or Silent()
    if trains:
        require_start(config)
    given, own_metrics = method_of(config), dict(metrics or {})
    load_metrics(name for name in config.evaluation.metrics if name not in own_metrics)
    model = model_of(config)
    method, tiers = fit_method(given, config, model)
    tell_fitted(given, method, progress.message)
    if not model.moe and any(tier.active_experts for tier in config.federation.budgets):
        progress.message("federation.budgets: active_experts has no effect here, as the model has no experts.")
    progress.stage("Reading the data")
    if data is not None:
        data.write(output)
    prepared = prepare_data(config, output, data)
    if trains:
        require_examples(prepared, config.evaluation.split)
    scored = prepared.pooled(config.evaluation.split, config.evaluation.max_examples, config.seed)
    _require_room(config, generates=any(not example.choices for example in scored))
    for sentence in dropped_sentences(dropped_of(prepared, config)):
        progress.message(sentence)
    if config.federation.engine.name == "ray" or torchrun_ranks() > 1:  # the engine holds the backbone
        backbone = cast(Backbone, later_backbone(model, partial(load_model, config), **config.model.model_dump()))
    else:
        progress.stage(f"Loading the model {config.model.path}")
        backbone = load_model(config)
    rules, sizes = rules_of(config), [len(client.train) for client in prepared.clients]
    clients = [
        ClientInfo(index, tiers[tier.name], rules.said_examples(sizes[index]) if rules else sizes[index])
        for index, tier in enumerate(config.federation.budget_per_client())
    ]
    memory = ClientMemory(output / MEMORY, trained=config.evaluation.trained)
    budgets = list(tiers.values())
    return Experiment(
        config, output, method, prepared, backbone, budgets, clients, memory, progress, metrics=own_metrics
    )


def load_model(config: Config) -> Backbone:
    """Returns the config's backbone, loaded."""
    return load_backbone(**config.model.model_dump())


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


def make_engine(experiment: Experiment) -> Engine:
    """Returns the engine that the config names; close it after the last round.

    Raises:
        ConfigError: it is that of real clients, its extra is not installed, or its settings do not fit this machine.
    """
    if experiment.remote is not None:
        return experiment.remote.engine
    require_start(experiment.config)
    federation = experiment.config.federation
    engine = _ENGINES[federation.engine.name](experiment)
    if experiment.privacy is not None:
        engine = experiment.privacy.simulated(engine)  # noise before anything else sees an upload
    if federation.secure:
        from fedguild.engines.secure import SecureEngine

        return SecureEngine(
            engine, experiment.budgets, federation.clients, federation.norm_limit, reported=experiment.privacy is None
        )
    return engine if federation.codec == "fp32" else CodedEngine(engine, federation.codec)


def protection_of(experiment: Experiment) -> Guard | SecureAggregation | PrivateMean | None:
    """Returns what stands between the uploads and the method's aggregate: one of three, or nothing.

    With real clients there is always one, in a simulation where the config asks for it: its clients run this program's
    own code, and its engines agree bit for bit. A guard compares uploads. Masked ones cannot be compared; and noise
    that the server adds itself bounds every upload, and comparing them would tell of them.
    """
    rules, real, privacy = experiment.config.federation, experiment.remote is not None, experiment.privacy
    if rules.secure:
        return SecureAggregation(
            run_identity(experiment.folder),
            experiment.budgets,
            rules.secure_share,
            rules.secure_clients,
            rules.secure_unheld,
            reported=privacy is None,
            note=unnoted if experiment.remote is None else experiment.remote.note_session,
        )
    if privacy is not None and (mean := privacy.mean()) is not None:
        return mean
    factor = (NORM_FACTOR if real else None) if rules.norm_factor == "auto" else rules.norm_factor
    if not real and factor is None and rules.robust == "none":
        return None
    return Guard(
        experiment.folder / SPOOL,
        norm_factor=factor,
        robust=rules.robust,
        trim=rules.trim,
        largest_value=LARGEST_VALUE if real else None,
        revoked=experiment.remote.is_revoked if experiment.remote is not None else lambda client: False,
    )


def _local_engine(experiment: Experiment) -> Engine:
    config = experiment.config
    if torchrun_ranks() > 1:
        return _torchrun_engine(experiment)
    return LocalEngine(
        experiment.backbone,
        experiment.encoded,
        config.local_training,
        experiment.memory,
        cohort_size=config.federation.cohort_size,
        seed=config.seed,
        on_step=_on_step(experiment),
        private=None if experiment.privacy is None else experiment.privacy.dp_sgd(),
        note=ActivityLog(experiment.folder).append,
    )


def _torchrun_engine(experiment: Experiment) -> Engine:
    config = experiment.config
    if config.model.load_in_4bit:
        raise ConfigError(
            "torchrun started several processes, but weights in 4 bit cannot be sharded.",
            "Set model.load_in_4bit=false, or start one process.",
        )
    engine = TorchrunEngine(
        config.model.model_dump(),
        experiment.encoded,
        config.local_training,
        experiment.memory,
        cohort_size=config.federation.cohort_size,
        seed=config.seed,
        timeout_seconds=config.federation.engine.timeout_seconds,
        on_step=_on_step(experiment),
        private=None if experiment.privacy is None else experiment.privacy.dp_sgd(),
    )
    experiment.scorer = engine
    return engine


def _on_step(experiment: Experiment) -> OnStep:
    """Returns what reports an optimizer step, without the loss where it is withheld for privacy."""
    step = experiment.progress.step
    return step if experiment.privacy is None else lambda done, total, _: step(done, total, math.nan)


def _ray_engine(experiment: Experiment) -> Engine:
    from fedguild.engines.ray import RayEngine

    config = experiment.config
    settings = config.federation.engine.ray
    engine = RayEngine(
        config.model.model_dump(),
        experiment.encoded,
        config.local_training,
        experiment.memory,
        cohort_size=config.federation.cohort_size,
        seed=config.seed,
        address=settings.address,
        actors=settings.actors,
        gpu_fraction=settings.gpu_fraction,
        cpus_per_actor=settings.cpus_per_actor,
        gpus_per_actor=settings.gpus_per_actor,
        timeout_seconds=config.federation.engine.timeout_seconds,
        on_step=_on_step(experiment),
        private=None if experiment.privacy is None else experiment.privacy.dp_sgd(),
        note=ActivityLog(experiment.folder).append,
    )
    experiment.scorer = engine
    return engine


_ENGINES: dict[str, Callable[[Experiment], Engine]] = {
    "local": _local_engine,
    "ray": _ray_engine,
}


def run_identity(folder: Path) -> str:
    """Returns the identity of a run, 32 hexadecimal digits, drawn on the first call and constant from then on.

    Two runs of the same config have different identities. Messages between machines carry the identity, so the tasks,
    uploads and memory of one run are never confused with those of another.
    """
    path = folder / IDENTITY
    if not path.is_file():
        write_text(path, uuid4().hex + "\n")
    return path.read_text("utf-8").strip()
