"""The interface between the engine and its message transport: list nodes, send, poll for a reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedguild.engines.flower.message import Message


@dataclass(frozen=True)
class Node:
    """A connected machine.

    Attributes:
        id: The transport's number for it, the same after a reconnection.
        name: The name under which the operator of the server registered its key; empty if none.
    """

    id: int
    name: str = ""


@dataclass(frozen=True)
class NoReply:
    """The result of a request whose reply will never come.

    Attributes:
        reason: Why, as a clause.
    """

    reason: str


class Transport(Protocol):
    """Sends messages to nodes and receives their replies."""

    def nodes(self) -> list[Node]:
        """Returns the nodes that are connected at the moment."""
        ...

    def send(self, node: int, message: Message, *, ttl_seconds: float) -> str:
        """Sends a message; returns the id to poll for its reply with.

        Args:
            node: Id of the receiver.
            message: What to send.
            ttl_seconds: How long the transport keeps the message and its reply.
        """
        ...

    def poll(self, message_id: str) -> Message | NoReply | None:
        """Returns the reply to a message, once; None until it has arrived."""
        ...
