"""One round, the same on every engine and for every method: who is asked, what is accepted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import LocalReport
from fedguild.errors import UploadError
from fedguild.model.plan import AdapterPlan, ModelInfo
from fedguild.payload import Payload
from fedguild.server.method import Method, State, Upload
from fedguild.server.sampling import require_quorum, sample
from fedguild.server.validation import check_upload
from fedguild.wire.accounting import Traffic, count_traffic


@dataclass(frozen=True)
class Task:
    """What a client is asked to do in a round."""

    round: int
    client: ClientInfo
    download: Payload


@dataclass(frozen=True)
class Delivery:
    """What came back from a client.

    Attributes:
        task: What it was asked.
        upload: Its payload; None where it failed.
        plan: What it trained.
        report: What its training did.
        frequency: [L, M] share of its tokens that activated each expert; None for a dense model.
        peak_memory_bytes: Peak memory of its cohort, where the engine measures it.
        failure: Why there is no upload.
    """

    task: Task
    upload: Payload | None
    plan: AdapterPlan
    report: LocalReport = field(default_factory=LocalReport)
    frequency: Tensor | None = None
    peak_memory_bytes: int | None = None
    failure: str = ""


class Engine(Protocol):
    """Runs the clients of a round somewhere; methods never see it."""

    def train(self, method: Method, model: ModelInfo, tasks: Sequence[Task]) -> Iterator[Delivery]:
        """Yields every task's delivery, in client order."""
        ...


@dataclass(frozen=True)
class RoundRules:
    """What a round insists on.

    Attributes:
        participation: Share of the clients that is asked.
        quorum: Share (float) or number (int) of the asked that must deliver a valid upload.
        norm_limit: Largest norm of an upload; None for no limit.
        seed: The run's seed, for the sampling.
    """

    participation: float
    quorum: float | int
    norm_limit: float | None
    seed: int


@dataclass
class Outcome:
    """A round that is over.

    Attributes:
        round: Its number, from 1.
        state: The method's state after it.
        asked: The clients that were asked.
        deliveries: What came back, uploads dropped.
        traffic: Bytes of each asked client.
        rejected: Client index -> why its upload was not aggregated.
        phase_seconds: Wall time by phase.
    """

    round: int
    state: State
    asked: list[ClientInfo]
    deliveries: list[Delivery] = field(default_factory=list)
    traffic: dict[int, Traffic] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock(self.phase_seconds)

    def tokens(self) -> dict[int, int]:
        """Returns client index -> training tokens."""
        return {delivery.task.client.index: delivery.report.tokens for delivery in self.deliveries}


def run_round(
    round_index: int,
    method: Method,
    state: State,
    model: ModelInfo,
    clients: Sequence[ClientInfo],
    engine: Engine,
    rules: RoundRules,
) -> Outcome:
    """Runs one round.

    Uploads are validated as they arrive and aggregated as running sums, so that the server holds
    one upload at a time. An upload that fails validation is left out and recorded.

    Raises:
        QuorumError: too few valid uploads; the state from before is untouched.
    """
    asked = sample(round_index, clients, rules.participation, rules.seed)
    outcome = Outcome(round_index, state, asked)
    with outcome.clock.phase("download"):
        tasks = [Task(round_index, client, method.download(state, model, client)) for client in asked]
    arriving = engine.train(method, model, tasks)
    with outcome.clock.phase("aggregate"):
        uploads = _valid(arriving, method, model, rules, outcome)
        outcome.state = method.aggregate(state, uploads)
    reasons = {client.name: outcome.rejected[client.index] for client in asked if client.index in outcome.rejected}
    require_quorum(len(asked) - len(outcome.rejected), len(asked), rules.quorum, reasons)
    return outcome


def _valid(
    arriving: Iterator[Delivery],
    method: Method,
    model: ModelInfo,
    rules: RoundRules,
    outcome: Outcome,
) -> Iterator[Upload]:
    """Yields the uploads that pass validation, and records all that arrived."""
    while True:
        with outcome.clock.phase("train"):
            delivery = next(arriving, None)
        if delivery is None:
            return
        client, upload = delivery.task.client, delivery.upload
        with outcome.clock.phase("validate"):
            reason = delivery.failure or _rejection(delivery, method, model, rules)
            traffic = count_traffic(outcome.round, client.index, delivery.task.download, upload)
        outcome.traffic[client.index] = traffic
        outcome.deliveries.append(_without_upload(delivery))
        if reason or upload is None:
            outcome.rejected[client.index] = reason or "nothing was delivered"
        else:
            yield Upload(outcome.round, client, upload)


def _rejection(delivery: Delivery, method: Method, model: ModelInfo, rules: RoundRules) -> str:
    if delivery.upload is None:
        return "nothing was delivered"
    client = delivery.task.client
    try:
        expected = method.expected_upload(model, client, delivery.task.download)
        check_upload(delivery.upload, expected, client=client.name, norm_limit=rules.norm_limit)
    except UploadError as error:
        return error.message
    return ""


def _without_upload(delivery: Delivery) -> Delivery:
    return Delivery(
        delivery.task,
        None,
        delivery.plan,
        delivery.report,
        delivery.frequency,
        delivery.peak_memory_bytes,
        delivery.failure,
    )


class Clock:
    """Adds up wall time by phase; a phase inside another is not counted in the outer one."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._inner = [0.0]

    def phase(self, name: str) -> _Phase:
        """Returns a context that adds its wall time to a phase."""
        return _Phase(self, name)


class _Phase:
    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._clock._inner.append(0.0)

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        whole = time.perf_counter() - self._started
        own = whole - self._clock._inner.pop()
        self._clock._inner[-1] += whole
        self._clock._seconds[self._name] = self._clock._seconds.get(self._name, 0.0) + own


def frequencies(deliveries: Sequence[Delivery]) -> Mapping[int, Tensor]:
    """Returns client index -> [L, M] activation frequency, for the clients that reported one."""
    return {d.task.client.index: d.frequency for d in deliveries if d.frequency is not None}
