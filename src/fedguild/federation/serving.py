"""The server of a federation: the round loop of every run, over real clients."""

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
from fedguild.engines.flower.engine import FlowerEngine
from fedguild.engines.flower.parcel import Parcel
from fedguild.engines.flower.post import Post
from fedguild.engines.flower.roster import POLL_SECONDS, Roster
from fedguild.errors import ConfigError, QuorumError
from fedguild.evaluation.metrics import load_metrics
from fedguild.export.weights import beyond_weights
from fedguild.federation.desk import facts_of, model_digest
from fedguild.files import write_json
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.packing import pack
from fedguild.payload import Payload
from fedguild.progress import Progress, Silent
from fedguild.server import checkpoint
from fedguild.server.method import Method
from fedguild.server.record import EvaluationRecord
from fedguild.server.sampling import quorum_count, wanted_count
from fedguild.setup import (
    MEMORY,
    Experiment,
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

RUN, SPOOL, MEMBERS = "run", "spool", "members.json"


@dataclass(frozen=True)
class RemoteData(PreparedData):
    """The data of clients that keep it: its sizes, and the server's own examples if it has any.

    Attributes:
        counts: Split -> number of each client's examples, as they said.
    """

    counts: Mapping[str, list[int]] = field(default_factory=dict)

    def sizes(self) -> dict[str, list[int]]:
        """Returns the number of each client's examples by split."""
        return {name: list(self.counts[name]) for name in ("train", "validation", "test")}


@dataclass(frozen=True)
class RemoteClients:
    """The clients of a run on their own machines.

    Attributes:
        engine: Trains them.
        method: What they run.
        model: The backbone's description.
        clients: Who they are, by index.
        wait_seconds: How long to wait for scores.
        progress: Who hears of a client that has none.
    """

    engine: FlowerEngine
    method: Method
    model: ModelInfo
    clients: Mapping[int, ClientInfo]
    wait_seconds: float
    progress: Progress

    def score(
        self, scope: Literal["client", "received"], state: Payload, number: int, split: Split
    ) -> list[EvaluationRecord]:
        """Returns what the clients scored on their own held-out examples, in client order.

        Raises:
            QuorumError: no client did.
        """
        answers = self._ask("score", state, number, {"scope": scope, "split": split})
        records: list[EvaluationRecord] = []
        for client, answer in answers.items():
            try:
                records += [EvaluationRecord.model_validate(one) for one in answer.facts.get("records", ())]
            except ValidationError:
                answer = answer.answer(failure="its scores cannot be read")
            if answer.failure:
                self.progress.message(f"Round {number}: client {client} has no scores: {answer.failure}")
        if not records:
            raise QuorumError(
                f"No client scored its model in round {number}.",
                "Look at what `fedguild federation client` says on their machines.",
            )
        return records

    def deliver(self, state: Payload, number: int) -> dict[int, Parcel]:
        """Hands every client what its own model is made of; returns client index -> answer.

        Nothing is sent where no folder could hold the model.
        """
        if beside := self._beyond_weights(state):
            self.progress.message(
                f"No client takes a model home: that of {self.method.name} has a part that acts beside the backbone's "
                f"weights ({', '.join(beside)}). What a client keeps of its own is in its memory, "
                f"work/runs/{self.engine.roster.run}/{MEMORY}."
            )
            return {}
        answers = self._ask("deliver", state, number, {})
        for client, answer in answers.items():
            said = answer.failure or f"{answer.facts.get('folder')} ({answer.facts.get('form')})"
            self.progress.message(f"The model of client {client}: {said}")
        return answers

    def _ask(
        self, kind: Literal["score", "deliver"], state: Payload, number: int, facts: Mapping[str, Any]
    ) -> dict[int, Parcel]:
        """Asks every client with its excerpt of the state."""
        return self.engine.ask(kind, number, partial(self._excerpt, state), self.wait_seconds, facts)

    def _excerpt(self, state: Payload, client: int) -> bytes:
        part = self.method.excerpt(state, self.model, self.clients[client])
        return pack(part.tensors, part.scalars)

    def _beyond_weights(self, state: Payload) -> list[str]:
        """Returns the parts of the clients' models that no checkpoint holds; they are the same for all."""
        client = next(iter(self.clients.values()))
        excerpt = self.method.excerpt(state, self.model, client)
        return beyond_weights(self.method.personalize(excerpt, self.model, client, Payload()).plan)


def serve(
    post: Post,
    settings: ServerSettings,
    folder: Path,
    *,
    progress: Progress | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> runs.RunResult:
    """Begins the run of a server's folder, or goes on with it from its last complete round.

    Args:
        post: Carries messages to the clients.
        settings: The server's settings.
        folder: The server's folder; its relative paths start here.
        progress: Who is told how it goes.
        poll_seconds: From one look for answers to the next.

    Raises:
        ConfigError: `run.yaml` is not the config that the run began with.
        QuorumError: clients are missing, or too few delivered.
    """
    progress = progress or Silent()
    config, output = load_config(str(folder / settings.run)), folder / settings.state / RUN
    held: list[Experiment] = []

    def prepared(config: Config, output: Path, progress: Progress | None) -> Experiment:
        held.append(prepare_remote(post, config, settings, output, progress or Silent(), poll_seconds))
        return held[0]

    if (output / "config.yaml").exists():
        _require_same(config, output)
        result = runs.resume(output, progress=progress, preparation=prepared)
    else:
        result = runs.run(config, output, progress=progress, preparation=prepared)
    remote = held[0].remote
    if settings.deliver and isinstance(remote, RemoteClients):
        saved = checkpoint.load(output / runs.CHECKPOINTS, result.rounds, fingerprint=config.fingerprint())
        remote.deliver(saved.state, result.rounds)
    return result


def prepare_remote(
    post: Post,
    config: Config,
    settings: ServerSettings,
    output: Path,
    progress: Progress,
    poll_seconds: float = POLL_SECONDS,
) -> Experiment:
    """Returns what a run with real clients holds, after waiting for them.

    Raises:
        ConfigError: the config asks for what real clients cannot do.
        QuorumError: clients are missing after `wait_seconds`.
    """
    if config.evaluation.pooled:
        raise ConfigError(
            "evaluation.pooled scores every client's model on all clients' examples, but these do not leave them.",
            "Set evaluation.pooled=false.",
        )
    given = method_of(config)
    load_metrics(config.evaluation.metrics)
    method, tiers = fit_method(given, config, model_of(config))
    tell_fitted(given, method, progress.message)
    known = prepare_data(config) if settings.reads_data else None
    progress.stage(f"Loading the model {config.model.path}")
    backbone = load_model(config)
    roster = Roster(
        post,
        run_identity(output),
        config.federation.clients,
        facts_of(config),
        check=_check_of(backbone, tiers),
        tell=progress.message,
        poll_seconds=poll_seconds,
    )
    facts = _gather(roster, config, settings, output)
    engine = FlowerEngine(
        post,
        roster,
        facts_of(config),
        output / SPOOL,
        codec=config.federation.codec,
        limit_bytes=config.federation.upload_limit_bytes,
        reconnect_seconds=settings.reconnect_seconds,
        poll_seconds=poll_seconds,
    )
    clients = {
        index: ClientInfo(index, tiers[said["budget"]], said["sizes"]["train"]) for index, said in sorted(facts.items())
    }
    return Experiment(
        config,
        output,
        method,
        _data(known, facts),
        backbone,
        list(tiers.values()),
        list(clients.values()),
        ClientMemory(output / MEMORY),
        progress,
        RemoteClients(engine, method, backbone.info, clients, settings.score_seconds, progress),
    )


def _gather(roster: Roster, config: Config, settings: ServerSettings, output: Path) -> dict[int, Mapping[str, Any]]:
    """Returns what every client said of itself; a run that goes on waits for a quorum only."""
    path, federation = output / MEMBERS, config.federation
    if not (output / "config.yaml").exists() or not path.is_file():
        members = roster.gather(settings.wait_seconds)
        facts: dict[int, Mapping[str, Any]] = {index: member.facts for index, member in sorted(members.items())}
        write_json(path, {str(index): {**said, "node": str(members[index].node)} for index, said in facts.items()})
        return facts
    wanted = wanted_count(federation.clients, federation.participation)
    roster.gather(settings.wait_seconds, enough=quorum_count(wanted, federation.quorum))
    return {int(index): said for index, said in json.loads(path.read_text("utf-8")).items()}


def _check_of(backbone: Backbone, tiers: Mapping[str, Budget]) -> Callable[[int, Mapping[str, Any]], str]:
    """Returns what tells why a client cannot take part, from its index and what it said."""

    def check(client: int, facts: Mapping[str, Any]) -> str:
        if facts.get("fedguild") != fedguild.__version__:
            return f"it runs fedguild {facts.get('fedguild')}, the server {fedguild.__version__}"
        if facts.get("model") != model_digest(backbone.info):
            return f"its model has not the form of the server's, {backbone.info.name}: look at model.path in site.yaml"
        if facts.get("budget") not in tiers:
            return f"it says budget '{facts.get('budget')}', but the run has {', '.join(tiers)}"
        sizes = facts.get("sizes")
        if not isinstance(sizes, dict) or not all(
            type(sizes.get(name)) is int and sizes[name] >= least
            for name, least in (("train", 1), ("validation", 0), ("test", 0))
        ):
            return "it does not say how many examples it has"
        return ""

    return check


def _data(known: PreparedData | None, facts: Mapping[int, Mapping[str, Any]]) -> RemoteData:
    counts = {
        name: [facts[index]["sizes"][name] for index in sorted(facts)] for name in ("train", "validation", "test")
    }
    if known is not None:
        return RemoteData(known.corpus, known.clients, known.partition_table, counts)
    table = PartitionTable(labels=("examples",), counts=tuple((count,) for count in counts["train"]))
    return RemoteData(Corpus("remote", (), ()), [], table, counts)


def _require_same(config: Config, output: Path) -> None:
    begun = load_config(str(output / "config.yaml"))
    if begun.fingerprint() != config.fingerprint():
        raise ConfigError(
            f"run.yaml is not what the run in {output} began with.",
            f"Put run.yaml back as {output / 'config.yaml'} says, or move {output} away to begin a new run.",
        )
