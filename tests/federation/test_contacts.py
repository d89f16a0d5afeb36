"""Notes of a federation's server about its contacts with clients."""

from __future__ import annotations

from typing import Any

from fedguild.federation.contacts import NotedTransport
from fedguild.federation.flower.message import Message
from fedguild.federation.flower.transport import Node, NoReply

RUN = "0" * 32


class Scripted:
    """A transport whose replies are given."""

    def __init__(self) -> None:
        self.connected = [Node(7, "client-000"), Node(8, "client-001"), Node(9)]
        self.replies: dict[str, Message | NoReply] = {}
        self.limits: list[int | None] = []

    def nodes(self) -> list[Node]:
        return self.connected

    def send(self, node: int, message: Message, *, ttl_seconds: float) -> str:
        return f"{node}-{message.kind}"

    def poll(self, message_id: str, limit_bytes: int | None = None) -> Message | NoReply | None:
        self.limits.append(limit_bytes)
        return self.replies.pop(message_id, None)


def test_contacts_are_noted_under_the_names_of_the_keys() -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    inner = Scripted()
    transport = NotedTransport(inner, lambda event, **values: events.append((event, values)))
    assert transport.nodes() == inner.connected
    transport.nodes()
    inner.connected = inner.connected[1:]
    transport.nodes()
    assert events == [("online", {"clients": ["client-000", "client-001"]}), ("online", {"clients": ["client-001"]})]
    events.clear()
    hello, train = Message("hello", RUN), Message("train", RUN, round=3, client=5)
    assert transport.send(8, hello, ttl_seconds=1) == "8-hello"
    transport.send(9, train, ttl_seconds=1)
    assert transport.poll("8-hello", 1000) is None
    assert inner.limits == [1000]
    inner.replies = {"8-hello": Message("hello", RUN, client=0), "9-train": NoReply("its node is\x1b[2J gone")}
    assert transport.poll("8-hello") == Message("hello", RUN, client=0)
    assert transport.poll("9-train") == NoReply("its node is\x1b[2J gone")
    assert events == [
        ("sent", {"client": "client-001", "kind": "hello", "round": 0}),
        ("sent", {"client": "client-005", "kind": "train", "round": 3}),
        ("answered", {"client": "client-001", "kind": "hello", "failure": ""}),
        ("answered", {"client": "client-005", "kind": "train", "failure": "its node is [2J gone"}),
    ]
