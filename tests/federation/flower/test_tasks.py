"""Tasks of Flower's node, taken from its real interface and answered with the installed app."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.fab import Fab
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.start_client_internal import _insert_message

from fedguild.federation.flower import tasks
from fedguild.federation.flower.adapter import make_client_app, to_records
from fedguild.federation.flower.message import Message
from fedguild.federation.flower.tasks import AGENT_APP, CLIENT_APP, Task, TaskSource, answer
from tests.ports import free_ports

RUN, NODE, SERIES = 7, 11, 3
BUNDLE = b"the bundle"
DIGEST = hashlib.sha256(BUNDLE).hexdigest()
APP = make_client_app(lambda request: request.reply(metadata={"answered": request.round}))


class Node:
    """Flower's node in this process, without its connection to a server."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret"
        self.secret.write_bytes(b"s" * 32)
        self.objects = ObjectStoreFactory()
        factory = NodeStateFactory(objectstore_factory=self.objects)
        self.state = factory.state()
        self.state.set_node_id(NODE)
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        app = create_app(state_factory=factory, superexec_auth_secret=self.secret.read_bytes())
        self.server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))

    def receive(self, kind: str = CLIENT_APP) -> None:
        """Puts a message of the server into its inbox, with the run and the bundle that it belongs to."""
        run = replace(Run.create_empty(RUN), fab_hash=DIGEST, series_id=SERIES)
        self.state.store_run(run)
        self.state.store_fab(Fab(DIGEST, BUNDLE, {}))
        self.state.set_run_series_context(SERIES, Context(RUN, NODE, {}, RecordDict(), {}))
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, 1
        content = to_records(Message("train", "ab" * 16, 4, 0, body=b"weights"))
        message = FlowerMessage(content, dst_node_id=NODE, message_type="train")
        message.metadata.__dict__["_run_id"] = RUN
        _insert_message(message, self.state, self.objects.store())
        assert self.state.create_task(task_type=kind, run_id=RUN, fab_hash=DIGEST) is not None

    def reply(self) -> FlowerMessage:
        (reply,) = self.state.get_messages_legacy(is_reply=True)
        return reply


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    thread = threading.Thread(target=node.server.run)
    thread.start()
    while not node.server.started:
        time.sleep(0.01)
    try:
        yield node
    finally:
        node.server.should_exit = True
        thread.join()


def taken(node: Node) -> tuple[TaskSource, Task]:
    source = TaskSource(node.address, node.secret)
    task = source.take(CLIENT_APP, AGENT_APP)
    assert task is not None
    assert task.bundle_sha256 == DIGEST
    assert source.take(CLIENT_APP, AGENT_APP) is None, "taken twice"
    return source, task


def test_a_message_of_the_trusted_app_is_answered_by_the_installed_app(node: Node) -> None:
    node.receive()
    source, task = taken(node)
    handled: list[Message] = []
    app = make_client_app(lambda request: handled.append(request) or request.reply(body=b"trained"))
    assert answer(source, task, app, lambda bundle: "" if bundle == BUNDLE else "foreign") == ""
    assert [(message.round, message.body) for message in handled] == [(4, b"weights")]
    reply = node.reply()
    assert not reply.has_error()


def test_a_message_of_another_app_is_answered_with_an_error_and_not_handled(node: Node) -> None:
    node.receive()
    source, task = taken(node)
    app = make_client_app(lambda request: pytest.fail("the message was handled"))
    assert answer(source, task, app, lambda bundle: "it brings code") == "it brings code"
    error = node.reply().error
    assert (error.code, error.reason) == (7, "it brings code")


def test_a_task_for_agents_is_refused(node: Node) -> None:
    node.receive(AGENT_APP)
    source, task = taken(node)
    assert answer(source, task, APP, lambda bundle: "") == "it is not for clients"
    assert node.reply().error.code == 7


def test_an_app_that_fails_answers_with_an_error(node: Node) -> None:
    def fail(request: Message) -> Message:
        raise OSError("the disk is full")

    node.receive()
    source, task = taken(node)
    assert answer(source, task, make_client_app(fail), lambda bundle: "") == ""
    error = node.reply().error
    assert error.code == 2
    assert "the disk is full" in (error.reason or "")


def test_who_does_not_know_the_secret_gets_no_task(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.receive()
    guessed = node.secret.with_name("guessed")
    guessed.write_bytes(b"g" * 32)
    assert TaskSource(node.address, guessed).take(CLIENT_APP) is None
    assert "401" in capsys.readouterr().err
    assert TaskSource(node.address, node.secret).take(CLIENT_APP) is not None


def test_a_task_is_kept_while_it_is_worked_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its heartbeats end with it, or when Flower has given it up."""
    monkeypatch.setattr(tasks, "HEARTBEAT_SECONDS", 0.01)
    beats: list[int] = []
    acknowledge = node.state.acknowledge_task_heartbeat
    monkeypatch.setattr(node.state, "acknowledge_task_heartbeat", lambda task: beats.append(task) or acknowledge(task))
    node.receive()
    source, task = taken(node)
    source.keep(task)
    assert len(beats) == 1

    def work(request: Message) -> Message:
        deadline = time.monotonic() + 20
        while len(beats) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        return request.reply()

    answer(source, task, make_client_app(work), lambda bundle: "")
    assert len(beats) >= 4
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        source.keep(task)


def test_a_task_that_is_not_worked_on_is_ended_with_the_reason(node: Node) -> None:
    node.receive()
    source, task = taken(node)
    source.fail(task, "for no reason")
    (found,) = node.state.get_tasks()
    assert (found.status.sub_status, found.status.details) == ("failed", "for no reason")


def test_nothing_answers(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 32)
    source = TaskSource(f"127.0.0.1:{free_ports(1)[0]}", tmp_path / "secret")
    assert source.take(CLIENT_APP) is None


def test_tasks_come_one_after_another(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "POLL_SECONDS", 0.0)
    node.receive()
    tasks_of = TaskSource(node.address, node.secret).forever(CLIENT_APP)
    first, second = next(tasks_of), next(tasks_of)
    assert first is not None
    assert second is None
