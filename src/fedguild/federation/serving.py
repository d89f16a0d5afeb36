"""The server of a federation: the round loop over real clients, their scores, and the delivery of their models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

import fedguild
from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.config import Config, load_config, load_saved
from fedguild.core.errors import CheckpointError, ConfigError, FedGuildError, QuorumError, UploadError
from fedguild.core.layout import CHECKPOINTS, CONFIG, MEMBERS, MEMORY, RUN, UPLOADS, client_name
from fedguild.core.locking import run_lock
from fedguild.core.packing import pack
from fedguild.core.payload import Payload
from fedguild.core.progress import Progress, Silent
from fedguild.data import PartitionTable
from fedguild.data.example import ELSEWHERE
from fedguild.export.weights import beyond_weights
from fedguild.federation.audit import AuditLog
from fedguild.federation.contacts import NotedTransport
from fedguild.federation.flower.client_registry import POLL_SECONDS, ClientRegistry
from fedguild.federation.flower.engine import FlowerEngine, Patience
from fedguild.federation.flower.message import Message
from fedguild.federation.flower.transport import Transport
from fedguild.federation.members import Members
from fedguild.federation.revocation import Revocations
from fedguild.federation.schema import DeliverAnswer, ScoreAnswer, read_metadata
from fedguild.federation.site import ServerSettings
from fedguild.federation.stopping import stop_if_requested, withdraw_request
from fedguild.federation.trainer_service import SCORES, model_digest, run_metadata
from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.records import EvaluationRecord
from fedguild.measuring.scores.metrics import METRICS, TAKEN, load_metrics
from fedguild.methods import METHODS, require_registered
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.runs import experiment as runs
from fedguild.runs.guarantee import require_public_scores
from fedguild.runs.recording import mean_record, own_mean
from fedguild.runs.scoring import measures_of
from fedguild.runs.setup import (
    Experiment,
    OwnScope,
    PreparedData,
    Split,
    budgets_of,
    check_fit,
    fitted,
    load_model,
    method_of,
    model_of,
    prepare_data,
    run_identity,
    tell_fitted,
)
from fedguild.server import checkpoint
from fedguild.server.method import Method, client_model, excerpt_of, starts_from_clients
from fedguild.server.optimizer import own_state
from fedguild.server.round import Outcome
from fedguild.server.sampling import quorum_count
from fedguild.server.secure_round import SecureAggregation
from fedguild.server.secure_scores import summed_scores


@dataclass(frozen=True)
class RemoteData(PreparedData):
    """Data that stays with the clients: its sizes, and the server's own examples if it has any.

    Attributes:
        counts: Split -> number of each client's examples, as the clients report it.
    """

    counts: Mapping[str, list[int]] = field(default_factory=dict)

    def sizes(self) -> dict[str, list[int]]:
        return {name: list(self.counts[name]) for name in ("train", "validation", "test")}


@dataclass(frozen=True)
class RemoteClients:
    """The clients of a run on their own machines.

    Attributes:
        members: Those that were admitted.
        tiers: Name -> budget.
        dealt: The budget that the run assigns to each client, for those that are not connected yet.
        wait_seconds: How long to wait for scores.
        progress: Receives a message for every client without scores.
        metrics: The metrics that a score of the run may have.
        most_examples: Most examples of a score; None for all that a client has.
        measures: The metrics that a score can be the mean of.
        sums: The secure aggregation by which the clients' scores are summed; None if they come one by one.
    """

    engine: FlowerEngine
    method: Method
    model: ModelInfo
    members: Members
    tiers: Mapping[str, Budget]
    dealt: Sequence[str]
    wait_seconds: float
    progress: Progress
    audit: AuditLog
    metrics: frozenset[str]
    most_examples: int | None
    measures: Sequence[str]
    sums: SecureAggregation | None = None

    def note(self, outcome: Outcome) -> None:
        self.audit.append(
            "round",
            round=outcome.round,
            asked=[client.index for client in outcome.asked],
            accepted=outcome.accepted,
            rejected={str(client): reason for client, reason in sorted(outcome.rejected.items())},
            unneeded=outcome.unneeded,
            strays=[asdict(stray) for stray in outcome.strays],
            faults={str(client): fault for client, fault in sorted(outcome.faults.items())},
        )

    def note_asked(self, *, round: int, attempt: int, clients: Sequence[int]) -> None:
        """Writes whom a round asks to train into the audit log; a later attempt asks those that did not deliver."""
        self.audit.append("asked", round=round, attempt=attempt, clients=list(clients))

    def note_failure(self, round: int, reason: str) -> None:
        self.audit.append("failed", round=round, reason=reason)

    def note_session(self, facts: Mapping[str, Any]) -> None:
        self.audit.append("session", **facts)

    def is_revoked(self, client: int) -> bool:
        return self.engine.registry.is_revoked(client)

    def current(self) -> list[ClientInfo]:
        """Returns all clients, after admitting new ones; a client that never connected has no examples."""
        self.engine.registry.refresh()
        self.members.admit(self.engine.registry.clients)
        self.engine.registry.note_accepted()
        return [self._client(index) for index in range(len(self.dealt))]

    def _client(self, index: int) -> ClientInfo:
        described = self.members.described.get(index)
        budget = self.dealt[index] if described is None else described["budget"]
        return ClientInfo(index, self.tiers[budget], self.members.examples(index))

    def score(self, scope: OwnScope, state: Payload, number: int, split: Split) -> list[EvaluationRecord]:
        """Returns the clients' scores on their own held-out examples, in client order.

        In a secure run it is one record of their mean, from a secure sum; none if too few clients can be summed.

        Raises:
            QuorumError: no client has any.
        """
        replies = self._ask("score", state, number, {"scope": scope, "split": split})
        records: list[EvaluationRecord] = []
        refused: dict[str, str] = {}
        for client, reply in replies.items():
            failure = reply.failure
            try:
                if not failure and self.sums is None:
                    answer = read_metadata(ScoreAnswer, reply.metadata, "its scores cannot be read")
                    score = answer.of(client_name(client), number, scope, split)
                    answer.require_of_run(self.metrics, self.most_examples)
                    records.append(EvaluationRecord.model_validate(score.model_dump()))
            except (UploadError, ValidationError) as error:
                failure = error.message if isinstance(error, UploadError) else "its scores cannot be read"
            if failure:
                refused[str(client)] = failure
                self.progress.message(f"Round {number}: client {client} has no scores: {failure}")
        scored = [client for client in replies if str(client) not in refused]
        self.audit.append(
            "scored", round=number, scope=scope, split=split, asked=list(replies), accepted=scored, rejected=refused
        )
        if not scored:
            listed = "".join(f"\n  {client_name(int(client))}: {why}" for client, why in refused.items())
            raise QuorumError(
                f"No client scored its model in round {number}.{listed}",
                "Check the output of `fedguild federation client` on their machines.",
            )
        return records if self.sums is None else self._summed(self.sums, scope, number, split, scored)

    def _summed(
        self, rules: SecureAggregation, scope: OwnScope, number: int, split: Split, scored: Sequence[int]
    ) -> list[EvaluationRecord]:
        """Returns the mean of the scores that clients keep, from a secure sum; nothing if it is withheld."""

        def note(facts: Mapping[str, Any]) -> None:
            self.note_session({**facts, "of": f"scores, {scope}, {split}"})

        try:
            found = summed_scores(rules, number, self.engine, scored, note)
        except QuorumError as error:
            self.progress.message(f"Round {number}: the clients' scores are withheld: {error.message}")
            return []
        metrics = [self.measures[place] for place in found.measures]
        return [mean_record(own_mean(scope), number, split, found.mean, found.deviation, metrics)]

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
            result = reply.failure
            try:
                if not result:
                    answer = read_metadata(DeliverAnswer, reply.metadata, "its answer cannot be read")
                    result = f"{answer.folder} ({answer.form})"
            except UploadError as error:
                result = error.message
            self.progress.message(f"The model of client {client}: {result}")
            self.audit.append("delivered", client=client, result=result)
        return replies

    def _ask(
        self, kind: Literal["score", "deliver"], state: Payload, number: int, metadata: Mapping[str, Any]
    ) -> dict[int, Message]:
        return self.engine.ask(kind, number, partial(self._excerpt, state), self.wait_seconds, metadata)

    def _excerpt(self, state: Payload, client: int) -> bytes:
        part = excerpt_of(self.method, own_state(state), self.model, self._client(client))
        return pack(part.tensors, part.scalars)

    def _beyond_weights(self, state: Payload) -> list[str]:
        """Returns the parts of the clients' models that no checkpoint can hold; they are the same for all."""
        client = self._client(0)
        excerpt = excerpt_of(self.method, own_state(state), self.model, client)
        return beyond_weights(client_model(self.method, excerpt, self.model, client, Payload()).plan)


def serve(
    transport: Transport,
    settings: ServerSettings,
    folder: Path,
    *,
    progress: Progress | None = None,
    poll_seconds: float = POLL_SECONDS,
    round: int | None = None,
) -> runs.RunResult:
    """Starts the run of a server's folder, or resumes it from its last complete round.

    Args:
        transport: Reaches the clients.
        folder: The server's folder; its relative paths start here.
        poll_seconds: Interval between two polls for replies.
        round: Goes back to this round of the run; None for its last complete one.

    Raises:
        ConfigError: `run.yaml` is not the config that the run started with, or names a method as `module:Class`.
        CheckpointError: another process is working on the run.
        QuorumError: clients are missing, or too few delivered an upload.
        StoppedError: the operator stopped the run.
    """
    progress = progress or Silent()
    state, keys = folder / settings.state, folder / settings.nodes
    config, output, audit = load_config(str(folder / settings.run)), state / RUN, AuditLog(state)
    require_registered(config.method.name)
    prepared: list[Experiment] = []
    holds_lock = False

    def prepare(config: Config, output: Path, progress: Progress | None) -> Experiment:
        nonlocal holds_lock
        holds_lock = True
        withdraw_request(state)
        audit.append("started", run=run_identity(output), fingerprint=config.fingerprint())
        prepared.append(prepare_remote(transport, config, settings, output, keys, progress or Silent(), poll_seconds))
        return prepared[0]

    try:
        if (output / CONFIG).exists():
            _require_same(config, output)
            result = runs.resume(output, progress=progress, preparation=prepare, round=round)
        elif round is not None:
            raise CheckpointError(f"{output} holds no run that could go back to round {round}.")
        else:
            result = runs.run(config, output, progress=progress, preparation=prepare)
        remote = prepared[0].remote
        if settings.deliver and isinstance(remote, RemoteClients):
            with run_lock(output):
                saved = checkpoint.load(output / CHECKPOINTS, result.rounds, fingerprint=config.fingerprint())
                remote.deliver(saved.state, result.rounds)
    except Exception as error:
        if holds_lock:
            reason = error.message if isinstance(error, FedGuildError) else f"{type(error).__name__}: {error}"
            with suppress(FedGuildError):  # the disk is full: `error` is what ended the run
                audit.append("stopped", reason=reason)
            withdraw_request(state)
        raise
    audit.append("ended", rounds=result.rounds)
    return result


def prepare_remote(
    transport: Transport,
    config: Config,
    settings: ServerSettings,
    output: Path,
    keys: Path,
    progress: Progress,
    poll_seconds: float = POLL_SECONDS,
) -> Experiment:
    """Returns the experiment of a run with real clients, once they are connected.

    Raises:
        ConfigError: the config asks for something that real clients cannot do.
        QuorumError: clients are missing after `wait_seconds`.
    """
    check_remote(config, settings)
    state = output.parent
    audit = AuditLog(state)
    transport = NotedTransport(transport, ActivityLog(output).append)
    given = method_of(config)
    model = model_of(config)
    method = fitted(given, config, model)
    check_fit(method, config, model)
    tiers = budgets_of(config, model)
    tell_fitted(given, method, progress.message)
    data = prepare_data(config) if settings.server_evaluation else None
    progress.stage(f"Loading the model {config.model.path}")
    backbone = load_model(config)
    registry = ClientRegistry(
        transport,
        run_identity(output),
        config.federation.clients,
        run_metadata(config),
        check=_check_of(backbone, tiers, config.method.name),
        echo=progress.message,
        poll_seconds=poll_seconds,
        revoked=Revocations(state).names,
        between_polls=partial(stop_if_requested, state),
        refusal=lambda node, name, reason: audit.append("refused", node=str(node), name=name, reason=reason),
        acceptance=lambda node, name: audit.append("accepted", node=str(node), name=name),
    )
    refuse = registry.turn_away if config.federation.secure else None
    members = Members(output / MEMBERS, settings, progress.message, audit.append, refuse)
    needs_all = starts_from_clients(method, backbone.info, list(tiers.values()))
    _wait_for_clients(registry, config, settings, members, needs_all=needs_all)
    engine = FlowerEngine(
        transport,
        registry,
        run_metadata(config),
        output / UPLOADS,
        codec=config.federation.wire_dtype,
        limit_bytes=config.federation.upload_limit_bytes,
        reconnect_seconds=settings.reconnect_seconds,
        patience=_patience(config, settings),
        secure=config.federation.secure,
        step_seconds=settings.secure_seconds,
        keys=keys,
        poll_seconds=poll_seconds,
    )
    engine.expect_absent([index for index in range(config.federation.clients) if index not in registry.clients])
    dealt = [tier.name for tier in config.federation.budget_per_client()]
    remote = RemoteClients(
        engine,
        method,
        backbone.info,
        members,
        tiers,
        dealt,
        settings.score_seconds,
        progress,
        audit,
        frozenset((*METRICS, *TAKEN, *config.evaluation.metrics)),
        config.evaluation.max_examples,
        measures_of(config),
        _sums_of(config, run_identity(output), list(tiers.values())),
    )
    return Experiment(
        config,
        output,
        method,
        _remote_data(data, members.described, config.federation.clients),
        backbone,
        list(tiers.values()),
        remote.current(),
        ClientMemory(output / MEMORY),
        progress,
        remote,
    )


def check_remote(config: Config, settings: ServerSettings) -> None:
    """Checks what a run with real clients needs besides its method and model, before anything is loaded.

    Raises:
        ConfigError: scores are asked for that real clients cannot give, or must not; or a metric is unknown.
    """
    if config.evaluation.pooled:
        raise ConfigError(
            "evaluation.pooled scores every client's model on all clients' examples, but those never leave the client.",
            "Set evaluation.pooled=false.",
        )
    load_metrics(config.evaluation.metrics)
    if not settings.server_evaluation:
        require_public_scores(config)


def _sums_of(config: Config, run: str, budgets: Sequence[Budget]) -> SecureAggregation | None:
    """Returns the secure aggregation of a run's scores; None if the clients send them one by one."""
    rules = config.federation
    if not rules.secure or SCORES in rules.secure_disclose:
        return None
    return SecureAggregation(run, budgets, rules.secure_share, rules.secure_clients, rules.secure_unheld)


def _patience(config: Config, settings: ServerSettings) -> Patience | None:
    if settings.patience is None:
        return None
    federation = config.federation
    needed = quorum_count(federation.wanted_uploads, federation.quorum)
    return Patience(needed, settings.patience, settings.patience_seconds)


def _wait_for_clients(
    registry: ClientRegistry, config: Config, settings: ServerSettings, members: Members, *, needs_all: bool
) -> None:
    """Waits for the clients without which the run cannot start or resume, and admits those that have joined.

    Args:
        needs_all: Whether the method needs all clients at the start, because its first state depends on each of them.
    """
    federation = config.federation
    begun = len(members.described) == federation.clients
    enough = None if needs_all and not begun else quorum_count(federation.wanted_uploads, federation.quorum)
    started, needed = time.monotonic(), federation.clients if enough is None else enough
    while len(registry.clients) < needed:
        left_seconds = max(0.0, settings.wait_seconds - (time.monotonic() - started))
        members.admit(registry.wait_for_clients(left_seconds, enough, settings.grace_seconds))
        registry.note_accepted()


def _check_of(backbone: Backbone, tiers: Mapping[str, Budget], method: str) -> Callable[[int, Mapping[str, Any]], str]:
    """Returns the registry's check: why a client cannot take part, from its index and description."""

    def check(client: int, description: Mapping[str, Any]) -> str:
        if description.get("fedguild") != fedguild.__version__:
            return f"it runs fedguild {description.get('fedguild')}, the server {fedguild.__version__}"
        if description.get("method") != (ours := METHODS.origin(method)):
            theirs = description.get("method") or "no package"
            return f"its method {method} comes from {theirs}, the server's from {ours}"
        if description.get("model") != model_digest(backbone.info):
            return f"its model does not match the server's, {backbone.info.name}: check model.path in site.yaml"
        if description.get("budget") not in tiers:
            return f"its budget is '{description.get('budget')}', but the run has {', '.join(tiers)}"
        return ""

    return check


def _remote_data(data: PreparedData | None, described: Mapping[int, Mapping[str, Any]], clients: int) -> RemoteData:
    nobody: Mapping[str, Any] = {"sizes": {}}
    counts = {
        name: [described.get(index, nobody)["sizes"].get(name, 0) for index in range(clients)]
        for name in ("train", "validation", "test")
    }
    if data is not None:
        return RemoteData(data.corpus, data.clients, data.partition_table, counts)
    table = PartitionTable(labels=("examples",), counts=tuple((count,) for count in counts["train"]))
    return RemoteData(ELSEWHERE, [], table, counts)


def _require_same(config: Config, output: Path) -> None:
    original = load_saved(output / CONFIG)
    if original.fingerprint() != config.fingerprint():
        raise ConfigError(
            f"run.yaml is not the config that the run in {output} started with.",
            f"Restore run.yaml from {output / 'config.yaml'}, or move {output} away to start a new run.",
        )
