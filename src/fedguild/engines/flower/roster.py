"""Which node is which client: asked once, asked again when somebody new is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedguild.engines.flower.parcel import Parcel
from fedguild.engines.flower.post import Lost, Post
from fedguild.errors import QuorumError

HELLO_SECONDS = 600.0
"""How long a node may take to say who it is: its trainer may have to load the model first."""
POLL_SECONDS = 0.5
REPORT_SECONDS = 15.0
PATIENCE_SECONDS = 60.0
"""How long a run that goes on waits for clients that it could do without."""


@dataclass(frozen=True)
class Member:
    """A client that said who it is.

    Attributes:
        node: The carrier's number for its machine.
        client: Its index.
        facts: What else it said: examples, budget, versions.
    """

    node: int
    client: int
    facts: Mapping[str, Any]


@dataclass
class Roster:
    """The members of a federation, as far as they are known.

    Attributes:
        post: The carrier.
        run: Identity of the run.
        clients: How many clients the federation has.
        orders: What a node is told with the question who it is.
        check: Returns why a client cannot take part, from its index and what it said; empty if it can.
        tell: Prints a line for whoever runs the server.
        poll_seconds: From one look for answers to the next.
    """

    post: Post
    run: str
    clients: int
    orders: Mapping[str, Any]
    check: Callable[[int, Mapping[str, Any]], str] = lambda client, facts: ""
    tell: Callable[[str], None] = lambda line: None
    poll_seconds: float = POLL_SECONDS
    members: dict[int, Member] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    _asked: dict[int, str] = field(default_factory=dict)

    def gather(self, wait_seconds: float, enough: int | None = None) -> dict[int, Member]:
        """Waits until every client is there; returns client index -> member.

        Args:
            wait_seconds: How long.
            enough: So many clients are enough once `PATIENCE_SECONDS` have passed; None for all.

        Raises:
            QuorumError: somebody is missing after `wait_seconds`; the message says who, and who was
                turned away.
        """
        started = told = time.monotonic()
        self.tell(f"Waiting for {self.clients} client(s), at most {wait_seconds:g} s.")
        while True:
            self.look()
            missing = [index for index in range(self.clients) if index not in self.members]
            if not missing:
                return dict(self.members)
            now = time.monotonic()
            if enough is not None and len(self.members) >= enough and now - started > PATIENCE_SECONDS:
                self.tell(f"Going on without {_names(missing)} for now.")
                return dict(self.members)
            if now - started > wait_seconds:
                raise self._incomplete(missing, wait_seconds)
            if now - told > REPORT_SECONDS:
                told = now
                self.tell(f"Still waiting for {_names(missing)}; {len(self._asked)} node(s) have not answered yet.")
            time.sleep(self.poll_seconds)

    def look(self) -> None:
        """Asks nodes that are new who they are, and takes in the answers that have come."""
        known = {member.node for member in self.members.values()}
        for node in self.post.nodes():
            if node.id not in known and node.id not in self._asked and node.id not in self.refused:
                self._asked[node.id] = self.post.send(
                    node.id, Parcel("hello", self.run, facts=dict(self.orders)), keep_seconds=HELLO_SECONDS
                )
        names = {node.id: node.name for node in self.post.nodes()} if self._asked else {}
        for id, ticket in list(self._asked.items()):
            answer = self.post.collect(ticket)
            if answer is None:
                continue
            del self._asked[id]
            if isinstance(answer, Lost):
                self.tell(f"A node did not say who it is: {answer.reason}.")
            else:
                self._take_in(id, names.get(id, ""), answer)

    def node_of(self, client: int) -> int | None:
        """Returns the node of a client, asking newcomers where the known one is gone; None if nobody is there."""
        online = {node.id for node in self.post.nodes()}
        member = self.members.get(client)
        if member is not None and member.node in online:
            return member.node
        self.look()
        member = self.members.get(client)
        return member.node if member is not None and member.node in online else None

    def _take_in(self, node: int, registered: str, answer: Parcel) -> None:
        reason = answer.failure or self._objection(node, registered, answer)
        who = registered or f"client-{answer.client:03d}"
        if reason:
            self.refused[node] = f"{who}: {reason}"
            self.tell(f"{who} does not take part: {reason}")
            return
        self.members[answer.client] = Member(node, answer.client, answer.facts)
        self.tell(f"client-{answer.client:03d} is there: {answer.facts.get('summary', 'no details')}.")

    def _objection(self, node: int, registered: str, answer: Parcel) -> str:
        name = f"client-{answer.client:03d}"
        if not 0 <= answer.client < self.clients:
            return f"it says that it is client {answer.client}, but the federation has {self.clients}, from 0"
        if registered.startswith("client-") and registered != name:
            return f"its key was registered for {registered}, but it says that it is {name}"
        other = self.members.get(answer.client)
        if other is not None and other.node != node and other.node in {known.id for known in self.post.nodes()}:
            return f"another node is {name} already"
        return self.check(answer.client, answer.facts)

    def _incomplete(self, missing: list[int], wait_seconds: float) -> QuorumError:
        reasons = "".join(f"\n  {reason}" for reason in self.refused.values())
        return QuorumError(
            f"After {wait_seconds:g} s these clients are not there: {_names(missing)}.{reasons}",
            "Start `fedguild federation client` on their machines and look at what it says, or raise wait_seconds "
            "in server.yaml.",
        )


def _names(indices: list[int]) -> str:
    shown = ", ".join(f"client-{index:03d}" for index in indices[:5])
    return shown if len(indices) <= 5 else f"{shown} and {len(indices) - 5} more"
