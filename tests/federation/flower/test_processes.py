"""Real processes over TLS with node authentication: the results of `local`, and who stays outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml

from fedguild.config import Config
from fedguild.federation import commands
from fedguild.federation.audit import AuditLog
from fedguild.federation.flower.tasks import SERVER_APP, TaskSource
from fedguild.federation.keys import write_key
from fedguild.federation.operations import exit_reason
from fedguild.measuring.log.records import RoundRecord, RunLog
from fedguild.runs import experiment
from tests.engines.equality import newest_memory, site_memory
from tests.federation.flower.federation_processes import (
    Command,
    FederationProcesses,
    running_cheaply,
    wait_for,
)
from tests.federation.flower.foreign_app import ForeignApp, control, error_codes_of_clients, post
from tests.federation.flower.foreign_app import ended as ended_run
from tests.federation.flower.loopback_federation import QUICK, small_config
from tests.ports import free_ports
from tests.runs.runs import assert_same, ended

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def config(olmoe_folder: Path) -> Config:
    return small_config(
        olmoe_folder, *QUICK, "federation.clients=2", "evaluation.every=2", "evaluation.eval_on_start=false"
    )


@pytest.fixture(scope="module")
def lasting(config: Config) -> Config:
    return config.model_copy(update={"training": config.training.model_copy(update={"steps": 20})})


@pytest.fixture(scope="module")
def federation(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FederationProcesses]:
    with running_cheaply(tmp_path_factory.mktemp("processes") / "federation", config) as started:
        yield started


def assert_ended_alike(federation: FederationProcesses, config: Config, local: Path) -> None:
    """Fails unless a federation's last run ended as the one on this machine did, and is its user's alone to read."""
    identity = (federation.run_folder / "run-id").read_text().strip()
    memory = {}
    for index in range(config.federation.clients):
        memory |= site_memory(federation.site(index) / "work" / "runs" / identity)
    assert_same(replace(ended(federation.run_folder), memory=memory), newest_memory(ended(local)))
    private = [federation.folder / "server" / "state", federation.site(1) / "work"]
    files = [path for folder in private for path in folder.rglob("*") if not path.is_symlink()]
    assert any(path.name == "flower.db" for path in files)
    assert not {str(path): oct(path.stat().st_mode) for path in files if path.stat().st_mode & 0o077}


def test_a_run_over_tls_gives_the_results_of_local(config, federation, tmp_path):
    """Killed servers and clients: in `make test-long`."""
    experiment.run(config, tmp_path / "local")
    federation.run()
    assert_ended_alike(federation, config, tmp_path / "local")
    assert federation.trainer_log(1).count("Loading ") == 1


@pytest.mark.long
def test_and_after_kill_minus_nine_of_the_server(lasting, federation, tmp_path):
    experiment.run(lasting, tmp_path / "local")
    federation.set_run(lasting)
    loads, rounds = (federation.trainer_log(1).count(words) for words in ("Loading ", "train, round 2."))
    run = federation.start_run()
    try:
        wait_for(lambda: federation.trainer_log(1).count("train, round 2.") > rounds, run)
        assert federation.server is not None
        os.kill(federation.pid_of(federation.server, "flower-superlink"), signal.SIGKILL)
        assert run.process.wait(120) != 0
    finally:
        run.terminate()
    federation.server.terminate()
    checkpoints = sorted(path.stem for path in (federation.run_folder / "checkpoints").glob("*.checkpoint"))
    assert checkpoints[-1] == "round-00001"
    federation.start_server()
    assert "Resuming after round 1." in federation.run()
    assert_ended_alike(federation, lasting, tmp_path / "local")
    assert federation.trainer_log(1).count("Loading ") <= loads + 1


def test_a_node_whose_key_is_not_registered_stays_outside(federation: FederationProcesses) -> None:
    stranger = federation.site(9)
    stranger.mkdir()
    for name in ("site.yaml", "ca.pem"):
        (stranger / name).write_bytes((federation.site(0) / name).read_bytes())
    write_key(stranger / "node.key")
    federation.change_site(9, port=free_ports(1)[0])
    node = federation.node(9)
    node.start()
    try:
        wait_for(lambda: node.exit_status() is not None)
    finally:
        node.terminate()
    assert "refuses this site's key: it is not registered there" in " ".join(exit_reason(node).split())


def test_a_foreign_app_runs_nowhere(federation: FederationProcesses, config: Config, tmp_path: Path) -> None:
    """With `ca.pem` and no key: from outside, on the server's machine, and where the server lets it start."""
    assert federation.server is not None
    app, authority = ForeignApp(tmp_path / "it-ran"), federation.folder / "server" / "certificates" / "ca.pem"
    outside, inside = (f"127.0.0.1:{port}" for port in federation.ports[:2])
    with control(outside, authority) as client, pytest.raises(httpx.HTTPStatusError, match="403"):
        app.start(client)
    assert post(outside, "/v1/runtime/acquire-task", authority) == 403
    assert post(outside, "/v1/fleet/../control/start-run", authority) == 403
    assert post(outside, "/v1/fleet/pull-messages", authority) == 401
    assert post(inside, "/v1/runtime/acquire-task", authority) == 401

    with control(inside, authority) as client:
        run = ended_run(client, app.start(client))
        assert (run.status.sub_status, run.status.details) == ("failed", "This server runs FedGuild's app only.")
        executor = federation.pid_of(federation.server, "fedguild.federation.server_executor")
        secret = federation.folder / "server" / "state" / "flower" / commands.SECRET
        os.kill(executor, signal.SIGSTOP)
        try:
            app.start(client)
            source = TaskSource(inside, secret, authority)
            task = next(task for task in source.forever(SERVER_APP) if task is not None)
            assert error_codes_of_clients(source, task, config.federation.clients) == [7] * config.federation.clients
            source.fail(task, "the attack is over")
        finally:
            os.kill(executor, signal.SIGCONT)
    assert "Refused an app that is not FedGuild's: it brings code" in federation.executor_log(1)
    assert [entry["event"] for entry in AuditLog(federation.folder / "server" / "state").read()].count("foreign") == 1
    assert not app.mark.exists()
    exec(app.code, {})
    assert app.mark.exists(), "the mark shows nothing"


@pytest.mark.long
def test_a_run_is_stopped_and_a_key_is_revoked(federation: FederationProcesses, lasting: Config) -> None:
    """A second `run` is refused meanwhile; after the revocation the run goes on without its client, until Ctrl-C.

    The last test of this federation, which has lost a client then.
    """
    rounds = lasting.federation.model_copy(update={"rounds": 60})
    federation.set_run(lasting.model_copy(update={"federation": rounds}))
    server = str(federation.folder / "server")

    def command(*words: str) -> Command:
        return Command(["federation", *words], federation.folder / f"{words[0]}.out")

    def last() -> int:
        return max((record.round for record in complete()), default=0)

    def complete() -> list[RoundRecord]:
        return [record for record in RunLog(federation.run_folder).read() if isinstance(record, RoundRecord)]

    def stopped(run: Command) -> None:
        stop = command("stop", server)
        assert stop.process.wait(120) == 0, stop.output()
        assert run.process.wait(60) == 130, run.output()

    run = federation.start_run()
    try:
        wait_for(lambda: last() >= 1, run)
        second = command("run", server)
        assert second.process.wait(60) == 2
        assert "is already in progress: process" in " ".join(second.output().split())
        stopped(run)
    finally:
        run.terminate()
    revoke = command("revoke", server, "client-000")
    assert revoke.process.wait(60) == 0, revoke.output()
    assert "client-000 is out" in revoke.output()
    path = federation.folder / "server" / "server.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "grace_seconds": 1, "reconnect_seconds": 0}))
    before, run = last(), federation.start_run()
    try:
        wait_for(lambda: last() > before, run)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(120) == 130, run.output()
        assert "The run was stopped by its operator" in run.output()
    finally:
        run.terminate()
    assert [rejection.client for rejection in complete()[-1].rejected] == [0]
