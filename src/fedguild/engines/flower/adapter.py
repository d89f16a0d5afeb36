"""FedGuild's messages over Flower's Grid and ClientApp (flwr 1.41 and 1.42).

The bytes of a payload travel as one `Array` of raw bytes, which Flower splits into chunks of 5 MiB; a `ConfigRecord`
would travel in one piece. Nothing here imports torch: the process that answers a client's messages only forwards them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedguild.engines.flower.message import Message
from fedguild.engines.flower.transport import Node, NoReply
from fedguild.errors import FedGuildError, UploadError
from fedguild.wire.schema import printable

HEADER, BODY = "header", "body"
_BYTES = "fedguild.bytes"
_MESSAGE_TYPES = {
    "hello": "query",
    "train": "train",
    "score": "evaluate",
    "deliver": "evaluate.deliver",
    "secure": "train.secure",
}

_NODE_GONE = 5
_ERRORS = {
    1: "its machine could not load the app (is the same fedguild installed there?)",
    2: "the app raised an error on its machine",
    3: "the message to it is no longer available",
    4: "its answer is no longer available",
    _NODE_GONE: "it is gone: its machine stopped answering",
    7: "its machine does not trust the app",
    8: "the process that handled the message there died",
}
"""flwr.common.constant.ErrorCode -> what it means for a client, as a clause."""


class GridTransport:
    """The transport over Flower's Grid (`fedguild.engines.flower.transport.Transport`).

    Args:
        grid: The Grid that Flower passes to a ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[Node]:
        """Returns the nodes that Flower considers online."""
        return sorted((Node(info.node_id, info.name) for info in self._grid.get_nodes()), key=lambda node: node.id)

    def send(self, node: int, message: Message, *, ttl_seconds: float) -> str:
        """Sends a message; returns the id that Flower gives it.

        Raises:
            FedGuildError: Flower's server did not accept the message.
        """
        sent = FlowerMessage(
            to_records(message),
            dst_node_id=node,
            message_type=_MESSAGE_TYPES[message.kind],
            ttl=ttl_seconds,
            group_id=str(message.round),
        )
        accepted = [message_id for message_id in self._grid.push_messages([sent]) if message_id]
        if not accepted:
            raise FedGuildError(f"Flower did not accept a message of {len(message.body)} bytes for node {node}.")
        return accepted[0]

    def poll(self, message_id: str) -> Message | NoReply | None:
        """Returns the reply to a message, if it has arrived."""
        for reply in self._grid.pull_messages([message_id]):
            try:
                if reply.has_error():
                    return NoReply(_describe(reply.error.code, reply.error.reason or ""))
                return from_records(reply.content)
            except UploadError as error:
                return NoReply(error.message)
            except Exception as error:
                return NoReply(f"its answer cannot be read: {type(error).__name__}: {printable(str(error), 200)}")
        return None


def make_server_app(main: Callable[[GridTransport, Mapping[str, Any]], None]) -> ServerApp:
    """Returns the app that Flower runs on the server; `main` gets the transport and the run's settings."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(GridTransport(grid), dict(context.run_config))

    return app


def make_client_app(handle: Callable[[Message], Message]) -> ClientApp:
    """Returns the app that Flower runs on a client, one process per message.

    Args:
        handle: Returns the reply to a message.
    """
    app = ClientApp()

    def reply_to(request: FlowerMessage, context: Context) -> FlowerMessage:
        return FlowerMessage(to_records(handle(from_records(request.content))), reply_to=request)

    app.query()(reply_to)
    app.train()(reply_to)
    app.train("secure")(reply_to)
    app.evaluate()(reply_to)
    app.evaluate("deliver")(reply_to)
    return app


def to_records(message: Message) -> RecordDict:
    """Returns a message as Flower's records."""
    body = Array(dtype="uint8", shape=(len(message.body),), stype=_BYTES, data=message.body)
    return RecordDict({HEADER: ConfigRecord({HEADER: message.header()}), BODY: ArrayRecord({BODY: body})})


def from_records(records: RecordDict) -> Message:
    """Returns the message that `to_records` wrote.

    Raises:
        UploadError: the records are not a message of FedGuild.
    """
    try:
        header = records[HEADER][HEADER]
        body = records[BODY][BODY].data  # type: ignore[union-attr]
    except (KeyError, TypeError, AttributeError) as error:
        raise UploadError(f"A Flower message does not come from FedGuild: it lacks {error}.") from error
    return Message.from_header(str(header), bytes(body))


def _describe(code: int, reason: str) -> str:
    description = _ERRORS.get(code, f"Flower reports error {code}")
    return description if code == _NODE_GONE or not reason else f"{description} ({printable(reason, 300)})"
