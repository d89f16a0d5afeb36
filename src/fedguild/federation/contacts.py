"""The contacts of a federation's server with its clients, as events for live views of the run."""

from __future__ import annotations

from fedguild.core.layout import client_name
from fedguild.core.progress import Note
from fedguild.core.text import printable
from fedguild.federation.flower.message import Message
from fedguild.federation.flower.transport import Node, NoReply, Transport


class NotedTransport:
    """A `Transport` that records who is connected, what was sent, and who answered.

    Clients are named as the operator registered their keys, never as they name themselves.
    """

    def __init__(self, transport: Transport, note: Note) -> None:
        self._transport, self._note = transport, note
        self._names: dict[int, str] = {}
        self._online: list[str] | None = None
        self._sent: dict[str, tuple[str, str]] = {}

    def nodes(self) -> list[Node]:
        """Returns the connected nodes; records them if they have changed."""
        nodes = self._transport.nodes()
        self._names.update({node.id: node.name for node in nodes if node.name})
        online = sorted(node.name for node in nodes if node.name)
        if online != self._online:
            self._online = online
            self._note("online", clients=online)
        return nodes

    def send(self, node: int, message: Message, *, ttl_seconds: float) -> str:
        identifier = self._transport.send(node, message, ttl_seconds=ttl_seconds)
        asked = client_name(message.client) if message.client >= 0 else ""
        name = self._names.get(node, asked)
        self._sent[identifier] = name, message.kind
        self._note("sent", client=name, kind=message.kind, round=message.round)
        return identifier

    def poll(self, message_id: str, limit_bytes: int | None = None) -> Message | NoReply | None:
        reply = self._transport.poll(message_id, limit_bytes)
        if reply is not None:
            name, kind = self._sent.pop(message_id, ("", ""))
            failure = reply.reason if isinstance(reply, NoReply) else reply.failure
            self._note("answered", client=name, kind=kind, failure=printable(failure))
        return reply
