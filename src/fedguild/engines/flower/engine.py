"""The `flower` engine: a round's tasks go out as messages, what comes back becomes deliveries.

An answer is matched to its task by the carrier's ticket and must name the same run, round and client.
Answers are written to disk as they come and read in client order. A client that answers a later
question but not its task has lost it (its machine was restarted), and is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedguild.client.cohort import LocalReport
from fedguild.engines.flower.parcel import Kind, Parcel
from fedguild.engines.flower.post import Lost, Post
from fedguild.engines.flower.roster import POLL_SECONDS, Roster
from fedguild.engines.flower.spool import Spool
from fedguild.errors import FedGuildError, UploadError
from fedguild.model.info import ModelInfo
from fedguild.payload import Payload
from fedguild.server.method import Method
from fedguild.server.rounds import WAIT_FOR_ALL, Delivery, Task, Terms, not_needed, too_late
from fedguild.server.validation import Envelope, check_envelope
from fedguild.wire.codec import Codec, decode, encode, expand, shrink

SILENCE_SECONDS = 30.0
"""After so long without an answer a client is asked whether it still has its task."""
KEEP_SECONDS = 7 * 86400.0
"""How long Flower keeps a task and its answer."""
NOT_CONNECTED = "it is not connected"
LATE_ROUNDS = 1
"""Answers to tasks of so many rounds back are still looked for."""


@dataclass(frozen=True)
class _Arrived:
    """An answer that is waiting for its turn: the upload on disk, or why there is none."""

    answer: Parcel
    upload: Path | None
    failure: str


class FlowerEngine:
    """Trains the clients of a round on their own machines.

    Args:
        post: The carrier.
        roster: Who is who.
        orders: What every task says beside its payload: the run's config.
        spool: Where uploads wait for their turn.
        codec: How payloads are written.
        limit_bytes: Largest encoded upload that is opened; None for no limit.
        poll_seconds: From one look for answers to the next.
        silence_seconds: After so long without an answer a client is asked whether it still has its task.
        reconnect_seconds: How long to wait for a client that is not connected; one that did not come back in that
            time is not waited for again until it has been seen.
    """

    def __init__(
        self,
        post: Post,
        roster: Roster,
        orders: Mapping[str, Any],
        spool: Path,
        *,
        codec: Codec = "fp32",
        limit_bytes: int | None = None,
        poll_seconds: float = POLL_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        reconnect_seconds: float = 0.0,
    ) -> None:
        self.post = post
        self.roster = roster
        self.orders = dict(orders)
        self.codec = codec
        self.limit_bytes = limit_bytes
        self.poll_seconds = poll_seconds
        self.silence_seconds = silence_seconds
        self.reconnect_seconds = reconnect_seconds
        self._spool = Spool(spool)
        self._waiting: dict[str, Task] = {}
        self._unsent: dict[int, tuple[Task, float]] = {}
        self._absent: set[int] = set()
        self._probes: dict[int, str] = {}
        self._arrived: dict[tuple[int, int], _Arrived] = {}
        self._succeeded: set[int] = set()
        self._late: list[tuple[Task, _Arrived]] = []

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Terms = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        """Yields a delivery for every task, in client order; before and after them what came late of earlier rounds."""
        if not tasks:
            return
        started, round = time.monotonic(), tasks[0].round
        self._collect(round)
        yield from self._late_deliveries(method, model, round)
        self._probes, self._succeeded, self._unsent = {}, set(), {}
        for task in tasks:
            self._send_out(task)
        due = None if terms.deadline_seconds is None else started + terms.deadline_seconds
        probed = started
        for task in tasks:
            while not self._settled(task, terms, due):
                self._collect(round)
                if time.monotonic() - probed > self.silence_seconds:
                    probed = time.monotonic()
                    self._probe(tasks)
                time.sleep(0.0 if self._settled(task, terms, due) else self.poll_seconds)
            yield self._delivery(method, model, task, terms)
        yield from self._late_deliveries(method, model, round)

    def close(self) -> None:
        """Has nothing to let go of: Flower ends its processes itself."""

    def ask(
        self, kind: Kind, round: int, body_of: Callable[[int], bytes], wait_seconds: float, facts: Mapping[str, Any]
    ) -> dict[int, Parcel]:
        """Asks every member something outside of training; returns client index -> answer.

        A client that is not there, or does not answer in time, has an answer with a failure.

        Args:
            kind: What is asked.
            round: The round that it is about.
            body_of: Client index -> what goes with the question; made when it is sent, and not kept.
            wait_seconds: How long to wait for the answers.
            facts: What the question says, beside the run's config.
        """
        answers: dict[int, Parcel] = {}
        tickets: dict[str, Parcel] = {}
        for client in sorted(self.roster.members):
            parcel = Parcel(kind, self.roster.run, round, client, facts={**self.orders, **facts})
            node = self.roster.node_of(client)
            if node is None:
                answers[client] = parcel.answer(failure=NOT_CONNECTED)
            else:
                whole = replace(parcel, body=body_of(client))
                tickets[self.post.send(node, whole, keep_seconds=KEEP_SECONDS)] = parcel
        due = time.monotonic() + wait_seconds
        while tickets and time.monotonic() < due:
            for ticket, parcel in list(tickets.items()):
                answer = self.post.collect(ticket)
                if answer is not None:
                    del tickets[ticket]
                    if isinstance(answer, Lost):
                        answer = parcel.answer(failure=answer.reason)
                    answers[parcel.client] = answer
            time.sleep(self.poll_seconds if tickets else 0)
        for parcel in tickets.values():
            answers[parcel.client] = parcel.answer(failure=f"did not answer within {wait_seconds:g} s")
        return dict(sorted(answers.items()))

    def _send_out(self, task: Task) -> None:
        """Sends a task, or notes why it cannot be sent; not where an earlier attempt was answered meanwhile."""
        key = (task.round, task.client.index)
        before = self._arrived.pop(key, None)
        if before is not None and not before.failure:
            self._take_in(task, before, task.round)
            return
        parcel = Parcel("train", self.roster.run, task.round, task.client.index, self.codec, facts=self.orders)
        node = self.roster.node_of(task.client.index)
        if node is None:
            self._put_off(task, parcel)
            return
        self._absent.discard(task.client.index)
        self._unsent.pop(task.client.index, None)
        parcel = Parcel(**{**vars(parcel), "body": encode(shrink(task.download, self.codec))})
        try:
            self._waiting[self.post.send(node, parcel, keep_seconds=KEEP_SECONDS)] = task
        except FedGuildError as error:
            self._arrived[key] = _Arrived(parcel.answer(), None, error.message)

    def _put_off(self, task: Task, parcel: Parcel) -> None:
        """Leaves a task unsent for a while; in the end its client is absent."""
        index, now = task.client.index, time.monotonic()
        _, due = self._unsent.setdefault(index, (task, now + self.reconnect_seconds))
        if now >= due or index in self._absent:
            del self._unsent[index]
            self._absent.add(index)
            self._arrived[(task.round, index)] = _Arrived(parcel, None, NOT_CONNECTED)

    def _collect(self, round: int) -> None:
        """Sends what could not be sent, and takes in the answers that are there."""
        for task, _ in list(self._unsent.values()):
            self._send_out(task)
        confessed = [client for client, ticket in self._probes.items() if self.post.collect(ticket) is not None]
        for ticket, task in list(self._waiting.items()):
            answer = self.post.collect(ticket)
            if answer is not None:
                del self._waiting[ticket]
                self._take_in(task, self._opened(task, answer), round)
            elif task.round < round - LATE_ROUNDS:
                del self._waiting[ticket]
            elif task.round == round and task.client.index in confessed:
                del self._waiting[ticket]
                lost = Parcel("train", self.roster.run, task.round, task.client.index)
                self._take_in(task, _Arrived(lost, None, "it lost its task: it was restarted while it worked"), round)
        for client in confessed:
            del self._probes[client]

    def _take_in(self, task: Task, arrived: _Arrived, round: int) -> None:
        key = (task.round, task.client.index)
        if task.round == round:
            before = self._arrived.get(key)
            if before is None or before.failure:
                self._arrived[key] = arrived
            if not arrived.failure:
                self._succeeded.add(task.client.index)
        elif arrived.upload is not None:
            self._late.append((task, arrived))

    def _opened(self, task: Task, answer: Parcel | Lost) -> _Arrived:
        """Returns an answer as it waits for its turn; an upload goes to disk without being decoded."""
        if isinstance(answer, Lost):
            return _Arrived(Parcel("train", self.roster.run, task.round, task.client.index), None, answer.reason)
        header = Parcel(**{**vars(answer), "body": b""})
        if answer.failure:
            return _Arrived(header, None, answer.failure)
        envelope = Envelope(answer.run, answer.round, answer.client, len(answer.body))
        try:
            check_envelope(
                envelope,
                run=self.roster.run,
                asked=[(task.round, task.client.index)],
                limit_bytes=self.limit_bytes,
            )
        except UploadError as error:
            return _Arrived(header, None, error.message)
        return _Arrived(header, self._spool.put(task.round, task.client.index, answer.body), "")

    def _settled(self, task: Task, terms: Terms, due: float | None) -> bool:
        """Whether nothing more is to be waited for before a task's delivery."""
        if (task.round, task.client.index) in self._arrived:
            return True
        if terms.enough is not None and len(self._succeeded) >= terms.enough:
            return True
        return due is not None and time.monotonic() >= due

    def _probe(self, tasks: Sequence[Task]) -> None:
        """Asks the silent clients who they are: who answers that first no longer has its task."""
        open_clients = {task.client.index for task in self._waiting.values()}
        for task in tasks:
            client = task.client.index
            if client not in open_clients or client in self._probes:
                continue
            node = self.roster.node_of(client)
            if node is not None:
                parcel = Parcel("hello", self.roster.run, task.round, client, facts=self.orders)
                self._probes[client] = self.post.send(node, parcel, keep_seconds=KEEP_SECONDS)

    def _delivery(self, method: Method, model: ModelInfo, task: Task, terms: Terms) -> Delivery:
        plan = method.plan(model, task.client.budget)
        arrived = self._arrived.pop((task.round, task.client.index), None)
        if arrived is not None:
            return self._read(method, model, task, arrived)
        if terms.enough is not None and len(self._succeeded) >= terms.enough:
            return not_needed(task, plan, len(self._succeeded))
        return too_late(task, plan, terms.deadline_seconds or 0.0)

    def _late_deliveries(self, method: Method, model: ModelInfo, round: int) -> Iterator[Delivery]:
        late, self._late = self._late, []
        for task, arrived in late:
            yield self._read(method, model, task, arrived)
        self._arrived = {key: arrived for key, arrived in self._arrived.items() if key[0] == round}

    def _read(self, method: Method, model: ModelInfo, task: Task, arrived: _Arrived) -> Delivery:
        """Returns the delivery of an answer; its upload is decoded here."""
        plan = method.plan(model, task.client.budget)
        if arrived.upload is None:
            return Delivery(task, None, plan, failure=arrived.failure)
        try:
            upload = expand(decode(self._spool.take(arrived.upload), task.client.name))
            report, frequency, peak = read_facts(arrived.answer.facts)
        except UploadError as error:
            return Delivery(task, None, plan, failure=error.message)
        return Delivery(task, upload, plan, report, frequency, peak)


def training_facts(delivery: Delivery) -> dict[str, Any]:
    """Returns what a client says of its training, beside the upload, as JSON values."""
    report = delivery.report
    return {
        "steps": report.steps,
        "tokens": report.tokens,
        "examples": report.examples,
        "loss": report.loss,
        "seconds": report.seconds,
        "frequency": None if delivery.frequency is None else delivery.frequency.tolist(),
        "peak_memory_bytes": delivery.peak_memory_bytes,
    }


def read_facts(facts: Mapping[str, Any]) -> tuple[LocalReport, torch.Tensor | None, int | None]:
    """Returns the report, the activation frequency [L, M] and the peak memory that `training_facts` wrote.

    Raises:
        UploadError: they are not of that form; they come from a peer.
    """
    try:
        counts = {name: int(facts[name]) for name in ("steps", "tokens", "examples")}
        report = LocalReport(**counts, loss=float(facts["loss"]), seconds=float(facts["seconds"]))
        frequency = None if facts["frequency"] is None else torch.tensor(facts["frequency"], dtype=torch.float32)
        peak = None if facts["peak_memory_bytes"] is None else int(facts["peak_memory_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise UploadError(f"An answer lacks a readable report of its training ({error}).") from error
    return report, frequency, peak


def read_upload(body: bytes, source: str) -> Payload:
    """Returns the payload of a parcel's body, its codec undone.

    Raises:
        UploadError: the bytes are no payload.
    """
    return expand(decode(body, source))
