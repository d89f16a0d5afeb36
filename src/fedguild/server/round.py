"""One round: the objects that it is run with, the same in all rounds, its filters, and its outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Protocol

from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import LocalReport
from fedguild.config.federation import FederationSettings, wanted_count
from fedguild.core.accounting import Traffic
from fedguild.core.payload import Payload
from fedguild.core.progress import Note, unnoted
from fedguild.model.info import ModelInfo
from fedguild.server.clock import Clock
from fedguild.server.engine import Delivery, Engine
from fedguild.server.method import Method, Observation
from fedguild.server.sampling import quorum_count, sample
from fedguild.server.terms import Upload

Again = Callable[[int, Sequence[ClientInfo]], Sequence[ClientInfo]]
"""Round and clients -> those of them that may be asked once more."""
Onward = Callable[[Iterable[Upload]], Payload]
"""Uploads -> the next state, by the filters that follow and the method's `aggregate`."""


class Filter(Protocol):
    """A protection on the server, one of a list that a round's valid uploads pass on their way to the aggregate."""

    def __call__(self, uploads: Iterable[Upload], passage: Passage, onward: Onward, /) -> Payload:
        """Returns the next state: `onward` of the uploads, of some of them, or of others in their place."""
        ...


@dataclass(frozen=True)
class RoundSetup:
    """The objects that every round of a run is run with.

    Attributes:
        method: The method.
        model: The backbone's description.
        engine: The engine that trains the clients.
        rules: The rules of sampling, quorum and valid uploads.
        seed: The run's seed, for the sampling.
        filters: The server's protections, in order.
        largest_value: Largest magnitude of a value in a valid upload; None where values are not looked at, because a
            rejection would tell of them before there is noise on them.
        again: Decides before each further attempt who is asked once more; None for everybody whose upload is missing.
        diagnose: Whether to look at what averaging does to the uploads; a round's uploads are then all held.
        note: Takes what happens in a round, for whoever watches.
        least: The quorum that no round goes below, even where fewer clients could take part than the config has; sites
            rely on it (`accept.min_clients`).
    """

    method: Method
    model: ModelInfo
    engine: Engine
    rules: FederationSettings
    seed: int
    filters: Sequence[Filter] = ()
    largest_value: float | None = math.inf
    again: Again | None = None
    diagnose: bool = False
    note: Note = unnoted
    least: int = 1

    def sampled(self, number: int, clients: Sequence[ClientInfo]) -> list[ClientInfo]:
        """Returns the clients that a round asks, of those that could take part."""
        rules = self.rules
        return sample(
            number, clients, rules.client_fraction, self.seed, over_selection=rules.over_selection, least=self.least
        )

    def wanted(self, clients: int) -> int:
        """Returns the number of uploads that a round wants, of the clients that could take part."""
        return min(max(wanted_count(clients, self.rules.client_fraction), self.least), clients)

    def quorum(self, wanted: int) -> int:
        """Returns the number of uploads that a round needs, of those that it wants."""
        return max(quorum_count(wanted, self.rules.quorum), self.least)


@dataclass(frozen=True)
class Stray:
    """An unexpected upload: of an earlier round, a second time, or unrequested.

    Attributes:
        round: The round that it belongs to.
        client: The index of its client.
        upload_bytes: Its size.
        dropped: The reason why it was not aggregated; empty if it was.
    """

    round: int
    client: int
    upload_bytes: int
    dropped: str = ""


@dataclass
class Outcome:
    """A completed round.

    Attributes:
        round: Its number, from 1.
        state: The method's state after it.
        asked: The clients that were asked.
        deliveries: The last delivery of each of them, without its upload, in client order.
        traffic: Bytes of each asked client over all its attempts.
        rejected: Client index -> the reason why its upload was not aggregated.
        accepted: Indices of the clients whose upload of this round was aggregated.
        unneeded: Indices of the clients that the engine did not wait for because enough others had delivered.
        retried: Indices of the clients that were asked more than once.
        strays: Unexpected uploads.
        faults: Client index -> what it did wrong in a secure aggregation that the others could make good.
        bounds: Name of a mean of a secure round -> the largest error of fixed point in it.
        mean_report: The mean over the clients of their reports and activation frequencies, in a secure round.
        observations: What averaging did to the uploads, where that is asked for.
        not_finite: Indices of the clients that sent an upload with NaN or infinity.
        phase_seconds: Wall time by phase.
    """

    round: int
    state: Payload
    asked: list[ClientInfo]
    deliveries: list[Delivery] = field(default_factory=list)
    traffic: dict[int, Traffic] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    unneeded: list[int] = field(default_factory=list)
    retried: list[int] = field(default_factory=list)
    strays: list[Stray] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    mean_report: tuple[LocalReport, Tensor | None] | None = None
    observations: list[Observation] = field(default_factory=list)
    not_finite: set[int] = field(default_factory=set)
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock(self.phase_seconds)

    @property
    def moved_bytes(self) -> int:
        """Bytes that the round moved, both ways, further attempts and unexpected uploads included."""
        counted = sum(one.download_bytes + one.upload_bytes for one in self.traffic.values())
        return counted + sum(stray.upload_bytes for stray in self.strays)

    def tokens(self) -> dict[int, int]:
        """Returns client index -> training tokens."""
        return {delivery.task.client.index: delivery.report.tokens for delivery in self.deliveries}

    def frequencies(self) -> dict[int, Tensor]:
        """Returns client index -> [L, M] activation frequency, of the accepted clients that reported one."""
        return {
            delivery.task.client.index: delivery.frequency
            for delivery in self.deliveries
            if delivery.frequency is not None and delivery.task.client.index in self.accepted
        }


@dataclass(frozen=True)
class Passage:
    """A round, as its filters know it.

    Attributes:
        setup: What all rounds of the run have in common.
        outcome: What is known of the round so far.
        state: The state before it, without the server's momentum.
        wanted: The number of uploads that it wants.
        withdraw: Records that an upload is not aggregated after all, and why.
        bounded: Names of tensors with a bound of their own, whose norms are not compared.
    """

    setup: RoundSetup
    outcome: Outcome
    state: Payload
    wanted: int
    withdraw: Callable[[Upload, str], None]
    bounded: Collection[str] = ()


def filtered(passage: Passage) -> Onward:
    """Returns the way of a round's uploads through the filters of its run to the method's next state."""

    def before(onward: Onward, filter: Filter) -> Onward:
        return lambda uploads: filter(uploads, passage, onward)

    aggregate: Onward = partial(passage.setup.method.aggregate, passage.state)
    return reduce(before, reversed(passage.setup.filters), aggregate)
