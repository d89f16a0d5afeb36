"""The protocol of engines, which carry tasks to the clients and deliveries back.

Failures are handled by the round loop (`fedguild.server.intake`), which is the same on every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import LocalReport
from fedguild.core.payload import Payload
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import Method


@dataclass(frozen=True)
class Task:
    """A request to a client to train in a round."""

    round: int
    client: ClientInfo
    download: Payload


@dataclass(frozen=True)
class Wait:
    """The limits to an engine's wait for the clients of one `train`.

    Attributes:
        deadline_seconds: The engine stops waiting after this time; None to wait for all.
        enough: The engine stops waiting once this many clients have delivered; None to wait for all.
        needed: The round fails with fewer deliveries than this, so that an engine need not wait for the others once too
            many refuse.
    """

    deadline_seconds: float | None = None
    enough: int | None = None
    needed: int = 0


WAIT_FOR_ALL = Wait()


@dataclass(frozen=True)
class Delivery:
    """A client's answer to a task.

    Attributes:
        task: The task that it answers.
        upload: The client's payload; None if the client failed.
        plan: The adapter plan that the client trained.
        report: The report of its training.
        frequency: [L, M] share of its tokens that activated each expert; None for a dense model.
        peak_memory_bytes: Peak memory of the client's cohort, if the engine measures it.
        failure: The reason for a missing upload.
        needed: False if the engine stopped waiting because enough other clients had delivered; the round does not count
            this as a failure.
        kept: Whether the client has trained and keeps its upload and its report, for secure aggregation; `upload` is
            empty then.
    """

    task: Task
    upload: Payload | None
    plan: AdapterPlan
    report: LocalReport = field(default_factory=LocalReport)
    frequency: Tensor | None = None
    peak_memory_bytes: int | None = None
    failure: str = ""
    needed: bool = True
    kept: bool = False


def too_late(task: Task, plan: AdapterPlan, deadline_seconds: float) -> Delivery:
    """Returns the delivery of a client that an engine stopped waiting for at the deadline."""
    return Delivery(task, None, plan, failure=f"did not answer within {deadline_seconds:g} s")


def not_needed(task: Task, plan: AdapterPlan, faster: int) -> Delivery:
    """Returns the delivery of a client that an engine stopped waiting for because `faster` others had delivered."""
    return Delivery(task, None, plan, failure=f"not needed: {faster} others were faster", needed=False)


class Engine(Protocol):
    """Runs the clients of a round; methods never see the engine."""

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        """Yields a delivery for every task, in client order (the order of `tasks`).

        A round may call it again with the tasks of the clients that failed. A client that is asked again for the same
        round starts again from the same download and the memory of its earlier rounds.

        - A client that failed gets a delivery with `failure`, a clause that states the reason.
        - After `terms.deadline_seconds` the engine stops waiting: missing clients get `too_late(...)`.
        - Once `terms.enough` clients have delivered, the engine stops waiting: missing clients get `not_needed(...)`.
        - An upload that arrives after its round has ended is yielded once, before the deliveries of a later `train`,
          with the task that it answers (see `delivery.task.round`). An engine need not keep it; the round decides
          whether to use it.

        The round determines whether an upload is valid, a duplicate, or of an earlier round. An engine only refuses
        uploads that it cannot read or must not read (see `fedguild.server.validation.check_envelope`).
        """
        ...

    def close(self) -> None:
        """Releases processes and connections; called once, after the last round."""
        ...


AnswerFilter = Callable[[Method, ModelInfo, Delivery], Delivery]
"""A protection on the clients' side: a delivery -> what of it leaves the client, or why nothing does."""


class FilteredEngine:
    """Wraps an engine whose clients' answers pass filters, in order, before they leave the clients."""

    def __init__(self, engine: Engine, filters: Sequence[AnswerFilter]) -> None:
        self.engine, self.filters = engine, filters

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        for delivery in self.engine.train(method, model, tasks, terms):
            for filter in self.filters:
                delivery = filter(method, model, delivery)
            yield delivery

    def close(self) -> None:
        self.engine.close()
