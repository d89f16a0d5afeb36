"""The `flower` engine: sends a round's tasks as messages and turns the replies into deliveries.

A reply is matched to its task by the message id and must name the same run, round and client. Uploads are written to
disk as they arrive and decoded in client order. A client that answers a later request but not its task has lost the
task because its machine was restarted; it is not waited for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedguild.core.codec import Codec, decode, encode, expand, shrink
from fedguild.core.errors import FedGuildError, QuorumError, UploadError
from fedguild.core.layout import client_name
from fedguild.core.payload import Payload
from fedguild.core.text import printable
from fedguild.federation.flower.client_registry import HELLO_BYTES, POLL_SECONDS, ClientRegistry
from fedguild.federation.flower.lateness import Lateness
from fedguild.federation.flower.message import Message
from fedguild.federation.flower.replies import Abandoned, UploadStore, training_report
from fedguild.federation.flower.transport import NoReply, Transport
from fedguild.federation.schema import HEADER_BYTES, REFUSED, MessageKind
from fedguild.measuring.log.activity import NOT_CONNECTED
from fedguild.model.info import ModelInfo
from fedguild.privacy.secure_sum.session import STEPS, Session, Step
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Task, Wait, not_needed, too_late
from fedguild.server.guard import KEY_REVOKED
from fedguild.server.method import Method
from fedguild.server.schema import Schema
from fedguild.server.validation import (
    SPARE_BYTES,
    Envelope,
    check_envelope,
    check_plausible_size,
    check_size,
    unusable,
)

if TYPE_CHECKING:
    from fedguild.privacy.secure_sum.keys import PublicKey

SILENCE_SECONDS = 30.0
"""A client that has not replied for this long is asked whether it still has its task."""
TTL_SECONDS = 7 * 86400.0
"""Lifetime of a task and its reply in Flower."""
LOST_ITS_TASK = "it lost its task: it was restarted during the training"
LARGEST_ANSWER: Mapping[MessageKind, int] = {
    "hello": HELLO_BYTES,
    "score": HEADER_BYTES,
    "deliver": HELLO_BYTES,
}
"""Largest answer in bytes of the kinds that carry no payload; that of a training depends on the method's upload."""
_NAME_BYTES, _WIDEST_DTYPE_BYTES = 2048, 8
_SHARES_BYTES = 2**16
"""Room for what a client sends to each of the others in a step of a secure aggregation, about 500 bytes."""
_MOST_IN_STEP = 4096
"""Most tensors of an answer to a step of a secure aggregation: a dozen arrays, and what its method discloses."""
LATE_ROUNDS = 1
"""Replies to tasks of this many rounds back are still accepted."""


@dataclass(frozen=True)
class _Reply:
    """The outcome of a task: an upload on disk with its metadata, or the reason for its absence.

    Attributes:
        held_up: Whether the others had to wait for it.
    """

    upload: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    held_up: bool = False


@dataclass
class _Attempts:
    """What the attempts of one round have brought.

    Attributes:
        asked: How many clients the first one asked.
        delivered: Those that have delivered.
        enough_seconds: The time until enough had delivered; None as long as they have not.
    """

    round: int = -1
    asked: int = 0
    delivered: set[int] = field(default_factory=set)
    enough_seconds: float | None = None


@dataclass(frozen=True)
class Patience:
    """How long a round waits for its slowest clients, so that a silent client does not block it.

    Attributes:
        quorum: The fewest deliveries that a round needs.
        factor: The others have this many times as long as the first ones took,
        least_seconds: and at least this long.
    """

    quorum: int
    factor: float
    least_seconds: float

    def enough(self, asked: int) -> int:
        """Returns how many deliveries start the wait for the others: a quorum, and more than half of the clients asked.

        More than half include an honest client, unless most clients are hostile: a client that answers at once cannot
        exclude those that train.
        """
        return max(self.quorum, asked // 2 + 1)

    def wait_seconds(self, took_seconds: float) -> float:
        """Returns how long the others have, if enough have taken so long to deliver."""
        return max(self.least_seconds, self.factor * took_seconds)


class FlowerEngine:
    """Trains the clients of a round on their own machines.

    Args:
        run_metadata: Metadata that accompanies the payload of every request: the run's config.
        uploads: Folder for uploads until they are aggregated.
        limit_bytes: Largest encoded upload that is decoded; None for no limit.
        poll_seconds: Interval between two polls for replies.
        silence_seconds: A client that has not replied for this long is asked whether it still has its task.
        reconnect_seconds: How long to wait for a client that is not connected; one that did not reconnect in that time
            is not waited for again until it has been seen.
        patience: How long to wait for the slowest clients, once none is waited for to reconnect; None to wait until the
            round's deadline.
        secure: Whether the clients keep their uploads and go through a secure aggregation (`exchange`).
        step_seconds: How long a step of a secure aggregation waits for the clients.
        keys: Folder of the clients' public keys, `client-000.pub` and so on; None if the server has none.
    """

    def __init__(
        self,
        transport: Transport,
        registry: ClientRegistry,
        run_metadata: Mapping[str, Any],
        uploads: Path,
        *,
        codec: Codec = "fp32",
        limit_bytes: int | None = None,
        poll_seconds: float = POLL_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        reconnect_seconds: float = 0.0,
        patience: Patience | None = None,
        secure: bool = False,
        step_seconds: float = 600.0,
        keys: Path | None = None,
    ) -> None:
        self.patience = patience
        self.secure, self.step_seconds, self.keys = secure, step_seconds, keys
        self.transport = transport
        self.registry = registry
        self.run_metadata = dict(run_metadata)
        self.codec = codec
        self.limit_bytes = limit_bytes
        self.poll_seconds = poll_seconds
        self.silence_seconds = silence_seconds
        self.reconnect_seconds = reconnect_seconds
        self._uploads = UploadStore(uploads)
        self._pending: dict[str, Task] = {}
        self._unsent: dict[int, tuple[Task, float]] = {}
        self._absent: set[int] = set()
        self._probes: dict[int, str] = {}
        self._abandoned = Abandoned(transport)
        self._replies: dict[tuple[int, int], _Reply] = {}
        self._succeeded: set[int] = set()
        self._yielded: set[int] = set()
        self._refusals: dict[int, str] = {}
        self._attempts = _Attempts()
        self._late_in_training, self._late_in_steps, self._late_with_scores = Lateness(), Lateness(), Lateness()
        self._not_waited_for: dict[int, str] = {}
        self._owing: set[int] = set()
        self._late: list[tuple[Task, _Reply]] = []
        self._schema_of: Callable[[Task], Schema] | None = None
        self._limits: dict[str, int] = {}
        self._secure_limits: dict[int, int] = {}

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        """Yields a delivery for every task, in client order; late deliveries of earlier rounds before and after.

        Raises:
            QuorumError: so many clients refuse that the round cannot have the uploads that it needs.
        """
        if not tasks:
            return
        started, round = time.monotonic(), tasks[0].round
        self._schema_of = lambda task: method.schema(model, task.client, task.download, task.round)
        self._receive(round)
        yield from self._late_deliveries(method, model, round)
        for probe in self._probes.values():
            self._abandoned.add(probe)
        self._probes, self._unsent, self._refusals = {}, {}, {}
        self._succeeded, self._yielded = set(), set()
        if self.secure:
            self._allow_secure_answers(tasks)
        self._begin_attempt(tasks, terms)
        for task in tasks:
            self._send(task)
        self._require_willing(tasks, terms)
        deadline = None if terms.deadline_seconds is None else started + terms.deadline_seconds
        patience, probed = self.patience, started
        for task in tasks:
            while not self._is_settled(task, tasks, terms, deadline):
                self.registry.between_polls()
                self._receive(round)
                self._require_willing(tasks, terms)
                took = self._enough_seconds(terms, started)
                if patience is not None and took is not None and not self._unsent:
                    ends, patience = time.monotonic() + patience.wait_seconds(took), None
                    deadline = ends if deadline is None else min(deadline, ends)
                if time.monotonic() - probed > self.silence_seconds:
                    probed = time.monotonic()
                    self._probe_silent_clients(tasks)
                time.sleep(0.0 if self._is_settled(task, tasks, terms, deadline) else self.poll_seconds)
            yield self._delivery(method, model, task, terms, time.monotonic() - started)
        yield from self._late_deliveries(method, model, round)

    def _begin_attempt(self, tasks: Sequence[Task], terms: Wait) -> None:
        """Decides who is waited for: not those who hold up the others again and again, if enough are left."""
        if self._attempts.round != tasks[0].round:
            self._attempts = _Attempts(tasks[0].round, len(tasks))
            self._late_in_training.next_turn()
            self._late_in_steps.next_turn()
        late: dict[int, str] = {}
        for each in (self._late_in_training, self._late_in_steps):
            late |= {i: each.reason(i) for task in tasks if not each.is_waited_for(i := task.client.index)}
        others = {task.client.index for task in tasks} - late.keys()
        enough = len(others) >= terms.needed and len(self._attempts.delivered | others) > self._attempts.asked // 2
        self._not_waited_for = late if enough else {}

    def _enough_seconds(self, terms: Wait, started: float) -> float | None:
        """Returns how long it took until enough clients of a round had delivered; None if they have not."""
        attempts, now = self._attempts, time.monotonic()
        if attempts.enough_seconds is None and len(self._succeeded) >= terms.needed:
            least = 0 if self.patience is None else self.patience.enough(attempts.asked)
            if len(attempts.delivered) >= max(least, attempts.asked // 2 + 1):
                attempts.enough_seconds = now - started
        return attempts.enough_seconds

    def expect_absent(self, clients: Collection[int]) -> None:
        """Does not wait for these clients, which were waited for already, until they have been seen."""
        self._absent.update(clients)

    def close(self) -> None:
        """Does nothing: Flower ends its processes itself."""

    def ask(
        self,
        kind: MessageKind,
        round: int,
        body_of: Callable[[int], bytes],
        wait_seconds: float,
        metadata: Mapping[str, Any],
    ) -> dict[int, Message]:
        """Sends every registered client a request outside of training; returns client index -> reply.

        A client that is not connected, or does not reply in time, gets a reply with a failure. Once most clients have
        replied, the others are waited for as in training (`patience`), and those who are late again and again are not
        asked for scores in some rounds.

        Args:
            body_of: Client index -> the request's body; called when it is sent, and not kept.
            wait_seconds: How long to wait for the replies.
            metadata: The request's metadata, in addition to the run's config.
        """
        clients, lateness = list(self.registry.clients), self._late_with_scores if kind == "score" else Lateness()
        lateness.next_turn()
        late = [client for client in clients if not lateness.is_waited_for(client)]
        asked, replies = set(clients), dict[int, Message]()
        if self.patience is not None and len(clients) - len(late) >= self.patience.enough(len(clients)):
            asked -= set(late)
            request = Message(kind, self.registry.run, round)
            replies = {
                client: replace(request, client=client).reply(failure=lateness.reason(client)) for client in late
            }
        replies |= self._ask(asked, kind, round, body_of, wait_seconds, metadata, self.patience, lateness)
        for client in asked:
            if not replies[client].failure:
                lateness.note(client, late=False)
        return dict(sorted(replies.items()))

    @property
    def registered(self) -> Mapping[int, PublicKey]:
        """The current public keys of the clients whose keys the server has."""
        from fedguild.privacy.secure_sum.keys import load_known

        return {} if self.keys is None else load_known(self.keys)

    def exchange(self, session: Session, step: Step, requests: Mapping[int, Payload]) -> dict[int, Payload | str]:
        """Returns client -> its answer to a step of a secure aggregation, or why there is none."""
        replies = self._ask(
            requests,
            "secure",
            session.round,
            lambda client: encode(requests[client]),
            self.step_seconds,
            {"session": asdict(session), "step": step},
            lateness=self._late_in_steps,
        )
        answers: dict[int, Payload | str] = {}
        for client, reply in replies.items():
            if step == STEPS[-1] and not reply.failure:
                self._late_in_steps.note(client, late=False)
            try:
                if not reply.failure:
                    check_size(len(reply.body), self.limit_bytes)
                answers[client] = reply.failure or decode(reply.body, "its answer", _MOST_IN_STEP)
            except UploadError as error:
                answers[client] = error.message
            except Exception as error:
                answers[client] = unusable(error)
        return answers

    def _ask(
        self,
        clients: Iterable[int],
        kind: MessageKind,
        round: int,
        body_of: Callable[[int], bytes],
        wait_seconds: float,
        metadata: Mapping[str, Any],
        patience: Patience | None = None,
        lateness: Lateness | None = None,
    ) -> dict[int, Message]:
        """Sends some clients a request.

        Args:
            patience: How long to wait for the slowest; the arguments before it are those of `ask`.
            lateness: Receives those who did not answer in time.
        """
        replies: dict[int, Message] = {}
        pending: dict[str, Message] = {}
        for client in sorted(clients):
            request = Message(kind, self.registry.run, round, client, metadata={**self.run_metadata, **metadata})
            node = self.registry.node_of(client)
            if node is None:
                replies[client] = request.reply(failure=NOT_CONNECTED)
            else:
                whole = replace(request, body=body_of(client))
                try:
                    pending[self.transport.send(node, whole, ttl_seconds=TTL_SECONDS)] = request
                except FedGuildError as error:
                    replies[client] = request.reply(failure=error.message)
        started, asked, answered = time.monotonic(), len(pending), 0
        deadline, late = started + wait_seconds, f"did not answer within {wait_seconds:g} s"
        while pending and time.monotonic() < deadline:
            self.registry.between_polls()
            self._abandoned.sweep(time.monotonic())
            for message_id, request in list(pending.items()):
                reply = self.transport.poll(message_id, self._largest_answer(kind, round))
                if reply is not None:
                    del pending[message_id]
                    replies[request.client] = _answer_to(request, reply)
                    if (failure := replies[request.client].failure).startswith(REFUSED):
                        self._tell(round, request.client, failure)
                    answered += not replies[request.client].failure
            if patience is not None and answered >= patience.enough(asked):
                now = time.monotonic()
                ends, patience = now + patience.wait_seconds(now - started), None
                if ends < deadline:
                    deadline = ends
                    late = f"did not answer within {deadline - started:.0f} s, when most others had"
            time.sleep(self.poll_seconds if pending else 0)
        for message_id, request in pending.items():
            self._abandoned.add(message_id)
            replies[request.client] = request.reply(failure=late)
            if lateness is not None:
                lateness.note(request.client, late=True)
        for client, reply in replies.items():  # also of one that answered before it was revoked
            if not reply.failure and self.registry.is_revoked(client):
                replies[client] = reply.reply(failure=KEY_REVOKED)
        return dict(sorted(replies.items()))

    def _send(self, task: Task) -> None:
        """Sends a task, or records why it cannot be sent; skips it if an earlier attempt has succeeded meanwhile.

        A client that is not waited for is sent nothing while it owes an answer, so what waits for it in Flower's
        database does not grow.
        """
        index = task.client.index
        earlier = self._replies.pop((task.round, index), None)
        if earlier is not None and not earlier.failure:
            self._record(task, earlier, task.round)
            return
        late = self._not_waited_for.get(index)
        if late is not None and (index in self._owing or not self._late_in_steps.is_waited_for(index)):
            self._replies[(task.round, index)] = _Reply(failure=late)
            return
        node = self.registry.node_of(index)
        if node is None:
            self._postpone(task)
            return
        self._absent.discard(index)
        self._unsent.pop(index, None)
        body = encode(shrink(task.download, self.codec))
        request = Message("train", self.registry.run, task.round, index, self.codec, "", self.run_metadata, body)
        try:
            message_id = self.transport.send(node, request, ttl_seconds=TTL_SECONDS)
        except FedGuildError as error:
            self._replies[(task.round, index)] = _Reply(failure=error.message)
            return
        self._pending[message_id] = task
        self._limits[message_id] = self._largest_upload(task)

    def _largest_upload(self, task: Task) -> int:
        """Returns the bytes that no honest answer to a task exceeds; in a secure run it has a header only."""
        if self.secure or self._schema_of is None:
            return HEADER_BYTES
        upload_bytes = SPARE_BYTES + _widest_bytes(self._schema_of(task).shapes)
        return HEADER_BYTES + (upload_bytes if self.limit_bytes is None else min(upload_bytes, self.limit_bytes))

    def _most_tensors(self, task: Task) -> int | None:
        """Returns how many tensors no honest upload exceeds, in any codec."""
        return None if self._schema_of is None else 2 * len(self._schema_of(task).tensors)

    def _largest_answer(self, kind: MessageKind, round: int) -> int:
        """Returns the bytes that no honest answer of a kind exceeds."""
        if kind == "secure":
            shares = (
                SPARE_BYTES + _SHARES_BYTES * self.registry.client_count
            )  # of a sum of scores before the first round
            return HEADER_BYTES + self._secure_limits.get(round, shares)
        return LARGEST_ANSWER.get(kind, HEADER_BYTES)

    def _allow_secure_answers(self, tasks: Sequence[Task]) -> None:
        """Sets the limit of an answer to a step of a secure aggregation: twice all that a round's clients hold.

        A client may have to send masked zeros for what only others hold.
        """
        round, widest = tasks[0].round, dict[str, tuple[int, ...]]()
        if self._schema_of is not None:
            for task in tasks:
                for name, shape in self._schema_of(task).shapes.items():
                    if math.prod(shape) >= math.prod(widest.get(name, (0,))):
                        widest[name] = shape
        limit = SPARE_BYTES + 2 * _widest_bytes(widest) + _SHARES_BYTES * self.registry.client_count
        self._secure_limits = {round: max(limit, self._secure_limits.get(round, 0))}

    def _postpone(self, task: Task) -> None:
        """Leaves a task unsent until `reconnect_seconds` have passed; then its client counts as absent.

        One that was turned away is not waited for.
        """
        index, now = task.client.index, time.monotonic()
        if reason := self.registry.refusal_of(index):
            self._unsent.pop(index, None)
            self._replies[(task.round, index)], self._refusals[index] = _Reply(failure=reason), reason
            return
        _, deadline = self._unsent.setdefault(index, (task, now + self.reconnect_seconds))
        if now >= deadline or index in self._absent or index in self._not_waited_for:
            del self._unsent[index]
            self._absent.add(index)
            held_up = self._attempts.enough_seconds is not None
            self._replies[(task.round, index)] = _Reply(failure=NOT_CONNECTED, held_up=held_up)

    def _receive(self, round: int) -> None:
        """Sends postponed tasks and records the replies that have arrived."""
        for task, _ in list(self._unsent.values()):
            self._send(task)
        restarted = [
            client for client, probe in self._probes.items() if self.transport.poll(probe, HELLO_BYTES) is not None
        ]
        for message_id, task in list(self._pending.items()):
            reply = self.transport.poll(message_id, self._limits.get(message_id))
            if reply is not None:
                del self._pending[message_id]
                self._owing.discard(task.client.index)
                self._record(task, self._store(task, reply), round)
            elif task.round < round - LATE_ROUNDS:
                self._give_up(message_id)
            elif task.round == round and task.client.index in restarted:
                self._give_up(message_id)
                self._owing.add(task.client.index)
                self._record(task, _Reply(failure=LOST_ITS_TASK), round)
        for client in restarted:
            del self._probes[client]
        self._limits = {message_id: limit for message_id, limit in self._limits.items() if message_id in self._pending}
        self._abandoned.sweep(time.monotonic())

    def _give_up(self, message_id: str) -> None:
        """Stops waiting for a task's answer; one that arrives anyway is deleted."""
        del self._pending[message_id]
        self._abandoned.add(message_id)

    def _record(self, task: Task, reply: _Reply, round: int) -> None:
        """Keeps a reply for its delivery. For a late reply of an earlier round, only the upload counts."""
        key = (task.round, task.client.index)
        if task.round == round:
            earlier = self._replies.get(key)
            if earlier is None or earlier.failure:
                self._replies[key] = replace(reply, held_up=self._attempts.enough_seconds is not None)
            elif reply.upload is not None:
                reply.upload.unlink()
            if not reply.failure:
                self._succeeded.add(task.client.index)
                self._attempts.delivered.add(task.client.index)
            elif reply.failure.startswith(REFUSED):
                self._refusals[task.client.index] = printable(reply.failure)
                self._tell(round, task.client.index, reply.failure)
        elif reply.upload is not None:
            self._late.append((task, reply))

    def _tell(self, round: int, client: int, refusal: str) -> None:
        """Tells the operator of a refusal as it arrives, while the other clients still work."""
        self.registry.echo(printable(f"Round {round}: client {client}: {refusal}"))

    def _require_willing(self, tasks: Sequence[Task], terms: Wait) -> None:
        """Raises QuorumError if so many of the clients that were asked refuse that too few uploads are left."""
        left = len(tasks) - len(self._refusals)
        if left >= terms.needed:
            return
        listed = "".join(f"\n  {client_name(client)}: {why}" for client, why in sorted(self._refusals.items()))
        refused = f"{len(self._refusals)} of {len(tasks)} clients refuse"
        raise QuorumError(
            f"{refused}, and the round needs {terms.needed} uploads.{listed}",
            "Their operators can change that (`accept` in site.yaml), or you the run; the last complete round is "
            "untouched.",
        )

    def _store(self, task: Task, reply: Message | NoReply) -> _Reply:
        """Writes a reply's upload to disk, without decoding it, if its envelope matches the task."""
        if isinstance(reply, NoReply):
            return _Reply(failure=reply.reason)
        if reply.failure:
            return _Reply(failure=reply.failure)
        if self.registry.is_revoked(task.client.index):
            return _Reply(failure=KEY_REVOKED)
        if reply.kind != "train":
            return _Reply(failure=f"it answered a request to train with an answer to '{reply.kind}'")
        envelope = Envelope(reply.run, reply.round, reply.client, len(reply.body))
        try:
            check_envelope(
                envelope,
                run=self.registry.run,
                asked=[(task.round, task.client.index)],
                limit_bytes=self.limit_bytes,
            )
            if self._schema_of is not None:
                check_plausible_size(len(reply.body), self._schema_of(task))
        except UploadError as error:
            return _Reply(failure=error.message)
        return _Reply(self._uploads.put(task.round, task.client.index, reply.body), reply.metadata)

    def _is_settled(self, task: Task, tasks: Sequence[Task], terms: Wait, deadline: float | None) -> bool:
        """Whether a task's delivery can be yielded without waiting any longer."""
        if (task.round, task.client.index) in self._replies:
            return True
        if terms.enough is not None and len(self._succeeded) >= terms.enough:
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return True
        late = self._not_waited_for
        others = (each.client.index for each in tasks if each.client.index not in late)
        return task.client.index in late and all(
            other in self._yielded or (task.round, other) in self._replies for other in others
        )

    def _probe_silent_clients(self, tasks: Sequence[Task]) -> None:
        """Sends a `hello` to the clients that owe a reply: one that answers it first no longer has its task."""
        owing = {task.client.index for task in self._pending.values()}
        for task in tasks:
            client = task.client.index
            if client not in owing or client in self._probes:
                continue
            node = self.registry.node_of(client)
            if node is not None:
                request = Message("hello", self.registry.run, task.round, client, metadata=self.run_metadata)
                with suppress(FedGuildError):  # it has gone; whether it comes back is asked at the next probe
                    self._probes[client] = self.transport.send(node, request, ttl_seconds=TTL_SECONDS)

    def _delivery(self, method: Method, model: ModelInfo, task: Task, terms: Wait, waited_seconds: float) -> Delivery:
        index = task.client.index
        self._yielded.add(index)
        reply = self._replies.pop((task.round, index), None)
        if reply is not None:
            if reply.upload is not None or (reply.held_up and index not in self._not_waited_for):
                self._late_in_training.note(index, late=reply.upload is None)
            return self._decoded(method, model, task, reply)
        plan = method.plan(model, task.client.budget)
        if terms.enough is not None and len(self._succeeded) >= terms.enough:
            return not_needed(task, plan, len(self._succeeded))
        self._owing.add(index)
        if index in self._not_waited_for:
            return Delivery(task, None, plan, failure=self._not_waited_for[index])
        self._late_in_training.note(index, late=True)
        in_time = terms.deadline_seconds is None or waited_seconds < terms.deadline_seconds
        return too_late(task, plan, round(waited_seconds) if in_time else terms.deadline_seconds or 0.0)

    def _late_deliveries(self, method: Method, model: ModelInfo, round: int) -> Iterator[Delivery]:
        late, self._late = self._late, []
        for task, reply in late:
            yield self._decoded(method, model, task, reply)
        self._replies = {key: reply for key, reply in self._replies.items() if key[0] == round}

    def _decoded(self, method: Method, model: ModelInfo, task: Task, reply: _Reply) -> Delivery:
        plan = method.plan(model, task.client.budget)
        if reply.upload is None:
            return Delivery(task, None, plan, failure=reply.failure)
        body = self._uploads.take(reply.upload)
        if self.registry.is_revoked(task.client.index):
            return Delivery(task, None, plan, failure=KEY_REVOKED)
        if self.secure:
            in_the_clear = "it sent an upload in the clear" if body else ""
            return Delivery(task, None if body else Payload(), plan, failure=in_the_clear, kept=not body)
        try:
            report = training_report(reply.metadata, model)
            upload = read_payload(body, "its upload", self._most_tensors(task))
        except UploadError as error:
            return Delivery(task, None, plan, failure=error.message)
        except Exception as error:
            return Delivery(task, None, plan, failure=unusable(error))
        return Delivery(task, upload, plan, report.training, report.frequency, report.peak_memory_bytes)


def _widest_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the bytes of tensors of these shapes in the widest dtype, names and headers included."""
    return sum(_NAME_BYTES + _WIDEST_DTYPE_BYTES * math.prod(shape) for shape in shapes.values())


def _answer_to(request: Message, reply: Message | NoReply) -> Message:
    """Returns the answer to a request; one with a failure if there is none, or if it answers another request."""
    if isinstance(reply, NoReply):
        return request.reply(failure=reply.reason)
    if reply.failure:
        return request.reply(failure=reply.failure)
    for part in ("kind", "run", "round", "client"):
        if (found := getattr(reply, part)) != (wanted := getattr(request, part)):
            return request.reply(failure=f"its answer is for {part} {found}, but {wanted} was asked")
    return reply


def read_payload(body: bytes, source: str, most: int | None = None) -> Payload:
    """Returns the payload of a message's body, expanded from its codec; the arguments are those of `decode`.

    Raises:
        UploadError: the bytes are not a payload.
    """
    return expand(decode(body, source, most))
