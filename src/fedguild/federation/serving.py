"""The server of a federation: the round loop over real clients, their scores, and the delivery of their models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

import fedguild
from fedguild import experiment as runs
from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.config import Config, load_config
from fedguild.config.site import ServerSettings
from fedguild.data import Corpus, PartitionTable
from fedguild.engines.flower.client_registry import POLL_SECONDS, ClientRegistry
from fedguild.engines.flower.engine import FlowerEngine
from fedguild.engines.flower.message import Message
from fedguild.engines.flower.transport import Transport
from fedguild.errors import ConfigError, QuorumError
from fedguild.evaluation.metrics import load_metrics
from fedguild.export.weights import beyond_weights
from fedguild.federation.trainer_service import model_digest, run_metadata
from fedguild.files import write_json
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.packing import pack
from fedguild.payload import Payload
from fedguild.progress import Progress, Silent
from fedguild.server import checkpoint
from fedguild.server.method import Method
from fedguild.server.run_log import EvaluationRecord
from fedguild.server.sampling import quorum_count, wanted_count
from fedguild.setup import (
    MEMORY,
    Experiment,
    OwnScope,
    PreparedData,
    Split,
    fit_method,
    load_model,
    method_of,
    model_of,
    prepare_data,
    run_identity,
    tell_fitted,
)

RUN, UPLOADS, MEMBERS = "run", "uploads", "members.json"


@dataclass(frozen=True)
class RemoteData(PreparedData):
    """Data that stays with the clients: its sizes, and the server's own examples if it has any.

    Attributes:
        counts: Split -> number of each client's examples, as the clients report it.
    """

    counts: Mapping[str, list[int]] = field(default_factory=dict)

    def sizes(self) -> dict[str, list[int]]:
        """Returns the number of each client's examples by split."""
        return {name: list(self.counts[name]) for name in ("train", "validation", "test")}


@dataclass(frozen=True)
class RemoteClients:
    """The clients of a run on their own machines.

    Attributes:
        engine: Reaches them.
        method: The run's method.
        model: The backbone's description.
        clients: Client index -> client.
        wait_seconds: How long to wait for scores.
        progress: Receives a message for every client without scores.
    """

    engine: FlowerEngine
    method: Method
    model: ModelInfo
    clients: Mapping[int, ClientInfo]
    wait_seconds: float
    progress: Progress

    def score(self, scope: OwnScope, state: Payload, number: int, split: Split) -> list[EvaluationRecord]:
        """Returns the clients' scores on their own held-out examples, in client order.

        Raises:
            QuorumError: no client has any.
        """
        replies = self._ask("score", state, number, {"scope": scope, "split": split})
        records: list[EvaluationRecord] = []
        for client, reply in replies.items():
            failure = reply.failure
            try:
                records += [EvaluationRecord.model_validate(record) for record in reply.metadata.get("records", ())]
            except ValidationError:
                failure = "its scores cannot be read"
            if failure:
                self.progress.message(f"Round {number}: client {client} has no scores: {failure}")
        if not records:
            raise QuorumError(
                f"No client scored its model in round {number}.",
                "Check the output of `fedguild federation client` on their machines.",
            )
        return records

    def deliver(self, state: Payload, number: int) -> dict[int, Message]:
        """Sends every client the state that its own model is built from; returns client index -> reply.

        Nothing is sent if the model cannot be exported to a folder.
        """
        if beside := self._beyond_weights(state):
            self.progress.message(
                f"No client receives a model: that of {self.method.name} has a part that acts beside the backbone's "
                f"weights ({', '.join(beside)}). What a client keeps between rounds is in its memory, "
                f"work/runs/{self.engine.registry.run}/{MEMORY}."
            )
            return {}
        replies = self._ask("deliver", state, number, {})
        for client, reply in replies.items():
            result = reply.failure or f"{reply.metadata.get('folder')} ({reply.metadata.get('form')})"
            self.progress.message(f"The model of client {client}: {result}")
        return replies

    def _ask(
        self, kind: Literal["score", "deliver"], state: Payload, number: int, metadata: Mapping[str, Any]
    ) -> dict[int, Message]:
        """Sends every client a request with its excerpt of the state."""
        return self.engine.ask(kind, number, partial(self._excerpt, state), self.wait_seconds, metadata)

    def _excerpt(self, state: Payload, client: int) -> bytes:
        part = self.method.excerpt(state, self.model, self.clients[client])
        return pack(part.tensors, part.scalars)

    def _beyond_weights(self, state: Payload) -> list[str]:
        """Returns the parts of the clients' models that no checkpoint holds; they are the same for all."""
        client = next(iter(self.clients.values()))
        excerpt = self.method.excerpt(state, self.model, client)
        return beyond_weights(self.method.personalize(excerpt, self.model, client, Payload()).plan)


def serve(
    transport: Transport,
    settings: ServerSettings,
    folder: Path,
    *,
    progress: Progress | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> runs.RunResult:
    """Starts the run of a server's folder, or resumes it from its last complete round.

    Args:
        transport: Reaches the clients.
        settings: The server's settings.
        folder: The server's folder; its relative paths start here.
        progress: Receives the run's progress.
        poll_seconds: Interval between two polls for replies.

    Raises:
        ConfigError: `run.yaml` is not the config that the run started with.
        QuorumError: clients are missing, or too few delivered an upload.
    """
    progress = progress or Silent()
    config, output = load_config(str(folder / settings.run)), folder / settings.state / RUN
    prepared: list[Experiment] = []

    def prepare(config: Config, output: Path, progress: Progress | None) -> Experiment:
        prepared.append(prepare_remote(transport, config, settings, output, progress or Silent(), poll_seconds))
        return prepared[0]

    if (output / "config.yaml").exists():
        _require_same(config, output)
        result = runs.resume(output, progress=progress, preparation=prepare)
    else:
        result = runs.run(config, output, progress=progress, preparation=prepare)
    remote = prepared[0].remote
    if settings.deliver and isinstance(remote, RemoteClients):
        saved = checkpoint.load(output / runs.CHECKPOINTS, result.rounds, fingerprint=config.fingerprint())
        remote.deliver(saved.state, result.rounds)
    return result


def prepare_remote(
    transport: Transport,
    config: Config,
    settings: ServerSettings,
    output: Path,
    progress: Progress,
    poll_seconds: float = POLL_SECONDS,
) -> Experiment:
    """Returns the experiment of a run with real clients, once they are connected.

    Raises:
        ConfigError: the config asks for what real clients cannot do.
        QuorumError: clients are missing after `wait_seconds`.
    """
    if config.evaluation.pooled:
        raise ConfigError(
            "evaluation.pooled scores every client's model on all clients' examples, but those never leave the client.",
            "Set evaluation.pooled=false.",
        )
    given = method_of(config)
    load_metrics(config.evaluation.metrics)
    method, tiers = fit_method(given, config, model_of(config))
    tell_fitted(given, method, progress.message)
    data = prepare_data(config) if settings.reads_data else None
    progress.stage(f"Loading the model {config.model.path}")
    backbone = load_model(config)
    registry = ClientRegistry(
        transport,
        run_identity(output),
        config.federation.clients,
        run_metadata(config),
        check=_check_of(backbone, tiers),
        echo=progress.message,
        poll_seconds=poll_seconds,
    )
    descriptions = _wait_for_clients(registry, config, settings, output)
    engine = FlowerEngine(
        transport,
        registry,
        run_metadata(config),
        output / UPLOADS,
        codec=config.federation.codec,
        limit_bytes=config.federation.upload_limit_bytes,
        reconnect_seconds=settings.reconnect_seconds,
        poll_seconds=poll_seconds,
    )
    clients = {
        index: ClientInfo(index, tiers[description["budget"]], description["sizes"]["train"])
        for index, description in sorted(descriptions.items())
    }
    return Experiment(
        config,
        output,
        method,
        _remote_data(data, descriptions),
        backbone,
        list(tiers.values()),
        list(clients.values()),
        ClientMemory(output / MEMORY),
        progress,
        RemoteClients(engine, method, backbone.info, clients, settings.score_seconds, progress),
    )


def _wait_for_clients(
    registry: ClientRegistry, config: Config, settings: ServerSettings, output: Path
) -> dict[int, Mapping[str, Any]]:
    """Returns every client's description of itself; a resumed run waits for a quorum only."""
    path, federation = output / MEMBERS, config.federation
    if not (output / "config.yaml").exists() or not path.is_file():
        clients = sorted(registry.wait_for_clients(settings.wait_seconds).items())
        write_json(path, {str(index): {**client.description, "node": str(client.node)} for index, client in clients})
        return {index: client.description for index, client in clients}
    wanted = wanted_count(federation.clients, federation.participation)
    registry.wait_for_clients(settings.wait_seconds, enough=quorum_count(wanted, federation.quorum))
    return {int(index): description for index, description in json.loads(path.read_text("utf-8")).items()}


def _check_of(backbone: Backbone, tiers: Mapping[str, Budget]) -> Callable[[int, Mapping[str, Any]], str]:
    """Returns the registry's check: why a client cannot take part, from its index and description."""

    def check(client: int, description: Mapping[str, Any]) -> str:
        if description.get("fedguild") != fedguild.__version__:
            return f"it runs fedguild {description.get('fedguild')}, the server {fedguild.__version__}"
        if description.get("model") != model_digest(backbone.info):
            return f"its model does not match the server's, {backbone.info.name}: check model.path in site.yaml"
        if description.get("budget") not in tiers:
            return f"its budget is '{description.get('budget')}', but the run has {', '.join(tiers)}"
        sizes = description.get("sizes")
        if not isinstance(sizes, dict) or not all(
            type(sizes.get(name)) is int and sizes[name] >= least
            for name, least in (("train", 1), ("validation", 0), ("test", 0))
        ):
            return "it does not say how many examples it has"
        return ""

    return check


def _remote_data(data: PreparedData | None, descriptions: Mapping[int, Mapping[str, Any]]) -> RemoteData:
    counts = {
        name: [descriptions[index]["sizes"][name] for index in sorted(descriptions)]
        for name in ("train", "validation", "test")
    }
    if data is not None:
        return RemoteData(data.corpus, data.clients, data.partition_table, counts)
    table = PartitionTable(labels=("examples",), counts=tuple((count,) for count in counts["train"]))
    return RemoteData(Corpus("remote", (), ()), [], table, counts)


def _require_same(config: Config, output: Path) -> None:
    original = load_config(str(output / "config.yaml"))
    if original.fingerprint() != config.fingerprint():
        raise ConfigError(
            f"run.yaml is not the config that the run in {output} started with.",
            f"Restore run.yaml from {output / 'config.yaml'}, or move {output} away to start a new run.",
        )
