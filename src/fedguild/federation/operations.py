"""What the commands of a federation do: start the server, a client, a run, and say how things stand."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from fedguild.config.site import load_server, load_site
from fedguild.errors import FedGuildError
from fedguild.federation import commands
from fedguild.federation.checks import require_none, server_faults, site_faults
from fedguild.federation.processes import Child, watch
from fedguild.files import write_json

REGISTERED = "registered.json"
OUTCOMES, RUN, CHECKPOINTS, MEMBERS = "outcomes", "run", "checkpoints", "members.json"
START_SECONDS = 60.0
REGISTERED_BEFORE = "already"
NOT_LET_IN = "[code: 2004]"
"""What Flower's node says where the server refuses its key."""

Tell = Callable[[str], None]


def run_server(folder: Path, tell: Tell) -> None:
    """Starts Flower's server with TLS and node authentication, lets the known keys in, and stays.

    Raises:
        ConfigError: something is wrong with the folder or this machine; all of it is named.
        FedGuildError: Flower's server does not start, or ends.
    """
    folder, settings = folder.resolve(), load_server(folder)
    for fault in require_none(server_faults(folder, settings)):
        tell(f"{fault.message} {fault.cure}")
    commands.write_connection(folder, settings)
    environment = commands.server_environment(folder, settings)
    state = folder / settings.state
    server = Child("server", commands.superlink(folder, settings), environment, state / "server.log", folder)
    server.start()
    try:
        _wait_until_up(server, environment)
        tell(f"The server listens on {settings.host}:{settings.port}; its log is {server.log}.")
        for line in register_keys(folder / settings.nodes, state, environment):
            tell(line)
        tell("Ready. Ctrl-C ends it; the runs go on from their last complete round.")
        watch([server], tell, restart=False)
    finally:
        server.end()


def register_keys(nodes: Path, state: Path, environment: Mapping[str, str]) -> list[str]:
    """Lets the clients' keys in; returns a line for each that is new.

    Args:
        nodes: The folder of the public keys.
        state: Where it is kept which keys are in already.
        environment: Of Flower's programs.

    Raises:
        FedGuildError: Flower refuses a file.
    """
    lines, path = [], state / REGISTERED
    known: dict[str, str] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    for public_key in sorted(nodes.glob("*.pub")):
        content = public_key.read_text("utf-8").strip()
        if known.get(public_key.stem) == content:
            continue
        done = _flwr(commands.register(public_key), environment)
        said = " ".join((done.stdout + done.stderr).split())
        if done.returncode == 0:
            lines.append(f"{public_key.stem} may take part.")
        elif REGISTERED_BEFORE not in said:
            raise FedGuildError(
                f"Flower does not take the key {public_key}: {said[-300:]}", "Send the .pub file, not the key."
            )
        known[public_key.stem] = content
        write_json(path, known)
    return lines


def run_client(folder: Path, tell: Tell) -> None:
    """Starts a client's trainer and Flower's program beside it, starts again what ends, and stays.

    Raises:
        ConfigError: something is wrong with the folder, this machine or the way to the server.
        FedGuildError: one of the two ends again and again.
    """
    folder, site = folder.resolve(), load_site(folder)
    for fault in require_none(site_faults(folder, site)):
        tell(f"{fault.message} {fault.cure}")
    environment = commands.site_environment(folder, site)
    work = folder / site.work
    trainer = Child("trainer", commands.trainer(folder), environment, work / "trainer.log", folder)
    node = Child("node", commands.supernode(folder, site), environment, work / "node.log", folder)
    started: list[Child] = []
    try:
        for child in (trainer, node):
            child.start()
            started.append(child)
        tell(f"Client {site.client} of {site.server} is up; its logs are in {work}. Ctrl-C ends it.")
        watch(started, tell, restart=True, explain=_why)
    finally:
        for child in reversed(started):
            child.end()


def _why(child: Child) -> str:
    """Returns why a client's process may have ended, in words where Flower has a number only."""
    if NOT_LET_IN in child.last_words(15):
        return (
            "\n  The server does not let this site's key in: it is not registered there, or an earlier connection with "
            "it has not timed out yet, which takes about a minute."
        )
    return child.last_words(1)


def run_federation(folder: Path, tell: Tell, *, fresh: bool = False) -> dict[str, Any]:
    """Begins the run of a server's folder, or goes on with it; returns how it ended.

    Args:
        folder: The server's folder; its server is up.
        tell: Prints a line.
        fresh: Insist on a run that has not begun.

    Raises:
        FedGuildError: the server is not up, the run stopped, or it was begun before.
    """
    folder, settings = folder.resolve(), load_server(folder)
    state = folder / settings.state
    begun = (state / RUN / "config.yaml").exists()
    if begun and fresh:
        raise FedGuildError(
            f"{state / RUN} already holds a run.", "Leave out --fresh to go on with it, or move it away."
        )
    if begun:
        tell(f"Going on after round {_last_round(state / RUN) or 0}.")
    commands.write_connection(folder, settings)
    environment = commands.server_environment(folder, settings)
    if _nodes(environment) is None:
        raise FedGuildError(
            f"Nobody answers at {settings.host}:{settings.port}.",
            f"Is `fedguild federation server` up? Start it with {folder}.",
        )
    for line in register_keys(folder / settings.nodes, state, environment):
        tell(line)
    ticket = uuid4().hex
    path = state / OUTCOMES / f"{ticket}.json"
    with subprocess.Popen(
        commands.start_run(folder, ticket),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            tell(line.rstrip())
    due = time.monotonic() + 10.0
    while not path.is_file() and time.monotonic() < due:
        time.sleep(0.2)
    if not path.is_file():
        raise FedGuildError(
            "The run's process is gone and left no word.",
            f"Look at {state / 'server.log'}; the same command goes on from the last complete round.",
        )
    outcome: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if outcome["status"] != "done":
        raise FedGuildError(f"The run stopped: {outcome['message']}", outcome["hint"])
    return outcome


@dataclass(frozen=True)
class Status:
    """How a federation stands.

    Attributes:
        up: Whether the server answers.
        nodes: Name, status and time of every registered client, as Flower has them.
        round: The last complete round; None before a run has begun.
        clients: Client -> what it said of itself at the start of the run.
    """

    up: bool
    nodes: list[dict[str, Any]] = field(default_factory=list)
    round: int | None = None
    clients: dict[str, dict[str, Any]] = field(default_factory=dict)


def status_of(folder: Path) -> Status:
    """Returns how the federation of a server's folder stands."""
    folder, settings = folder.resolve(), load_server(folder)
    commands.write_connection(folder, settings)
    nodes = _nodes(commands.server_environment(folder, settings))
    run = folder / settings.state / RUN
    members = run / MEMBERS
    return Status(
        up=nodes is not None,
        nodes=nodes or [],
        round=_last_round(run),
        clients=json.loads(members.read_text("utf-8")) if members.is_file() else {},
    )


def _last_round(run: Path) -> int | None:
    """Returns the last complete round of a run, without loading what can read its checkpoint."""
    rounds = [path.stem.removeprefix("round-") for path in (run / CHECKPOINTS).glob("round-*.checkpoint")]
    return max((int(number) for number in rounds if number.isdigit()), default=None)


def _nodes(environment: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Returns the nodes that Flower's server knows; None where it does not answer (`flwr` then still exits with 0)."""
    printed = _flwr(commands.list_nodes(), environment).stdout
    try:
        listed = json.loads(printed[max(0, printed.find("{")) :])
    except ValueError:
        return None
    nodes: list[dict[str, Any]] = listed.get("nodes", [])
    return nodes if listed.get("success") else None


def _wait_until_up(server: Child, environment: Mapping[str, str]) -> None:
    due = time.monotonic() + START_SECONDS
    while time.monotonic() < due:
        status = server.ended()
        if status is not None:
            raise FedGuildError(
                f"Flower's server ended with status {status}.{server.last_words()}", f"Log: {server.log}"
            )
        if _nodes(environment) is not None:
            return
        time.sleep(0.5)
    raise FedGuildError(f"Flower's server does not answer after {START_SECONDS:g} s.{server.last_words()}")


def _flwr(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
