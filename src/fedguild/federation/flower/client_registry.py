"""The mapping from clients to nodes: every new node is asked once which client it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedguild.core.errors import FedGuildError, QuorumError, UploadError
from fedguild.core.layout import client_name
from fedguild.core.text import few, printable
from fedguild.federation.flower.ipc import will_pass
from fedguild.federation.flower.message import Message
from fedguild.federation.flower.transport import NoReply, Transport
from fedguild.federation.schema import HelloAnswer, read_metadata
from fedguild.server.validation import unusable

HELLO_SECONDS = 600.0
"""Time limit for a node to identify itself: its trainer may have to load the model first."""
LONGEST_PAUSE_SECONDS = 600.0
"""A node that does not identify itself is asked again after a second, then twice as long each time, up to this."""
REFUSED_SECONDS = 30.0
"""A node that was turned away for what its site can mend is asked again after that, then twice as long each time."""
MOST_REASONS = 50
"""A client that is turned away for more different reasons than this is not asked again by this run's process."""
HELLO_BYTES = 2**20
"""Largest description of itself that a node may send; an honest one has about 300 bytes."""
POLL_SECONDS = 0.2
STATUS_SECONDS = 15.0
GRACE_SECONDS = 60.0
"""Time for which a run waits for clients that its quorum does not need."""


@dataclass(frozen=True)
class RegisteredClient:
    """A client that has identified itself.

    Attributes:
        node: The transport's number for its machine.
        description: The rest of its answer: examples, budget, versions.
    """

    node: int
    client: int
    description: Mapping[str, Any]


@dataclass
class ClientRegistry:
    """The clients of a federation that are known so far.

    Attributes:
        transport: Reaches the nodes.
        run: Identity of the run.
        client_count: How many clients the federation has.
        run_metadata: Metadata of the run, sent to every node that is asked to identify itself.
        check: Returns why a client cannot take part, from its index and description; empty if it can.
        echo: Prints a line for the operator of the server.
        poll_seconds: Interval between two polls for replies.
        revoked: Returns the names of the clients whose keys were revoked.
        between_polls: Called whenever the server waits; may raise to end the wait.
        refusal: Called with the node, name and reason of everyone who is turned away.
        acceptance: Called with the node and name of everyone who was turned away and whose client takes part after all.
        clients: Client index -> the client.
        refused: Node -> the name of the client that it claims to be, and why it was turned away.
        for_good: Those nodes of `refused` that are not asked again, since nothing that their operator does helps.
    """

    transport: Transport
    run: str
    client_count: int
    run_metadata: Mapping[str, Any]
    check: Callable[[int, Mapping[str, Any]], str] = lambda client, description: ""
    echo: Callable[[str], None] = lambda line: None
    poll_seconds: float = POLL_SECONDS
    revoked: Callable[[], Collection[str]] = frozenset
    between_polls: Callable[[], None] = lambda: None
    refusal: Callable[[int, str, str], None] = lambda node, name, reason: None
    acceptance: Callable[[int, str], None] = lambda node, name: None
    clients: dict[int, RegisteredClient] = field(default_factory=dict)
    refused: dict[int, tuple[str, str]] = field(default_factory=dict)
    for_good: set[int] = field(default_factory=set)
    _asked: dict[int, tuple[str, str]] = field(default_factory=dict)
    _reasons: Counter[str] = field(default_factory=Counter)
    """Name of a client -> for how many different reasons it was turned away, under whatever key."""
    _returned: dict[int, str] = field(default_factory=dict)
    """Node that was turned away -> the name of its client, which has registered since, also with another key."""
    _failed: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Node -> how often it did not identify itself or was turned away, and when it is asked again."""

    def wait_for_clients(
        self, wait_seconds: float, enough: int | None = None, grace_seconds: float = GRACE_SECONDS
    ) -> dict[int, RegisteredClient]:
        """Waits until every client has registered; returns client index -> client.

        Args:
            enough: This many clients are enough once `grace_seconds` have passed; None for all.
            grace_seconds: Time to wait for the other clients if enough have registered.

        Raises:
            QuorumError: clients are missing after `wait_seconds`, or so many were turned away that too few can come;
                the message has the reasons.
        """
        started = last_status = time.monotonic()
        self.echo(f"Waiting for {self.client_count} client(s), at most {wait_seconds:g} s.")
        while True:
            self.between_polls()
            self.refresh()
            missing = [index for index in range(self.client_count) if index not in self.clients]
            if not missing:
                return dict(self.clients)
            expected = [index for index in missing if not self.refusal_of(index)]
            if self.client_count - len(missing) + len(expected) < (self.client_count if enough is None else enough):
                raise self._too_few(missing, enough)
            now = time.monotonic()
            graceful = now - started <= min(grace_seconds, wait_seconds) and expected
            if enough is not None and len(self.clients) >= enough and not graceful:
                self.echo(f"Continuing without {_names(missing)} for now.")
                return dict(self.clients)
            if now - started > wait_seconds:
                raise self._incomplete(missing, wait_seconds)
            if now - last_status > STATUS_SECONDS:
                last_status = now
                self.echo(f"Still waiting for {_names(expected)}; {len(self._asked)} node(s) have not answered yet.")
            time.sleep(self.poll_seconds)

    def turn_away(self, client: int, reason: str) -> None:
        """Turns away a client that has registered, and its node with it."""
        registered = self.clients.pop(client)
        self._returned = {node: name for node, name in self._returned.items() if name != client_name(client)}
        self._refuse(registered.node, client_name(client), reason)

    def note_accepted(self) -> None:
        """Reports the nodes that were turned away and whose clients take part after all, once these are admitted."""
        for node, name in self._returned.items():
            self.acceptance(node, name)
        self._returned.clear()

    def _refuse(self, node: int, name: str, reason: str) -> None:
        """Turns a node away, for now or permanently; a repeated reason for the same node is not reported again."""
        before, self.refused[node] = self.refused.get(node), (name, printable(reason))
        self._pause(node, REFUSED_SECONDS)
        if self.refused[node] != before:
            self._reasons[name] += 1
            if self._reasons[name] > MOST_REASONS:
                self.for_good.add(node)
                reason = f"it was turned away for {MOST_REASONS} different reasons; this run asks it no more"
                self.refused[node] = (name, reason)
                if self._reasons[name] > MOST_REASONS + 1:
                    return
            self.refusal(node, name, printable(reason))
            self.echo(printable(f"{name} cannot take part: {reason}"))

    def refresh(self) -> None:
        """Asks new nodes to identify themselves, and registers those whose replies have arrived.

        A node that was turned away is asked again after a growing pause, so a site whose settings were corrected takes
        part from the next round on: it keeps its key, and so its node.
        """
        registered = {client.node for client in self.clients.values()}
        for node in self.transport.nodes():
            _, ask_again = self._failed.get(node.id, (0, 0.0))
            waits = node.id in self._asked or time.monotonic() < ask_again
            if node.id not in registered and node.id not in self.for_good and not waits:
                request = Message("hello", self.run, metadata=dict(self.run_metadata))
                try:
                    message_id = self.transport.send(node.id, request, ttl_seconds=HELLO_SECONDS)
                    self._asked[node.id] = (message_id, node.name)
                except FedGuildError as error:
                    self._ask_later(node.id, error.message)
        for id, (message_id, key_name) in list(self._asked.items()):
            reply = self.transport.poll(message_id, HELLO_BYTES)
            if reply is None:
                continue
            del self._asked[id]
            failure = reply.reason if isinstance(reply, NoReply) else reply.failure
            if isinstance(reply, NoReply) or will_pass(failure):
                self._ask_later(id, failure)
            else:
                self._register(id, key_name, reply)

    def _ask_later(self, node: int, failure: str) -> None:
        self._pause(node, 1.0)
        self.echo(f"A node did not identify itself: {printable(failure).rstrip('.')}.")

    def _pause(self, node: int, seconds: float) -> None:
        """Does not ask a node for some time, twice as long each time."""
        failures = self._failed.get(node, (0, 0.0))[0] + 1
        pause = min(seconds * 2.0 ** min(failures - 1, 32), LONGEST_PAUSE_SECONDS)
        self._failed[node] = (failures, time.monotonic() + pause)

    def refusal_of(self, client: int) -> str:
        """Returns why a client that has not registered was turned away; empty if it was not."""
        if client in self.clients:
            return ""
        return next((reason for name, reason in self.refused.values() if name == client_name(client)), "")

    def is_revoked(self, client: int) -> bool:
        return client_name(client) in self.revoked()

    def node_of(self, client: int) -> int | None:
        """Returns the node of a client, asking new nodes if the known one is gone; None if it is not connected."""
        if self.is_revoked(client):
            self.clients.pop(client, None)
            return None
        online = {node.id for node in self.transport.nodes()}
        registered = self.clients.get(client)
        if registered is not None and registered.node in online:
            return registered.node
        self.refresh()
        registered = self.clients.get(client)
        return registered.node if registered is not None and registered.node in online else None

    def _register(self, node: int, key_name: str, reply: Message) -> None:
        name = key_name or client_name(reply.client)
        answer, reason = None, reply.failure
        try:
            if not reason:
                answer = read_metadata(HelloAnswer, reply.metadata, "its description of itself is malformed")
                reason = self._refusal(node, key_name, reply, answer)
        except UploadError as error:
            reason = error.message
        except Exception as error:
            reason = unusable(error)
        if reason or answer is None:
            self._refuse(node, name, reason or "its description of itself cannot be read")
            return
        online = {each.id for each in self.transport.nodes()}
        gone = [one for one, (who, _) in self.refused.items() if who == name and one not in online]
        for stale in {node, *gone} & self.refused.keys():
            del self.refused[stale]
            self._returned[stale] = name
        self.clients[reply.client] = RegisteredClient(node, reply.client, answer.model_dump())
        self.echo(f"{client_name(reply.client)} has joined: {answer.summary}.")
        texts = {known.client: known.description["texts"] for known in self.clients.values()}
        if (other := next((client for client in sorted(texts) if texts[client] != answer.texts), None)) is not None:
            self.echo(
                f"Warning: {client_name(reply.client)} does not learn its texts as {client_name(other)} does: "
                f"{answer.texts}; and {texts[other]}. One adapter learns both: see `data` in site.yaml."
            )

    def _refusal(self, node: int, key_name: str, reply: Message, answer: HelloAnswer) -> str:
        """Returns why a node is turned away; empty if it is not."""
        name = client_name(reply.client)
        if reply.kind != "hello" or reply.run != self.run:
            return "its reply is not to the request to identify itself"
        if not 0 <= reply.client < self.client_count:
            last = self.client_count - 1
            return f"it claims to be client {reply.client}, but the federation's clients are 0 to {last}"
        if key_name and key_name != name:
            return f"its key was registered for {key_name}, but it claims to be {name}"
        if self.is_revoked(reply.client):
            self.for_good.add(node)
            return "its key was revoked"
        other = self.clients.get(reply.client)
        if other is not None and other.node != node and other.node in {online.id for online in self.transport.nodes()}:
            return f"another node is already {name}"
        return self.check(reply.client, answer.model_dump())

    def _incomplete(self, missing: list[int], wait_seconds: float) -> QuorumError:
        return QuorumError(
            f"After {round(wait_seconds, 1):g} s these clients are still missing: {_names(missing)}.{self._listed()}",
            "Start `fedguild federation client` on their machines and check its output, or raise wait_seconds "
            "in server.yaml.",
        )

    def _too_few(self, missing: list[int], enough: int | None) -> QuorumError:
        away = [index for index in missing if self.refusal_of(index)]
        needed = "all" if enough is None else str(enough)
        return QuorumError(
            f"{len(away)} of {self.client_count} clients cannot take part, but the run needs {needed}.{self._listed()}",
            "Their operators can change that (`accept` in site.yaml), or you the run; then start it again.",
        )

    def _listed(self) -> str:
        return "".join(f"\n  {name}: {reason}" for name, reason in self.refused.values())


def _names(indices: list[int]) -> str:
    return few([client_name(index) for index in indices], 5)
