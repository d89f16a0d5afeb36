"""An app that is not FedGuild's, and what somebody who has `ca.pem` can do to have it run."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.run_pb2 import Run
from flwr.proto.runtime_pb2 import PullTaskInputRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedguild.federation.flower.tasks import SERVER_APP, Task, TaskSource

PROJECT = """[project]
name = "intruder"
version = "1.0.0"
description = "An app of somebody else"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "nobody"

[tool.flwr.app.components]
serverapp = "intruder:server"
clientapp = "intruder:client"

[tool.flwr.app.config]
round = -1
"""
CODE = """
from pathlib import Path

Path({mark!r}).touch()

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server, client = ServerApp(), ClientApp()


@server.main()
def steal(grid, context):
    pass


@client.query()
def give(message, context):
    raise SystemExit("the site's examples")
"""


class ForeignApp:
    """An app that leaves a mark wherever it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.code = CODE.format(mark=str(mark))
        self.bundle = build_fab_from_files({"pyproject.toml": PROJECT.encode(), "intruder.py": self.code.encode()})[0]

    def start(self, client: ControlHttpClient) -> int:
        """Starts a run of it; returns the run's id."""
        return int(client.StartRun(StartRunRequest(fab=Fab(content=self.bundle))).run_id)


@contextmanager
def control(address: str, authority: Path) -> Iterator[ControlHttpClient]:
    """Yields a client of Flower's control interface, as anybody has one who has the authority's certificate."""
    client = ControlHttpClient.from_server_address(
        server_address=address, insecure=False, root_certificates=authority.read_bytes(), interceptors=[]
    )
    try:
        yield client
    finally:
        client.close()


def post(address: str, path: str, authority: Path) -> int:
    trust = ssl.create_default_context(cafile=str(authority))
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    return httpx.post(f"https://{address}{path}", verify=trust, headers=headers, content=b"").status_code


def ended(client: ControlHttpClient, run: int, seconds: float = 30.0) -> Run:
    deadline = time.monotonic() + seconds
    while True:
        found: Run = client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run]
        if found.status.status == "finished":
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def error_codes_of_clients(source: TaskSource, task: Task, clients: int, seconds: float = 90.0) -> list[int]:
    """Asks every client something in the name of a run's server app; returns the codes of their errors, 0 if none."""
    assert task.type == SERVER_APP
    assert source.authority is not None
    grid = HttpGrid(
        runtime_api_address=source.address,
        insecure=False,
        root_certificates=source.authority.read_bytes(),
        token=task.token,
    )
    try:
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        content = RecordDict({"question": ConfigRecord({"question": "which examples do you have?"})})
        deadline = time.monotonic() + seconds
        while len(nodes := list(grid.get_node_ids())) < clients:
            assert time.monotonic() < deadline, f"only {len(nodes)} clients are connected"
            time.sleep(0.2)
        asked = {
            *grid.push_messages([FlowerMessage(content, dst_node_id=node, message_type="query") for node in nodes])
        }
        codes: list[int] = []
        while asked and time.monotonic() < deadline:
            for reply in grid.pull_messages(asked):
                asked.discard(reply.metadata.reply_to_message_id)
                codes.append(reply.error.code if reply.has_error() else 0)
            time.sleep(0.2)
        return codes
    finally:
        grid.close()
