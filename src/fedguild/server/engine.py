"""The protocol of engines, which carry tasks to the clients and deliveries back.

Whatever can go wrong with them is decided by the round (`fedguild.server.rounds`), which is the same
on every engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import LocalReport
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.payload import Payload
from fedguild.server.method import Method


@dataclass(frozen=True)
class Task:
    """What a client is asked to do in a round."""

    round: int
    client: ClientInfo
    download: Payload


@dataclass(frozen=True)
class Terms:
    """How long an engine waits for the clients of one `train`.

    Attributes:
        deadline_seconds: It stops waiting so long after it began; None to wait for all.
        enough: It stops waiting as soon as so many clients delivered; None to wait for all.
    """

    deadline_seconds: float | None = None
    enough: int | None = None


WAIT_FOR_ALL = Terms()


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
        needed: False where the engine stopped waiting for it because enough others delivered;
            the round holds that against nobody.
    """

    task: Task
    upload: Payload | None
    plan: AdapterPlan
    report: LocalReport = field(default_factory=LocalReport)
    frequency: Tensor | None = None
    peak_memory_bytes: int | None = None
    failure: str = ""
    needed: bool = True


def too_late(task: Task, plan: AdapterPlan, deadline_seconds: float) -> Delivery:
    """Returns the delivery of a client that an engine stopped waiting for at the deadline."""
    return Delivery(task, None, plan, failure=f"did not answer within {deadline_seconds:g} s")


def not_needed(task: Task, plan: AdapterPlan, faster: int) -> Delivery:
    """Returns the delivery of a client that an engine stopped waiting for as `faster` others had delivered."""
    return Delivery(task, None, plan, failure=f"not needed: {faster} others were faster", needed=False)


class Engine(Protocol):
    """Runs the clients of a round somewhere; methods never see it."""

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Terms = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        """Yields a delivery for every task, in client order (the order of `tasks`).

        A round may call it more than once, with the tasks of the clients that failed: a client
        that is asked again for the same round starts again from the same download and the memory
        of its earlier rounds.

        - A client that failed gets a delivery with `failure`, a clause that says why.
        - Past `terms.deadline_seconds` nobody is waited for: who is missing gets `too_late(...)`.
        - Once `terms.enough` clients delivered, nobody is waited for: who is missing gets
          `not_needed(...)`.
        - What arrives after its round was left goes in front of the deliveries of a later `train`,
          with the task that it answers (`delivery.task.round` tells), once. An engine need not
          keep it; the round decides what becomes of it.

        Whether an upload is valid, a duplicate, or of a round that is over, is for the round to
        find out; an engine only refuses what it cannot read or must not read (see
        `fedguild.server.validation.check_envelope`).
        """
        ...

    def close(self) -> None:
        """Lets go of processes and connections; called once, after the last round."""
        ...
