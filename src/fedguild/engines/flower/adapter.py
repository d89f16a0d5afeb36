"""All that FedGuild knows of Flower's Python interface (flwr 1.41); no other module imports it.

The bytes of a payload travel as one `Array` of raw bytes, which Flower cuts into chunks of 5 MiB of
its own accord; a `ConfigRecord` would travel in one piece. A message to a client is handled by a
new process there, which therefore must import little: nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedguild.engines.flower.parcel import Parcel, open_parcel
from fedguild.engines.flower.post import Lost, Node
from fedguild.errors import FedGuildError, UploadError

HEADER, BODY = "header", "body"
_BYTES = "fedguild.bytes"
_MESSAGE_TYPES = {"hello": "query", "train": "train", "score": "evaluate", "deliver": "evaluate.deliver"}

_NODE_GONE = 5
_PLAIN_ERRORS = {
    1: "its machine could not load the app (is the same fedguild installed there?)",
    2: "the app raised an error on its machine",
    3: "the message to it is no longer available",
    4: "its answer is no longer available",
    _NODE_GONE: "it is gone: its machine stopped answering",
    7: "its machine does not trust the app",
    8: "the process that handled the message there died",
}
"""flwr.common.constant.ErrorCode in plain words."""


class GridPost:
    """The carrier of `fedguild.engines.flower.post` over Flower's Grid.

    Args:
        grid: What Flower gives a ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[Node]:
        """Returns the nodes that Flower holds for online."""
        return sorted((Node(info.node_id, info.name) for info in self._grid.get_nodes()), key=lambda node: node.id)

    def send(self, node: int, parcel: Parcel, *, keep_seconds: float) -> str:
        """Sends a parcel.

        Raises:
            FedGuildError: Flower's server did not take the message.
        """
        message = Message(
            to_records(parcel),
            dst_node_id=node,
            message_type=_MESSAGE_TYPES[parcel.kind],
            ttl=keep_seconds,
            group_id=str(parcel.round),
        )
        tickets = [ticket for ticket in self._grid.push_messages([message]) if ticket]
        if not tickets:
            raise FedGuildError(f"Flower did not take a message of {len(parcel.body)} bytes to the node {node}.")
        return tickets[0]

    def collect(self, ticket: str) -> Parcel | Lost | None:
        """Returns the answer to a ticket, if it is there."""
        for message in self._grid.pull_messages([ticket]):
            if message.has_error():
                return Lost(_plain(message.error.code, message.error.reason or ""))
            try:
                return from_records(message.content)
            except UploadError as error:
                return Lost(error.message)
        return None


def make_server_app(main: Callable[[GridPost, Mapping[str, Any]], None]) -> ServerApp:
    """Returns the app that Flower runs on the server; `main` gets the carrier and the run's settings."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(GridPost(grid), dict(context.run_config))

    return app


def make_client_app(handle: Callable[[Parcel, Mapping[str, Any]], Parcel]) -> ClientApp:
    """Returns the app that Flower runs on a client, one process per message.

    Args:
        handle: Gets a parcel and the node's own settings, returns the answer.
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        reply = handle(from_records(message.content), dict(context.node_config))
        return Message(to_records(reply), reply_to=message)

    app.query()(answer)
    app.train()(answer)
    app.evaluate()(answer)
    app.evaluate("deliver")(answer)
    return app


def to_records(parcel: Parcel) -> RecordDict:
    """Returns a parcel as Flower's records."""
    body = Array(dtype="uint8", shape=(len(parcel.body),), stype=_BYTES, data=parcel.body)
    return RecordDict({HEADER: ConfigRecord({HEADER: parcel.header()}), BODY: ArrayRecord({BODY: body})})


def from_records(records: RecordDict) -> Parcel:
    """Returns the parcel that `to_records` wrote.

    Raises:
        UploadError: the records are none.
    """
    try:
        header = records[HEADER][HEADER]
        body = records[BODY][BODY].data  # type: ignore[union-attr]
    except (KeyError, TypeError, AttributeError) as error:
        raise UploadError(f"A message of Flower is not one of FedGuild's: it lacks {error}.") from error
    return open_parcel(str(header), bytes(body))


def _plain(code: int, reason: str) -> str:
    plain = _PLAIN_ERRORS.get(code, f"Flower reports error {code}")
    return plain if code == _NODE_GONE or not reason else f"{plain} ({reason[:300]})"
