"""The operations behind `fedguild federation`: start the server, a client or a run, and report the status."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.files import make_folder, require_own, write_json
from fedguild.core.layout import CHECKPOINTS, CONFIG, MEMBERS, OUTCOMES, REGISTERED, RUN
from fedguild.core.locking import holder
from fedguild.core.text import without_colour
from fedguild.federation import commands
from fedguild.federation.audit import AuditLog
from fedguild.federation.checks import is_loopback, require_none, server_faults, site_faults
from fedguild.federation.monitoring import Monitor, ServerFigures, SiteFigures
from fedguild.federation.processes import Child, watch
from fedguild.federation.revocation import SPENT, UNKNOWN, Revocations
from fedguild.federation.site import MonitorSettings, ServerSettings, load_server, load_site
from fedguild.federation.stopping import request_stop, stop_is_requested, withdraw_request
from fedguild.federation.watchdog import Watchdog, dying_with_parent

START_SECONDS = 300.0
"""Time limit for a program that runs to answer: on a busy machine its imports alone can take more than a minute."""
STOP_SECONDS = 120.0
ENROLMENT_SECONDS, FLOWER_SECONDS = 600.0, 120.0
"""Time limits for the registration of keys, and for one of Flower's own commands."""
FLEET_PATH = "/v1/fleet/"
"""The paths that the gateway forwards (`fedguild.federation.flower.gateway.FLEET`)."""
OUTCOME_SECONDS = 10.0
"""Time limit for the outcome of a finished run to appear on disk."""
KEY_REFUSED = "[code: 2004]"
"""Printed by Flower's node when the server refuses its key."""

Echo = Callable[[str], None]
"""Prints a line for the user."""


def run_server(folder: Path, echo: Echo) -> None:
    """Starts Flower's server, registers the clients' keys, opens the port for the clients, and runs until Ctrl-C.

    Raises:
        ConfigError: the folder or this machine has faults; the message names all of them.
        FedGuildError: Flower's server does not start, or ends; or a link in the state's folder leads out of it.
    """
    folder, settings = folder.resolve(), load_server(folder)
    for fault in require_none(server_faults(folder, settings)):
        echo(f"{fault.message} {fault.hint}")
    commands.write_connection(folder, settings)
    environment = commands.server_environment(folder, settings)
    state = folder / settings.state
    require_own(state)

    def child(name: str, command: list[str]) -> Child:
        return Child(name, command, environment, state / f"{name}.log", folder)

    server = child("server", commands.superlink(folder, settings))
    executor = child("executor", commands.server_executor(folder, settings))
    gateway = child("gateway", commands.gateway(folder, settings))
    started: list[Child] = []
    try:
        for each in (server, executor):
            started.append(each)
            each.start()
        _wait_until(server, started, lambda: _is_listening(commands.LOOPBACK, settings.control_port))
        for line in register_keys(folder / settings.nodes, state, environment):
            echo(line)
        started.append(gateway)
        gateway.start()
        _wait_until(gateway, started, lambda: _is_listening(settings.host, settings.port))
        for line in opened(settings):
            echo(line)
        echo(f"The server's log is {server.log}.")
        echo("Ready. Ctrl-C stops it; runs can be resumed from their last complete round.")
        certificates = {"authority": folder / settings.ca_certificate, "server": folder / settings.certificate}
        with monitored(settings.monitor, started, state, echo, ServerFigures, certificates):
            watch(started, echo, restart=False)
    finally:
        for each in reversed(started):
            each.terminate()


@contextmanager
def monitored(
    settings: MonitorSettings,
    children: Sequence[Child],
    folder: Path,
    echo: Echo,
    figures: Callable[[Path], Callable[[], Iterator[Any]]],
    certificates: Mapping[str, Path],
) -> Iterator[None]:
    """Answers `/healthz` and `/metrics` during the block, if a port is set.

    Raises:
        FedGuildError: the port cannot be used, or prometheus-client is not installed.
    """
    if settings.port is None:
        yield
        return
    monitor = Monitor(settings, children, folder, figures(folder), certificates)
    try:
        echo(f"{monitor.url}/healthz and {monitor.url}/metrics are open, without a key.")
        yield
    finally:
        monitor.end()


def opened(settings: ServerSettings) -> list[str]:
    """Returns lines that say which ports a server opens, and to whom."""
    at = f"[{settings.host}]" if ":" in settings.host else settings.host
    whom = "this machine alone" if is_loopback(settings.host) else "whoever reaches this machine"
    return [
        f"Open at https://{at}:{settings.port}, to {whom}: {FLEET_PATH}, which needs a registered key; "
        "every other path answers 403.",
        f"Open at https://{commands.LOOPBACK}:{settings.control_port}, to this machine alone: Flower's control and "
        "runtime interfaces.",
    ]


def register_keys(nodes: Path, state: Path, environment: Mapping[str, str]) -> list[str]:
    """Registers the clients' keys with Flower; returns a line for each that is new, and for each that is shut out.

    Keys that were revoked while Flower's server was down are shut out first, and so are those that are no longer in the
    folder. One that Flower has had before stays out.

    Args:
        state: The folder that records which keys are registered.

    Raises:
        FedGuildError: Flower refuses a file, or does not answer; or the folder has no key, but had some.
    """
    revocations, names = Revocations(state), list[str]()
    keys = {key.stem: key for key in sorted(nodes.glob("*.pub"))}
    contents = {name: key.read_text("utf-8").strip() for name, key in keys.items()}
    registered = _registered(state)
    revoked = registered.keys() & revocations.names()
    changed = sorted(name for name in registered.keys() - revoked if contents.get(name) != registered[name])
    if changed and not keys:
        raise FedGuildError(
            f"{nodes} has no key, but {', '.join(changed)} were registered.",
            "Put the keys back; to shut a client out, use `fedguild federation revoke`.",
        )
    if revoked or changed:
        _shut_out(sorted({*revoked, *changed}), state, environment)
        AuditLog(state).extend("revoked", [{"client": name} for name in changed])
    lines = [f"{name} is shut out: its key was replaced or removed." for name in changed]
    registered = _registered(state)
    new = {name: str(key.resolve()) for name, key in keys.items() if registered.get(name) != contents[name]}
    if not new:
        return lines
    try:
        for name, fault in _enrol({"register": new}, environment):
            if fault == SPENT:
                lines.append(f"{name} stays out: {fault}.")
                continue
            if fault:
                raise FedGuildError(
                    f"Flower refuses the key {keys[name]}: {fault[-300:]}", "It must be a public key (.pub)."
                )
            names.append(name)
            revocations.remove(name)
            registered[name] = contents[name]
    finally:  # at once: for a thousand keys, one by one, the disk took half of the time
        AuditLog(state).extend("registered", [{"client": name} for name in names])
        write_json(state / REGISTERED, registered)
    return [*lines, *(f"{name} is registered." for name in names)]


def revoke(folder: Path, name: str) -> str:
    """Revokes a client's key, even during a run, which accepts nothing more from this client.

    Args:
        folder: The server's folder; its server is up.
        name: The client, `client-002`.

    Returns:
        A line that says what was done.

    Raises:
        FedGuildError: there is no such client, or Flower's server does not answer.
    """
    folder, settings = folder.resolve(), load_server(folder)
    state, key = folder / settings.state, folder / settings.nodes / f"{name}.pub"
    registered, revocations = _registered(state), Revocations(state)
    if not key.is_file() and name not in {*registered, *revocations.names()}:
        known = ", ".join(sorted({*registered, *(each.stem for each in key.parent.glob("*.pub"))})) or "none"
        raise FedGuildError(f"No key is registered for {name}.", f"Registered: {known}.")
    revocations.add(name)
    AuditLog(state).append("revoked", client=name)
    if key.is_file():
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        make_folder(key.parent / "revoked")
        key.replace(key.parent / "revoked" / f"{name}-{stamp}.pub")
    commands.write_connection(folder, settings)
    so_far = f"The run takes nothing from {name} any more, but "
    _shut_out([name], state, commands.server_environment(folder, settings), so_far)
    return f"{name} is out; a new key in {settings.nodes}/{name}.pub lets it in again."


def _registered(state: Path) -> dict[str, str]:
    """Returns the keys that Flower's server may know, by client."""
    path = state / REGISTERED
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def _shut_out(names: Sequence[str], state: Path, environment: Mapping[str, str], so_far: str = "") -> None:
    """Removes clients' keys from Flower's server; until it has, `register_keys` tries again.

    Args:
        so_far: How the message begins if it fails.

    Raises:
        FedGuildError: it does not answer, or refuses.
    """
    try:
        faults = [fault for _, fault in _enrol({"revoke": names}, environment) if fault not in ("", UNKNOWN)]
    except FedGuildError as error:
        faults = [str(error)]
    if faults:
        raise FedGuildError(
            f"{so_far}Flower's server still lets in {', '.join(names)}: {faults[0][-300:]}",
            "The server shuts it out when it starts, before any client can connect; or repeat the command.",
        )
    write_json(state / REGISTERED, {name: key for name, key in _registered(state).items() if name not in names})


def run_client(folder: Path, echo: Echo) -> None:
    """Starts a client's trainer, Flower's node and its executor, restarts each when it ends, and runs until Ctrl-C.

    Raises:
        ConfigError: the folder, this machine or the connection to the server has faults.
        FedGuildError: one of them ends with a fault that only the user can fix, or a link in the working folder leads
            out of it.
    """
    folder, site = folder.resolve(), load_site(folder)
    for fault in require_none(site_faults(folder, site)):
        echo(f"{fault.message} {fault.hint}")
    environment = commands.site_environment(folder, site)
    work = folder / site.work
    require_own(work)
    trainer = Child("trainer", commands.trainer(folder), environment, work / "trainer.log", folder)
    node = Child("node", commands.supernode(folder, site), environment, work / "node.log", folder)
    executor = Child("executor", commands.client_executor(folder, site), environment, work / "executor.log", folder)
    started: list[Child] = []
    try:
        for child in (trainer, node, executor):
            child.start()
            started.append(child)
        echo(f"Client {site.client} of {site.server} is up; its logs are in {work}. Ctrl-C stops it.")
        certificates = {"authority": folder / site.ca_certificate}
        with monitored(site.monitor, started, work, echo, SiteFigures, certificates):
            watch(started, echo, restart=True, explain=exit_reason)
    finally:
        for child in reversed(started):
            child.terminate()


def exit_reason(child: Child) -> str:
    """Returns the likely reason why a client's process ended, in words where Flower prints only a number."""
    if KEY_REFUSED in child.log_tail(15):
        return (
            "\n  The server refuses this site's key: it is not registered there, or an earlier connection with it has "
            "not timed out yet, which takes about a minute."
        )
    return child.log_tail(1)


def run_federation(
    folder: Path, echo: Echo, *, fresh: bool = False, detach: bool = False, round: int | None = None
) -> dict[str, Any]:
    """Starts or resumes the run of a server's folder; returns its outcome.

    Ctrl-C stops the run, so that the same command goes on with it; a second Ctrl-C does not wait for that.

    Args:
        folder: The server's folder; its server is up.
        echo: Prints a line for the user.
        detach: Return as soon as the run has started, with the status `started`; it goes on by itself.
        round: Go back to this round of the run.

    Returns:
        `status`: `done`, `stopped` or `started`; and what else is known.

    Raises:
        FedGuildError: the server is not up, the run failed, another run is in progress, or `fresh` is set and a run
            exists.
    """
    folder, settings = folder.resolve(), load_server(folder)
    state = folder / settings.state
    if (busy := holder(state / RUN)) is not None:
        raise FedGuildError(
            f"The run in {state / RUN} is already in progress: {busy}.",
            f"`fedguild federation status {folder}` shows how far it is, `fedguild federation stop {folder}` stops it.",
        )
    begun = (state / RUN / CONFIG).exists()
    if begun and fresh:
        raise FedGuildError(f"{state / RUN} already holds a run.", "Omit --fresh to resume it, or move it away.")
    if begun:
        echo(f"Resuming after round {(_last_round(state / RUN) or 0) if round is None else round}.")
    commands.write_connection(folder, settings)
    commands.write_app(folder)
    environment = commands.server_environment(folder, settings)
    if _nodes(environment) is None:
        raise FedGuildError(
            f"Nothing answers at {commands.LOOPBACK}:{settings.control_port}.",
            f"Start the server: `fedguild federation server {folder}`.",
        )
    for line in register_keys(folder / settings.nodes, state, environment):
        echo(line)
    withdraw_request(state)
    ticket = uuid4().hex
    path = state / OUTCOMES / f"{ticket}.json"
    command = commands.start_run(folder, ticket, stream=not detach, round=round)
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
        preexec_fn=dying_with_parent(),
    ) as run:
        watchdog = Watchdog(run.pid)
        try:
            _follow(run, echo, state, None if detach else path)
        finally:
            watchdog.dismiss()
    if detach:
        if run.returncode:
            raise FedGuildError("Flower did not start the run.", f"Look at {state / 'server.log'}.")
        return {"status": "started", "folder": str(state / RUN), "ticket": ticket}
    if not path.is_file():
        raise FedGuildError(
            "The run's process ended without reporting an outcome.",
            f"Look at {state / 'server.log'}; the same command resumes from the last complete round.",
        )
    echo(f"The audit log's seal is {AuditLog(state).seal}: note it on another machine.")
    outcome: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if outcome["status"] == "failed":
        raise FedGuildError(f"The run stopped: {outcome['message']}", outcome["hint"])
    return outcome


def _follow(run: subprocess.Popen[str], echo: Echo, state: Path, outcome: Path | None) -> None:
    """Prints a run's output to its end; Ctrl-C asks the run to stop, and a second one does not wait for that.

    Args:
        run: Flower's program that starts the run and prints its output.
        outcome: The file that the run writes at its end, to wait for; None does not wait.

    Raises:
        KeyboardInterrupt: the user did not wait.
    """
    assert run.stdout is not None
    asked = False
    while True:
        try:
            for line in run.stdout:
                echo(without_colour(line.rstrip()))
            if outcome is not None:
                _await(outcome, state / RUN, echo)
            return
        except KeyboardInterrupt:
            if asked:
                run.terminate()
                raise
            asked = True
            request_stop(state, "Ctrl-C")
            echo("Stopping the run; Ctrl-C again does not wait for that, and the run still stops.")


def _await(outcome: Path, run: Path, echo: Echo) -> None:
    """Waits for a run's outcome, which its process writes soon after it has let go of the run."""
    deadline = time.monotonic() + OUTCOME_SECONDS
    first, told = None, False
    while not outcome.is_file() and time.monotonic() < deadline:
        if (now := holder(run)) is not None and first in (None, now):
            first, deadline = now, time.monotonic() + OUTCOME_SECONDS
            if not told:
                echo("Flower's server sends no more of the run's output; the run goes on, and this waits for its end.")
                told = True
        time.sleep(0.2)


def stop_federation(folder: Path, echo: Echo, wait_seconds: float = STOP_SECONDS) -> bool:
    """Stops the run of a server's folder, so that `run` can resume it; returns whether there was one.

    Args:
        echo: Prints a line for the user.
        wait_seconds: How long to wait for its end.

    Raises:
        FedGuildError: it has not stopped in that time.
    """
    folder, settings = folder.resolve(), load_server(folder)
    state = folder / settings.state
    busy = holder(state / RUN)
    if busy is None:
        withdraw_request(state)
        echo("No run is in progress.")
        return False
    echo(f"Stopping {busy}.")
    request_stop(state, "fedguild federation stop")
    deadline = time.monotonic() + wait_seconds
    while holder(state / RUN) is not None:
        if time.monotonic() > deadline:
            raise FedGuildError(
                f"The run has not stopped within {wait_seconds:g} s: {busy}.",
                "It stops when it next waits for a client; what it computes itself, for example scores, it finishes.",
            )
        time.sleep(0.2)
    echo(f"Stopped after round {_last_round(state / RUN) or 0}; `fedguild federation run {folder}` goes on with it.")
    return True


@dataclass(frozen=True)
class Status:
    """The status of a federation.

    Attributes:
        up: Whether the server answers.
        nodes: Name, status and time of every registered client, as reported by Flower.
        round: The last complete round; None before a run has begun.
        running: The process of the run in progress, and its start; empty if there is none.
        stopping: Whether it was asked to stop.
        clients: Client -> its description of itself at the start of the run.
        refused: Who was refused since the run was started or resumed, and was not accepted after that: name, node, time
            and reason.
        audit_fault: Why the audit log cannot be trusted, so that `refused` is empty; empty if it can.
    """

    up: bool
    nodes: list[dict[str, Any]] = field(default_factory=list)
    round: int | None = None
    running: str = ""
    stopping: bool = False
    clients: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: list[dict[str, Any]] = field(default_factory=list)
    audit_fault: str = ""


def status_of(folder: Path) -> Status:
    folder, settings = folder.resolve(), load_server(folder)
    commands.write_connection(folder, settings)
    nodes = _nodes(commands.server_environment(folder, settings))
    run = folder / settings.state / RUN
    members, busy, refused, fault = run / MEMBERS, holder(run), [], ""
    try:
        refused = _refused(AuditLog(folder / settings.state))
    except CheckpointError as error:
        fault = error.message
    return Status(
        up=nodes is not None,
        nodes=nodes or [],
        round=_last_round(run),
        running="" if busy is None else str(busy),
        stopping=busy is not None and stop_is_requested(folder / settings.state),
        clients=json.loads(members.read_text("utf-8")) if members.is_file() else {},
        refused=refused,
        audit_fault=fault,
    )


def _refused(audit: AuditLog) -> list[dict[str, Any]]:
    refused: dict[str, dict[str, Any]] = {}
    for entry in audit.read():
        match entry["event"]:
            case "started":
                refused.clear()
            case "accepted" | "joined":
                refused.pop(entry.get("node", ""), None)
            case "refused":
                refused[entry["node"]] = {key: entry[key] for key in ("name", "node", "time", "reason")}
    return list(refused.values())


def _last_round(run: Path) -> int | None:
    """Returns the last complete round of a run from the names of its checkpoints, without importing torch."""
    rounds = [path.stem.removeprefix("round-") for path in (run / CHECKPOINTS).glob("round-*.checkpoint")]
    return max((int(number) for number in rounds if number.isdigit()), default=None)


def _nodes(environment: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Returns the nodes that Flower's server knows; None if it does not answer (`flwr` still exits with 0)."""
    output = _flwr(commands.list_nodes(), environment).stdout
    try:
        listed = json.loads(output[max(0, output.find("{")) :])
    except ValueError:
        return None
    nodes: list[dict[str, Any]] = listed.get("nodes", [])
    return nodes if listed.get("success") else None


def _wait_until(awaited: Child, started: Sequence[Child], condition: Callable[[], bool]) -> None:
    """Waits until `condition` holds, which the process `awaited` is to bring about.

    Raises:
        FedGuildError: one of the started processes ends before, or it takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        for child in started:
            if (status := child.exit_status()) is not None:
                raise FedGuildError(
                    f"The {child.name} ended with status {status}.{child.log_tail()}", f"Its log is {child.log}."
                )
        if condition():
            return
        time.sleep(0.1)
    raise FedGuildError(f"The {awaited.name} does not answer after {START_SECONDS:g} s.{awaited.log_tail()}")


def _is_listening(host: str, port: int) -> bool:
    """Whether a port accepts connections; cheaper than a call of `flwr`."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((reached, port), timeout=1.0):
            return True
    except OSError:
        return False


def _enrol(work: Mapping[str, Any], environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Registers and revokes keys; returns each name with its fault, empty if there is none.

    Raises:
        FedGuildError: Flower's server does not answer.
    """
    process = _finished(commands.enrolment(), environment, ENROLMENT_SECONDS, json.dumps(work))
    answers = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode:
        raise FedGuildError(
            f"Flower's server did not answer: {process.stderr.strip()[-300:]}", "Is `fedguild federation server` up?"
        )
    return [(answer["name"], answer["fault"]) for answer in answers]


def _flwr(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return _finished(command, environment, FLOWER_SECONDS)


def _finished(
    command: list[str], environment: Mapping[str, str], seconds: float, input: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end and returns its output.

    Raises:
        FedGuildError: it did not end in time, and was killed.
    """
    try:
        return subprocess.run(
            command, env=environment, input=input, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        program = " ".join(command[:3])
        raise FedGuildError(
            f"Flower's server did not answer within {seconds:g} s: `{program} …` was ended.",
            "Is the machine very busy, or the server stuck? state/server.log says more; the command can be repeated.",
        ) from error
