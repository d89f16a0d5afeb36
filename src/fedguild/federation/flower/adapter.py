"""FedGuild's messages over Flower's Grid and ClientApp (flwr 1.41 and 1.42).

The bytes of a payload travel as one `Array` of raw bytes, which Flower splits into chunks of 5 MiB; a `ConfigRecord`
would travel in one piece. Nothing here imports torch: the process that answers a client's messages only forwards them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
    iterate_object_tree,
)

from fedguild.core.errors import FedGuildError, UploadError
from fedguild.core.text import printable
from fedguild.federation.flower.message import Message
from fedguild.federation.flower.transport import Node, NoReply, too_large

if TYPE_CHECKING:
    from flwr.superlink.grid.http_grid import HttpGrid

HEADER, BODY = "header", "body"
_BYTES = "fedguild.bytes"
_MESSAGE_TYPES = {
    "hello": "query",
    "train": "train",
    "score": "evaluate",
    "deliver": "evaluate.deliver",
    "secure": "train.secure",
}

_FRAME_BYTES, _FRAME_OBJECTS = 2**20, 64
"""Room for what Flower puts around a header and a body: a few objects, and one for every 5 MiB of the body."""
_SMALLEST_CHUNK_BYTES = 2**20
_GRACE_SECONDS, _SLOWEST_BYTES_PER_SECOND = 300.0, 2**16
"""An answer whose parts are not there yet is given up after that time, and later as they come at this rate."""

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
    """The transport over Flower's Grid (`fedguild.federation.flower.transport.Transport`)."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._arriving: dict[str, _Arriving] = {}

    def nodes(self) -> list[Node]:
        return sorted((Node(info.node_id, info.name) for info in self._grid.get_nodes()), key=lambda node: node.id)

    def send(self, node: int, message: Message, *, ttl_seconds: float) -> str:
        """Sends a message; returns Flower's id of it.

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

    def poll(self, message_id: str, limit_bytes: int | None = None) -> Message | NoReply | None:
        """Returns the reply to a message, if it has arrived.

        A reply is counted while its parts arrive, so memory never holds more than the limit and a few parts of at most
        64 MiB. A reply with missing parts counts as not arrived: a client that sends slowly delays nobody else.
        """
        try:
            replies = self._pull(message_id, limit_bytes)
            for reply in replies:
                if reply.metadata.reply_to_message_id != message_id:
                    continue
                if reply.has_error():
                    return NoReply(_describe(reply.error.code, reply.error.reason or ""))
                header, body = _parts(reply.content)
                if limit_bytes is not None and len(header) + len(body) > limit_bytes:
                    return too_large(limit_bytes)
                return Message.from_header(header, body)
        except _BeyondError:
            return too_large(limit_bytes or 0)
        except _TooSlowError as error:
            return NoReply(str(error))
        except UploadError as error:
            return NoReply(error.message)
        except httpx.HTTPError:
            raise  # Flower's server does not answer, which is no client's fault
        except Exception as error:
            return NoReply(f"its answer cannot be read: {type(error).__name__}: {printable(str(error), 200)}")
        return None

    def _pull(self, message_id: str, limit_bytes: int | None) -> list[FlowerMessage]:
        """Returns the complete reply to a message from Flower's Grid, if there is one.

        Raises:
            _BeyondError: it is larger than the limit, and was deleted.
            _TooSlowError: its parts do not arrive, and were deleted.
        """
        from flwr.superlink.grid.http_grid import HttpGrid

        grid = self._grid
        if limit_bytes is None or not isinstance(grid, HttpGrid):
            return list(grid.pull_messages([message_id]))
        client = grid._runtime_client
        arriving = self._arriving.pop(message_id, None) or _Arriving()
        meter = _Meter(client, grid, limit_bytes, arriving)
        grid._client = meter  # type: ignore[assignment]
        try:
            if limit_bytes == 0 and meter.PullMessages(PullAppMessagesRequest(message_ids=[message_id])).messages_list:
                raise _BeyondError
            return list(grid.pull_messages([message_id])) if limit_bytes and meter.is_complete() else []
        except _NotYetError:
            self._arriving[message_id] = arriving
            return []
        except httpx.HTTPError:
            self._arriving[message_id] = arriving
            raise
        except Exception:
            meter.discard()
            raise
        finally:
            grid._client = client


class _BeyondError(Exception):
    """A reply is larger than its limit."""


class _NotYetError(Exception):
    """A part of a reply has not arrived yet."""


class _TooSlowError(Exception):
    """The parts of a reply do not arrive."""


@dataclass
class _Arriving:
    """A reply that Flower's server has announced, which it does once, while parts may still be missing.

    Attributes:
        started: When it was announced, in seconds of the monotonic clock.
        response: The announcement; None before.
        missing: Objects that were missing at the last look, and those not looked for since.
        seen_bytes: Bytes of the objects that have arrived.
    """

    started: float = field(default_factory=time.monotonic)
    response: PullAppMessagesResponse | None = None
    missing: list[str] = field(default_factory=list)
    seen_bytes: int = 0

    def require_time(self) -> None:
        """Raises _TooSlowError if the parts do not arrive fast enough."""
        waited = time.monotonic() - self.started
        if waited > _GRACE_SECONDS + self.seen_bytes / _SLOWEST_BYTES_PER_SECOND:
            raise _TooSlowError(f"its answer did not arrive as a whole within {waited:.0f} s")


class _Meter:
    """Flower's client for one pull of a reply, which counts what it receives.

    Flower's Grid asks for a reply's message and the tree of its objects, then for every object, then confirms, and
    finally assembles the reply; an object may occur in it many times. The Grid would wait for a missing object. The
    meter ends the pull instead, and before the next one checks whether the missing objects have arrived.

    Args:
        limit_bytes: Most bytes of a reply's objects.
    """

    def __init__(self, client: Any, grid: HttpGrid, limit_bytes: int, arriving: _Arriving) -> None:
        self._client, self._grid, self._arriving = client, grid, arriving
        self._limit, self._pulled = limit_bytes + _FRAME_BYTES, 0
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._arrays: list[tuple[list[str], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def is_complete(self) -> bool:
        """Whether the missing objects have arrived; their content is discarded.

        Raises:
            _NotYetError: an object is missing.
            _BeyondError: they are larger than the limit.
            _TooSlowError: they do not arrive.
        """
        arriving = self._arriving
        while arriving.missing:
            request = PullObjectRequest(
                node=self._grid.node, run_id=self._grid.run.run_id, object_id=arriving.missing[0]
            )
            response = self._client.PullObject(request)
            if response.object_found and not response.object_content:
                arriving.require_time()
                raise _NotYetError
            del arriving.missing[0]
            arriving.seen_bytes += len(response.object_content)
            if arriving.seen_bytes > self._limit:
                raise _BeyondError
        return True

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        arriving = self._arriving
        if arriving.response is None:
            arriving.response, arriving.started = self._client.PullMessages(request), time.monotonic()
        left, trees = (
            _FRAME_OBJECTS + self._limit // _SMALLEST_CHUNK_BYTES,
            list(arriving.response.message_object_trees),
        )
        while trees:
            left -= 1
            if left < 0:
                raise _BeyondError
            trees.extend(trees.pop().children)
        return arriving.response

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        if self._pulled > self._limit:
            raise _BeyondError
        response = self._client.PullObject(request)
        content = response.object_content
        if response.object_found and not content:
            self._note_missing()
            raise _NotYetError
        with self._lock:
            self._pulled += len(content)
            if self._pulled > self._limit:
                raise _BeyondError
            self._sizes[request.object_id] = len(content)
            if content.startswith(b"Array "):
                places = json.loads(get_object_body(content, Array))["arraychunk_ids"]
                self._arrays.append((get_object_children_ids_from_object_content(content), places))
        return response

    def _note_missing(self) -> None:
        """Records the objects of a reply that have not been seen, once.

        Raises:
            _TooSlowError: they do not arrive.
        """
        arriving = self._arriving
        with self._lock:
            if not arriving.missing and arriving.response is not None:
                trees = arriving.response.message_object_trees
                ids = dict.fromkeys(tree.object_id for root in trees for tree in iterate_object_tree(root))
                arriving.missing = [id for id in ids if id not in self._sizes]
                arriving.seen_bytes = self._pulled
        arriving.require_time()

    def ConfirmMessageReceived(self, request: Any) -> Any:  # noqa: N802
        """Counts the size of the assembled reply; everything has been pulled now."""
        whole = sum(self._sizes[children[place]] for children, places in self._arrays for place in places)
        if whole > self._limit:
            raise _BeyondError
        return self._client.ConfirmMessageReceived(request)

    def discard(self) -> None:
        """Deletes the replies from Flower's server."""
        response = self._arriving.response
        for message in [] if response is None else response.messages_list:
            run, received = self._grid.run.run_id, message.metadata.message_id
            request = ConfirmMessageReceivedRequest(node=self._grid.node, run_id=run, message_object_id=received)
            with suppress(httpx.HTTPError):
                self._client.ConfirmMessageReceived(request)


def make_server_app(main: Callable[[GridTransport, Mapping[str, Any]], None]) -> ServerApp:
    """Returns the app that Flower runs on the server; `main` receives the transport and the run's settings."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(GridTransport(grid), dict(context.run_config))

    return app


def make_client_app(handle: Callable[[Message], Message]) -> ClientApp:
    """Returns the app that Flower runs on a client, one process per message."""
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
    body = Array(dtype="uint8", shape=(len(message.body),), stype=_BYTES, data=message.body)
    return RecordDict({HEADER: ConfigRecord({HEADER: message.header()}), BODY: ArrayRecord({BODY: body})})


def from_records(records: RecordDict) -> Message:
    """Returns the message that `to_records` wrote.

    Raises:
        UploadError: the records are not a message of FedGuild.
    """
    return Message.from_header(*_parts(records))


def _parts(records: RecordDict) -> tuple[str, bytes]:
    """Returns the header and the body of a message."""
    try:
        header = records[HEADER][HEADER]
        body = records[BODY][BODY].data  # type: ignore[union-attr]
    except (KeyError, TypeError, AttributeError) as error:
        raise UploadError(f"A Flower message does not come from FedGuild: it lacks {error}.") from error
    return str(header), bytes(body)


def _describe(code: int, reason: str) -> str:
    description = _ERRORS.get(code, f"Flower reports error {code}")
    return description if code == _NODE_GONE or not reason else f"{description} ({printable(reason, 300)})"
