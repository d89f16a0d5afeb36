"""Tasks of Flower's server and nodes, which FedGuild takes instead of Flower's own executor (`flower-superexec`).

Flower's executor starts a process for every task and runs in it whatever app the task belongs to. With `--isolation
process` Flower leaves the tasks to anyone who knows the secret of `--superexec-auth-secret-file`. FedGuild's executors
take them, check the app first, and run only the one that is installed with them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.app import Error
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

COMPLETED, FAILED = "completed", "failed"
"""`flwr.common.constant.SubStatus`."""
SERVER_APP, CLIENT_APP, AGENT_APP = "flwr-serverapp", "flwr-clientapp", "flwr-agentapp"
"""Types of tasks; an agent's is taken in order to be refused, since a node waits for the answer to each."""
APP_RAISED, APP_IS_FOREIGN = 2, 7
"""`flwr.common.constant.ErrorCode`."""
POLL_SECONDS = 0.2
HEARTBEAT_SECONDS = 10.0
"""Flower gives a task up after twice 30 s without a heartbeat."""


@dataclass(frozen=True)
class Task:
    """A task that this process has taken.

    Attributes:
        type: `SERVER_APP`, `CLIENT_APP` or `AGENT_APP`.
        bundle_sha256: Digest of the app's bundle, in hexadecimal.
        token: Authorizes its holder to act for the task.
    """

    type: str
    bundle_sha256: str
    token: str


class TaskSource:
    """The tasks of one of Flower's programs.

    Args:
        address: Where the program answers, `host:port`.
        authority: The authority's certificate if it answers over TLS, a PEM file.
    """

    def __init__(self, address: str, secret: Path, authority: Path | None = None) -> None:
        self.address, self.authority = address, authority
        signer = SuperExecAuthHttpInterceptor(
            master_secret=secret.read_bytes(), protected_methods=["/flwr.proto.Runtime/AcquireTask"]
        )
        self._client = self._connect(signer)

    def take(self, *types: str) -> Task | None:
        """Takes the oldest open task of these types; None if there is none, or no answer."""
        try:
            taken = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=types))
        except httpx.TransportError:
            return None
        except httpx.HTTPStatusError as error:
            print(f"{self.address} gives no task: {error}", file=sys.stderr, flush=True)
            return None
        return Task(taken.task.type, taken.task.fab_hash, taken.token) if taken.token else None

    def forever(self, *types: str) -> Iterator[Task | None]:
        while True:
            task = self.take(*types)
            yield task
            if task is None:
                time.sleep(POLL_SECONDS)

    @contextmanager
    def client_of(self, task: Task) -> Iterator[RuntimeHttpClient]:
        client = self._connect(RuntimeTokenHttpInterceptor(task.token))
        try:
            yield client
        finally:
            client.close()

    def keep(self, task: Task) -> None:
        """Tells Flower that a task is in progress, as it must hear every 30 s from the moment it was taken."""
        with self.client_of(task) as client:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def fail(self, task: Task, reason: str) -> None:
        with self.client_of(task) as client:
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=FAILED, details=reason))

    def _connect(self, interceptor: RuntimeTokenHttpInterceptor | SuperExecAuthHttpInterceptor) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.authority is None,
            root_certificates=None if self.authority is None else self.authority.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="FedGuild"), interceptor],
        )


def answer(source: TaskSource, task: Task, app: ClientApp, refusal: Callable[[bytes], str]) -> str:
    """Answers the message of a node's task.

    Args:
        refusal: Returns why a bundle is not that of `app`; empty if it is.

    Returns:
        Why the app was refused; empty if it was not.

    Raises:
        httpx.HTTPError: the node does not answer, or has given the task up.
    """
    with source.client_of(task) as client, _heartbeats(client):
        message, context, _, bundle = pull_task_input(client)
        if reason := refusal(bundle.content) or ("" if task.type == CLIENT_APP else "it is not for clients"):
            reply = FlowerMessage(Error(APP_IS_FOREIGN, reason), reply_to=message)
        else:
            try:
                reply = app(message, context)
            except Exception as error:
                reply = FlowerMessage(Error(APP_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)
        push_message(client, reply, context)
        push_task_output(client, context, FAILED if reason else COMPLETED, reason)
    return reason


@contextmanager
def _heartbeats(client: RuntimeHttpClient) -> Iterator[None]:
    """Sends heartbeats for a task until the context ends or the task is given up."""
    ended = threading.Event()

    def send() -> None:
        while True:
            try:
                if not client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success:
                    return
            except httpx.TransportError:
                pass
            except httpx.HTTPStatusError:
                return
            if ended.wait(HEARTBEAT_SECONDS):
                return

    thread = threading.Thread(target=send, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
