"""What the engine needs of a carrier of messages: who is there, send, and look for an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedguild.engines.flower.parcel import Parcel


@dataclass(frozen=True)
class Node:
    """A machine that is connected.

    Attributes:
        id: The carrier's number for it, the same after a reconnection.
        name: The name under which the operator of the server registered its key; empty if none.
    """

    id: int
    name: str = ""


@dataclass(frozen=True)
class Lost:
    """Stands for an answer that will never come.

    Attributes:
        reason: Why, as a clause.
    """

    reason: str


class Post(Protocol):
    """Carries parcels to nodes and answers back."""

    def nodes(self) -> list[Node]:
        """Returns the nodes that are connected at the moment."""
        ...

    def send(self, node: int, parcel: Parcel, *, keep_seconds: float) -> str:
        """Sends a parcel; returns a ticket to ask for the answer with.

        Args:
            node: To whom.
            parcel: What.
            keep_seconds: How long the carrier keeps the parcel and its answer.
        """
        ...

    def collect(self, ticket: str) -> Parcel | Lost | None:
        """Returns the answer to a ticket, once; None as long as there is none."""
        ...
