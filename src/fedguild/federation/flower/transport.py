"""The interface between the engine and its message transport: list nodes, send, poll for a reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedguild.federation.flower.message import Message


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
    """The result of a request whose reply will never come; `reason` is a clause."""

    reason: str


def too_large(limit_bytes: int) -> NoReply:
    return NoReply(f"its answer has more than {limit_bytes} bytes, which none of its kind can have")


class Transport(Protocol):
    """Sends messages to nodes and receives their replies."""

    def nodes(self) -> list[Node]:
        """Returns the nodes that are connected at the moment."""
        ...

    def send(self, node: int, message: Message, *, ttl_seconds: float) -> str:
        """Sends a message; returns the id by which to poll for its reply.

        Args:
            ttl_seconds: How long the transport keeps the message and its reply.

        Raises:
            FedGuildError: the message cannot be sent to this node.
        """
        ...

    def poll(self, message_id: str, limit_bytes: int | None = None) -> Message | NoReply | None:
        """Returns the reply to a message, once; None until it has arrived.

        Args:
            limit_bytes: Largest reply, header and body, that is read into memory; a larger one is discarded and
                reported as NoReply. 0 discards any reply; None sets no limit.
        """
        ...
