"""The mapping from clients to nodes: every new node is asked once which client it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedguild.engines.flower.message import Message
from fedguild.engines.flower.transport import NoReply, Transport
from fedguild.errors import QuorumError

HELLO_SECONDS = 600.0
"""Time limit for a node to identify itself: its trainer may have to load the model first."""
POLL_SECONDS = 0.5
STATUS_SECONDS = 15.0
GRACE_SECONDS = 60.0
"""Time for which a resumed run waits for clients that its quorum does not need."""


@dataclass(frozen=True)
class RegisteredClient:
    """A client that has identified itself.

    Attributes:
        node: The transport's number for its machine.
        client: Its index.
        description: What else it said: examples, budget, versions.
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
        clients: Client index -> the client.
        refused: Node -> the client that it claims to be, and why it was turned away.
    """

    transport: Transport
    run: str
    client_count: int
    run_metadata: Mapping[str, Any]
    check: Callable[[int, Mapping[str, Any]], str] = lambda client, description: ""
    echo: Callable[[str], None] = lambda line: None
    poll_seconds: float = POLL_SECONDS
    clients: dict[int, RegisteredClient] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    _asked: dict[int, str] = field(default_factory=dict)

    def wait_for_clients(self, wait_seconds: float, enough: int | None = None) -> dict[int, RegisteredClient]:
        """Waits until every client has registered; returns client index -> client.

        Args:
            wait_seconds: Longest time to wait.
            enough: This many clients are enough once `GRACE_SECONDS` have passed; None for all.

        Raises:
            QuorumError: clients are missing after `wait_seconds`; the message names them, and those that were turned
                away.
        """
        started = last_status = time.monotonic()
        self.echo(f"Waiting for {self.client_count} client(s), at most {wait_seconds:g} s.")
        while True:
            self.refresh()
            missing = [index for index in range(self.client_count) if index not in self.clients]
            if not missing:
                return dict(self.clients)
            now = time.monotonic()
            if enough is not None and len(self.clients) >= enough and now - started > GRACE_SECONDS:
                self.echo(f"Continuing without {_names(missing)} for now.")
                return dict(self.clients)
            if now - started > wait_seconds:
                raise self._incomplete(missing, wait_seconds)
            if now - last_status > STATUS_SECONDS:
                last_status = now
                self.echo(f"Still waiting for {_names(missing)}; {len(self._asked)} node(s) have not answered yet.")
            time.sleep(self.poll_seconds)

    def refresh(self) -> None:
        """Asks new nodes to identify themselves, and registers those whose replies have arrived."""
        registered = {client.node for client in self.clients.values()}
        for node in self.transport.nodes():
            if node.id not in registered and node.id not in self._asked and node.id not in self.refused:
                self._asked[node.id] = self.transport.send(
                    node.id, Message("hello", self.run, metadata=dict(self.run_metadata)), ttl_seconds=HELLO_SECONDS
                )
        key_names = {node.id: node.name for node in self.transport.nodes()} if self._asked else {}
        for id, message_id in list(self._asked.items()):
            reply = self.transport.poll(message_id)
            if reply is None:
                continue
            del self._asked[id]
            if isinstance(reply, NoReply):
                self.echo(f"A node did not identify itself: {reply.reason}.")
            else:
                self._register(id, key_names.get(id, ""), reply)

    def node_of(self, client: int) -> int | None:
        """Returns the node of a client, asking new nodes if the known one is gone; None if it is not connected."""
        online = {node.id for node in self.transport.nodes()}
        registered = self.clients.get(client)
        if registered is not None and registered.node in online:
            return registered.node
        self.refresh()
        registered = self.clients.get(client)
        return registered.node if registered is not None and registered.node in online else None

    def _register(self, node: int, key_name: str, reply: Message) -> None:
        reason = reply.failure or self._refusal(node, key_name, reply)
        name = key_name or f"client-{reply.client:03d}"
        if reason:
            self.refused[node] = f"{name}: {reason}"
            self.echo(f"{name} cannot take part: {reason}")
            return
        self.clients[reply.client] = RegisteredClient(node, reply.client, reply.metadata)
        self.echo(f"client-{reply.client:03d} has joined: {reply.metadata.get('summary', 'no details')}.")

    def _refusal(self, node: int, key_name: str, reply: Message) -> str:
        """Returns why a node is turned away; empty if it is not."""
        name = f"client-{reply.client:03d}"
        if not 0 <= reply.client < self.client_count:
            last = self.client_count - 1
            return f"it claims to be client {reply.client}, but the federation's clients are 0 to {last}"
        if key_name.startswith("client-") and key_name != name:
            return f"its key was registered for {key_name}, but it claims to be {name}"
        other = self.clients.get(reply.client)
        if other is not None and other.node != node and other.node in {online.id for online in self.transport.nodes()}:
            return f"another node is already {name}"
        return self.check(reply.client, reply.metadata)

    def _incomplete(self, missing: list[int], wait_seconds: float) -> QuorumError:
        reasons = "".join(f"\n  {reason}" for reason in self.refused.values())
        return QuorumError(
            f"After {wait_seconds:g} s these clients are still missing: {_names(missing)}.{reasons}",
            "Start `fedguild federation client` on their machines and check its output, or raise wait_seconds "
            "in server.yaml.",
        )


def _names(indices: list[int]) -> str:
    shown = ", ".join(f"client-{index:03d}" for index in indices[:5])
    return shown if len(indices) <= 5 else f"{shown} and {len(indices) - 5} more"
