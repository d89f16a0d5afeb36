"""Flower's Grid without its network: real messages, the real apps' handlers, the real trainer code.

A message is taken apart and put together again as Flower does it, and handed to the node's ClientApp
in its turn. Nodes can be cut off, made slow, or made to answer something else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedguild.engines.flower.adapter import make_client_app
from fedguild.engines.flower.parcel import Parcel

Answering = Callable[[Parcel], Parcel | None]


@dataclass
class LoopbackNode:
    """A node of a federation in this process.

    Attributes:
        id: Its number.
        answer: What its trainer answers; None is silence.
        name: The name that its key was registered for.
        online: Whether it is there.
        error: A Flower error code that it answers with instead.
        inbox: Messages that wait.
    """

    id: int
    answer: Answering
    name: str = ""
    online: bool = True
    error: int | None = None
    inbox: deque[Message] = field(default_factory=deque)


class LoopbackGrid(Grid):
    """A Grid over nodes in this process; the answers of `withheld` nodes are kept back."""

    def __init__(self, nodes: Iterable[LoopbackNode]) -> None:
        self.known = {node.id: node for node in nodes}
        self.replies: dict[str, Message] = {}
        self.owner: dict[str, int] = {}
        self.withheld: set[int] = set()
        self.sent = 0
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def set_run(self, run: object) -> None:
        """Has no runs."""

    @property
    def run(self) -> object:
        return None

    def create_message(self, *_: object, **__: object) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *_: object, **__: object) -> list[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [node.id for node in self.known.values() if node.online]

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node.id, name=node.name) for node in self.known.values() if node.online]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        tickets = []
        for message in messages:
            self.sent += 1
            ticket = f"ticket-{self.sent}"
            message.metadata.__dict__["_message_id"] = ticket
            self.owner[ticket] = message.metadata.dst_node_id
            self.known[message.metadata.dst_node_id].inbox.append(over_the_wire(message))
            tickets.append(ticket)
        return tickets

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        for node in list(self.known.values()):
            if node.online and node.inbox:
                self._handle(node)
        ready = [ticket for ticket in message_ids if ticket in self.replies and self.owner[ticket] not in self.withheld]
        return [self.replies.pop(ticket) for ticket in ready]

    def _handle(self, node: LoopbackNode) -> None:
        """Lets a node work on its next message; it may lose it meanwhile, or never answer."""
        message, silent = node.inbox[0], False

        def watched(parcel: Parcel, settings: object) -> Parcel:
            nonlocal silent
            answer = node.answer(parcel)
            silent = answer is None
            return parcel.answer() if answer is None else answer

        if node.error is not None:
            reply = Message(Error(code=node.error, reason="on purpose"), reply_to=message)
        else:
            context = Context(run_id=1, node_id=node.id, node_config={}, state=RecordDict(), run_config={})
            reply = make_client_app(watched)(message, context)
        node.inbox.remove(message)
        if not silent:
            self.replies[message.metadata.message_id] = over_the_wire(reply)


def over_the_wire(message: Message) -> Message:
    """Returns a message as its receiver has it."""
    return message_from_proto(message_to_proto(message))
