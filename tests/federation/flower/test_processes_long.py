"""Real processes over TLS with node authentication, at length: families of methods, many kills, faulty replies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fedguild.config import Config
from fedguild.core.layout import UPLOADS
from fedguild.federation.flower.message import Message
from fedguild.federation.keys import write_key
from fedguild.measuring.log.records import RoundRecord, RunLog
from fedguild.privacy.secure_sum.session import STEPS
from fedguild.runs import experiment
from tests.engines.equality import newest_memory, site_memory
from tests.federation.flower.faulty_replies import DEADLINE_SECONDS, FAULT_OF_ROUND, FAULTS, LIMIT_BYTES
from tests.federation.flower.federation_processes import FederationProcesses, running, wait_for
from tests.federation.flower.loopback_federation import QUICK, grid_of, serve_on, small_config, trainers_of
from tests.runs.runs import assert_same, ended, says

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ONE_PARTITION = ("data.partition={scheme: dirichlet, alpha: 0.5, minimum: 4}", "evaluation.every=2")
FAULTY_TRAINER = Path(__file__).parent / "faulty_trainer"
FAMILIES = {
    "fedit": ("fedit/tiny-tasks", ()),
    "flame": ("flame/tiny-tasks", ()),
    "ub-smoe": ("ub-smoe/tiny-tasks", ()),
    "fedalign-moe": ("fedalign-moe/tiny-tasks", ("evaluation.received=true", "evaluation.pooled=false")),
    "fedamole": ("fedamole/tiny-tasks", ("method.experts=6",)),
}


def config_of(family: str, model: Path, *overrides: str) -> Config:
    preset, extra = FAMILIES[family]
    return small_config(model, *QUICK, *ONE_PARTITION, *extra, *overrides, base=preset)


@pytest.fixture(scope="module")
def federation(olmoe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FederationProcesses]:
    with running(tmp_path_factory.mktemp("processes") / "federation", config_of("fedit", olmoe_folder)) as started:
        yield started


@pytest.mark.parametrize("family", FAMILIES)
def test_flower_over_tls_gives_the_results_of_local(family, federation, olmoe_folder, tmp_path):
    config = config_of(family, olmoe_folder)
    experiment.run(config, tmp_path / "local")
    federation.set_run(config)
    federation.run()
    identity = (federation.run_folder / "run-id").read_text().strip()
    memory = {}
    for index in range(config.federation.clients):
        memory |= site_memory(federation.site(index) / "work" / "runs" / identity)
    assert_same(replace(ended(federation.run_folder), memory=memory), newest_memory(ended(tmp_path / "local")))
    for index in range(config.federation.clients):
        assert federation.trainer_log(index).count("Loading ") == 1


def test_kill_minus_nine_of_a_trainer_a_node_and_the_server_changes_no_bit(federation, olmoe_folder, tmp_path):
    config = config_of("fedit", olmoe_folder, "federation.rounds=4", "federation.retries=1", "training.steps=60")
    experiment.run(config, tmp_path / "local")
    federation.set_run(config)
    begun = {round: federation.trainer_log(2).count(f"train, round {round}.") for round in (2, 3)}
    run = federation.start_run()
    try:
        wait_for(lambda: federation.trainer_log(2).count("train, round 2.") > begun[2], run)
        os.kill(federation.trainer_pid(2), signal.SIGKILL)
        wait_for(lambda: federation.trainer_log(2).count("train, round 3.") > begun[3], run)
        os.kill(federation.pid_of(federation.clients[2], "flower-supernode"), signal.SIGKILL)
        wait_for(lambda: (federation.run_folder / "checkpoints" / "round-00003.checkpoint").exists(), run, 240)
        wait_for(lambda: "train, round 4." in federation.trainer_log(0), run)
        assert federation.server is not None
        os.kill(federation.pid_of(federation.server, "flower-superlink"), signal.SIGKILL)
        assert run.process.wait(120) != 0
    finally:
        run.terminate()
    federation.server.terminate()
    assert not (federation.run_folder / "checkpoints" / "round-00004.checkpoint").exists()
    federation.start_server()
    assert "Resuming after round 3." in federation.run()
    rounds = [record for record in RunLog(federation.run_folder).read() if isinstance(record, RoundRecord)]
    assert [record.retried for record in rounds] == [[], [2], [2], []]
    assert [(record.rejected, record.strays) for record in rounds] == [([], [])] * 4
    assert_same_results(federation, tmp_path / "local")


def test_kill_minus_nine_of_the_round_loop_while_a_client_holds_its_reply_is_made_good(
    federation, olmoe_folder, tmp_path
):
    """The reply to the loop that is gone reaches nobody; the next loop asks again and gets the same."""
    config = config_of("fedit", olmoe_folder, "federation.rounds=3", "training.steps=60")
    experiment.run(config, tmp_path / "local")
    federation.set_run(config)
    begun = federation.trainer_log(2).count("train, round 2.")
    run = federation.start_run()
    try:
        wait_for(lambda: federation.trainer_log(2).count("train, round 2.") > begun, run)
        assert federation.server is not None
        os.kill(federation.pid_of(federation.server, "flwr-serverapp"), signal.SIGKILL)
        assert run.process.wait(120) != 0
    finally:
        run.terminate()
    assert "Resuming after round 1." in federation.run()
    rounds = [record for record in RunLog(federation.run_folder).read() if isinstance(record, RoundRecord)]
    assert [record.round for record in rounds] == [1, 2, 3]
    assert_same_results(federation, tmp_path / "local")


def assert_same_results(federation: FederationProcesses, local_folder: Path) -> None:
    """State, scores and routing agree bit for bit; timings and the clients' memories may be of other rounds."""
    remote, local = ended(federation.run_folder), ended(local_folder)

    def scores(records: list[dict[str, object]]) -> list[dict[str, object]]:
        return [record for record in records if record["kind"] in ("evaluation", "routing")]

    assert_same(
        replace(remote, records=scores(remote.records), memory={}),
        replace(local, records=scores(local.records), memory={}),
    )


def test_kill_minus_nine_of_the_parents_leaves_no_process_and_all_start_again_at_once(federation, olmoe_folder):
    assert federation.server is not None
    parents = [federation.server.process, federation.clients[2].process]
    families = [psutil.Process(parent.pid).children(recursive=True) for parent in parents]
    for parent in parents:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    _, alive = psutil.wait_procs([member for family in families for member in family], timeout=30)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]
    federation.start_server()
    federation.start_client(2)
    federation.set_run(config_of("fedit", olmoe_folder))
    federation.run()
    rounds = [record for record in RunLog(federation.run_folder).read() if isinstance(record, RoundRecord)]
    assert not rounds[-1].rejected


def test_a_client_with_another_fault_each_round_is_left_out_each_time(federation, olmoe_folder, tmp_path):
    """The state at the end is that of a run in which this client fails in these rounds."""
    limits = (f"federation.upload_limit_bytes={LIMIT_BYTES}", f"federation.deadline_seconds={DEADLINE_SECONDS}")
    late = len(FAULT_OF_ROUND)
    short = (f"federation.rounds={late + 1}", "training.steps=1", "evaluation.every=9", "evaluation.max_examples=2")
    config = config_of("fedit", olmoe_folder, *limits, *short)
    federation.set_run(config)
    federation.clients.pop(2).terminate()
    path = [str(FAULTY_TRAINER), str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    federation.start_client(2, {"PYTHONPATH": os.pathsep.join(path)})
    try:
        federation.run()
    finally:
        federation.clients.pop(2).terminate()
        federation.start_client(2)
    *faulty, honest = (record for record in RunLog(federation.run_folder).read() if isinstance(record, RoundRecord))
    for record, fault in zip(faulty, FAULT_OF_ROUND.values(), strict=True):
        assert [rejection.client for rejection in record.rejected] == [2]
        says(record.rejected[0].reason, FAULTS[fault][1])
    assert [(stray.round, stray.client, stray.dropped) for stray in honest.strays] == [
        (late, 2, "it is 1 round(s) late")
    ]
    left_out = late + 1 if honest.rejected else late
    grid = grid_of(trainers_of(config, tmp_path / "sites"))
    handle = grid.nodes[102].handle

    def fail(message: Message) -> Message | None:
        fails = message.kind == "train" and message.round <= left_out
        return message.reply(failure="left out") if fails else handle(message)

    grid.nodes[102].handle = fail
    serve_on(grid, config, tmp_path / "server")
    remote, expected = ended(federation.run_folder), ended(tmp_path / "server/state/run")
    assert_same(replace(remote, records=[], memory={}), replace(expected, records=[], memory={}))


def test_a_secure_run_over_tls_gives_the_results_of_a_secure_run_here(olmoe_folder: Path, tmp_path: Path) -> None:
    """With the keys that `federation init` writes; every upload that reaches the server is masked."""
    secure = ("federation.secure=true", "federation.budgets=[{name: all, active_experts: 2, rank: 3}]")
    config = config_of("flame", olmoe_folder, *secure)
    experiment.run(config, tmp_path / "local")
    with running(tmp_path / "federation", config) as started:
        started.run()
        remote, local = ended(started.run_folder), ended(tmp_path / "local")
        assert_same(replace(remote, records=[], memory={}), replace(local, records=[], memory={}))
        (whole, *_) = (record for record in RunLog(started.run_folder).read() if isinstance(record, RoundRecord))
        assert whole.rejected == []
        assert not list((started.run_folder / UPLOADS).glob("*")), "an upload of one client lies at the server"
        for index in range(config.federation.clients):
            assert started.trainer_log(index).count("secure, round 1.") == len(STEPS)


def test_a_client_with_another_authoritys_certificate_is_told_so(federation, olmoe_folder, tmp_path):
    other = FederationProcesses(tmp_path / "other", config_of("fedit", olmoe_folder))
    stranger = federation.site(8)
    stranger.mkdir()
    (stranger / "site.yaml").write_bytes((federation.site(0) / "site.yaml").read_bytes())
    (stranger / "ca.pem").write_bytes((other.site(0) / "ca.pem").read_bytes())
    write_key(stranger / "node.key")
    command = federation.start_client(8)
    try:
        assert command.process.wait(60) == 2
    finally:
        command.terminate()
        del federation.clients[8]
    assert "was signed by an authority other than" in command.output()
