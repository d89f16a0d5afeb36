"""Flower's Grid without its network: real messages, the real ClientApp, the real trainer code.

A message is serialised and parsed as Flower does it, and handed to the node's ClientApp in its turn. Nodes can be
disconnected, delayed, or made to reply something else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.app import Context, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedguild.federation.flower.adapter import make_client_app
from fedguild.federation.flower.message import Message

Handler = Callable[[Message], Message | None]


@dataclass
class LoopbackNode:
    """A node of a federation in this process.

    Attributes:
        id: Its number.
        handle: Returns its trainer's reply; None for no reply at all.
        name: The name that its key was registered for.
        online: Whether it is connected.
        error: A Flower error code that it replies with instead.
        inbox: Messages that it has not handled.
    """

    id: int
    handle: Handler
    name: str = ""
    online: bool = True
    error: int | None = None
    inbox: deque[FlowerMessage] = field(default_factory=deque)


class LoopbackGrid(Grid):
    """A Grid over nodes in this process; the replies of `withheld` nodes are kept back."""

    def __init__(self, nodes: Iterable[LoopbackNode]) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.replies: dict[str, FlowerMessage] = {}
        self.receiver: dict[str, int] = {}
        self.withheld: set[int] = set()
        self.sent = 0
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def set_run(self, run: object) -> None:
        """Has no runs."""

    @property
    def run(self) -> object:
        return None

    def create_message(self, *_: object, **__: object) -> FlowerMessage:
        raise NotImplementedError

    def send_and_receive(self, *_: object, **__: object) -> list[FlowerMessage]:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [node.id for node in self.nodes.values() if node.online]

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node.id, name=node.name) for node in self.nodes.values() if node.online]

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        ids = []
        for message in messages:
            self.sent += 1
            ids.append(f"message-{self.sent}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.receiver[ids[-1]] = message.metadata.dst_node_id
            self.nodes[message.metadata.dst_node_id].inbox.append(over_the_wire(message))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[FlowerMessage]:
        for node in list(self.nodes.values()):
            if node.online and node.inbox:
                self._handle(node)
        ready = [id for id in message_ids if id in self.replies and self.receiver[id] not in self.withheld]
        return [self.replies.pop(id) for id in ready]

    def _handle(self, node: LoopbackNode) -> None:
        """Lets a node handle its next message; it may lose the message meanwhile, or never reply."""
        message, silent = node.inbox[0], False

        def handle(request: Message) -> Message:
            nonlocal silent
            reply = node.handle(request)
            silent = reply is None
            return request.reply() if reply is None else reply

        if node.error is not None:
            reply = FlowerMessage(Error(code=node.error, reason="on purpose"), reply_to=message)
        else:
            context = Context(run_id=1, node_id=node.id, node_config={}, state=RecordDict(), run_config={})
            reply = make_client_app(handle)(message, context)
        node.inbox.remove(message)
        if not silent:
            self.replies[message.metadata.message_id] = over_the_wire(reply)


def over_the_wire(message: FlowerMessage) -> FlowerMessage:
    return message_from_proto(message_to_proto(message))
