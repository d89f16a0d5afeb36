"""Answers that are too large for their kind, over Flower's own Grid: nothing beyond the limit is taken into memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import pytest
from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedguild.federation.flower import adapter
from fedguild.federation.flower.adapter import GridTransport, to_records
from fedguild.federation.flower.message import Message
from fedguild.federation.flower.transport import NoReply

RUN, ASKED = "0" * 32, "f" * 64
MIB = 2**20


@dataclass
class Server:
    """Flower's runtime interface with one reply, as the Grid's client reaches it; it tells of a reply once."""

    reply: FlowerMessage
    tree: ObjectTree
    objects: dict[str, bytes]
    answers_to: str = ASKED
    told: int = 0
    pulled_bytes: int = 0
    pulls: int = 0
    deleted: list[str] = field(default_factory=list)

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        self.told += 1
        if self.told > 1:
            return PullAppMessagesResponse()
        stripped = message_to_proto(remove_content_from_message(self.reply))
        stripped.metadata.message_id = self.tree.object_id
        stripped.metadata.reply_to_message_id = self.answers_to
        return PullAppMessagesResponse(messages_list=[stripped], message_object_trees=[self.tree])

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        self.pulls += 1
        content = self.objects.get(request.object_id, b"")
        self.pulled_bytes += len(content)
        return PullObjectResponse(object_found=True, object_available=content != b"", object_content=content)

    def ConfirmMessageReceived(  # noqa: N802
        self, request: ConfirmMessageReceivedRequest
    ) -> ConfirmMessageReceivedResponse:
        self.deleted.append(request.message_object_id)
        return ConfirmMessageReceivedResponse()


def served(message: Message) -> tuple[GridTransport, Server]:
    """Returns a transport to a server that has this reply of a client, and the server."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    request = FlowerMessage(RecordDict(), dst_node_id=7, message_type="train")
    request.metadata.__dict__["_message_id"] = ASKED
    reply = FlowerMessage(to_records(message), reply_to=request)
    server = Server(
        reply, get_object_tree(reply), {id: nested.deflate() for id, nested in get_all_nested_objects(reply).items()}
    )
    grid = HttpGrid("127.0.0.1:1", insecure=True, token="test")
    grid._run, grid._client = Run.create_empty(1), server  # type: ignore[assignment]
    return GridTransport(grid), server


def reply_of(body: bytes, **metadata: Any) -> Message:
    return Message("train", RUN, 1, 0, metadata=metadata, body=body)


def noise(count: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "big")).digest() for number in range(count // 32))


def refused(reply: Message | NoReply | None) -> str:
    assert isinstance(reply, NoReply)
    return reply.reason


def test_a_reply_within_its_limit_is_read() -> None:
    message = reply_of(noise(12 * MIB), steps=3)
    transport, server = served(message)
    assert transport.poll(ASKED, 13 * MIB) == message
    assert server.deleted == [server.tree.object_id]
    server.told = 0
    assert transport.poll(ASKED) == message, "the Grid's client is its own again"


def test_a_reply_beyond_its_limit_is_not_taken_into_memory() -> None:
    transport, server = served(reply_of(noise(48 * MIB)))
    assert refused(transport.poll(ASKED, 8 * MIB)) == (
        f"its answer has more than {8 * MIB} bytes, which none of its kind can have"
    )
    assert server.pulled_bytes <= 24 * MIB, "at most one more part for each of two workers"
    assert set(server.deleted) == {server.tree.object_id}, "Flower's server does not keep it either"
    assert isinstance(transport._grid._client, Server)  # type: ignore[attr-defined]


def test_a_header_beyond_the_limit_is_refused() -> None:
    transport, _ = served(reply_of(b"", text="x" * (4 * MIB)))
    assert "more than" in refused(transport.poll(ASKED, MIB))
    transport, _ = served(reply_of(b"", text="x" * MIB))
    assert "more than" in refused(transport.poll(ASKED, MIB)), "also where it is beyond by less than Flower's own frame"


def test_a_part_that_is_repeated_counts_as_often() -> None:
    """One part of 5 MiB can stand for any number of bytes."""
    transport, server = served(reply_of(bytes(60 * MIB)))
    assert server.pulled_bytes == 0
    assert "more than" in refused(transport.poll(ASKED, 16 * MIB))
    assert server.pulled_bytes <= 6 * MIB
    assert set(server.deleted) == {server.tree.object_id}


def test_many_small_parts_are_not_pulled_one_by_one() -> None:
    transport, server = served(reply_of(b"body"))
    for number in range(2000):
        server.tree.children.append(ObjectTree(object_id=f"{number:064x}"))
    assert "more than" in refused(transport.poll(ASKED, MIB))
    assert server.pulls == 0


def test_a_tree_that_is_not_that_of_its_objects_is_no_error() -> None:
    transport, server = served(reply_of(b"body"))
    del server.tree.children[:]
    assert "its answer cannot be read: KeyError" in refused(transport.poll(ASKED, MIB))
    transport, server = served(reply_of(b"body"))
    root = server.tree.object_id
    server.objects[root] = server.objects[root].replace(b"Message", b"Hostile")
    assert "its answer cannot be read: KeyError" in refused(transport.poll(ASKED))


def largest(server: Server) -> str:
    return max(server.objects, key=lambda id: len(server.objects[id]))


def test_an_answer_whose_parts_never_come_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, server = served(reply_of(noise(MIB)))
    del server.objects[largest(server)]
    assert transport.poll(ASKED, 2 * MIB) is None
    assert transport.poll(ASKED, 2 * MIB) is None
    monkeypatch.setattr(adapter, "_GRACE_SECONDS", -1000.0)
    assert "its answer did not arrive as a whole" in refused(transport.poll(ASKED, 2 * MIB))
    assert server.deleted == [server.tree.object_id]
    assert transport.poll(ASKED, 2 * MIB) is None


def test_an_answer_that_comes_slowly_holds_up_nobody() -> None:
    """No poll waits for a part, however many are missing, so that deadlines and the operator's stop are looked at."""
    message = reply_of(noise(32 * MIB), steps=3)
    transport, server = served(message)
    coming = dict(server.objects)
    server.objects = {}
    for polls, (id, content) in enumerate(coming.items(), start=1):
        before = server.pulls
        assert transport.poll(ASKED, 33 * MIB) is None
        assert server.pulls - before <= 3, "it waited for parts"
        assert server.told == 1, f"poll {polls} asked for what Flower's server says once"
        server.objects[id] = content
    assert transport.poll(ASKED, 33 * MIB) == message
    assert server.deleted == [server.tree.object_id]
    assert server.pulled_bytes <= 3 * 33 * MIB


@pytest.mark.parametrize("complete", [True, False])
def test_an_answer_that_nobody_wants_any_more_is_deleted_without_being_read(complete: bool) -> None:
    transport, server = served(reply_of(noise(8 * MIB)))
    if not complete:
        del server.objects[largest(server)]
        assert transport.poll(ASKED, 16 * MIB) is None
    pulled = server.pulled_bytes
    assert "more than 0 bytes" in refused(transport.poll(ASKED, 0))
    assert server.deleted == [server.tree.object_id]
    assert server.pulled_bytes == pulled
    assert transport.poll(ASKED, 0) is None


def test_a_message_that_answers_something_else_is_not_taken_for_the_reply() -> None:
    transport, server = served(reply_of(b"body"))
    server.answers_to = ""
    server.reply.metadata.__dict__["_reply_to_message_id"] = ""
    server.objects = {id: nested.deflate() for id, nested in get_all_nested_objects(server.reply).items()}
    server.tree = get_object_tree(server.reply)
    assert transport.poll(ASKED, MIB) is None
