"""Real processes over TLS with node authentication: the same results as `local`, also after kill -9."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedguild import experiment
from fedguild.config import Config
from fedguild.engines.flower.message import Message
from fedguild.federation.keys import write_key
from fedguild.server.run_log import RoundRecord, RunLog
from tests.engines.flower.faulty_replies import DEADLINE_SECONDS, EVERY_ROUND, LIMIT_BYTES
from tests.engines.flower.federation_processes import FederationProcesses, running, wait_for
from tests.engines.flower.loopback_federation import QUICK, grid_of, serve_on, small_config, trainers_of
from tests.engines.flower.test_equality import memories, newest
from tests.experiment.runs import assert_same, ended, save_model, says

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

ONE_PARTITION = ("data.partition={scheme: dirichlet, alpha: 0.5, minimum: 4}", "evaluation.every=2")
LYING = Path(__file__).parent / "lying"
FAMILIES = {
    "fedit": ("fedit/tiny-tasks", ()),
    "flame": ("flame/tiny-tasks", ()),
    "ub-smoe": ("ub-smoe/tiny-tasks", ()),
    "fedalign-moe": ("fedalign-moe/tiny-tasks", ("evaluation.received=true", "evaluation.pooled=false")),
    "fedamole": ("fedamole/tiny-tasks", ("method.experts=6",)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def config_of(family: str, model: Path, *overrides: str) -> Config:
    preset, extra = FAMILIES[family]
    return small_config(model, *QUICK, *ONE_PARTITION, *extra, *overrides, base=preset)


@pytest.fixture(scope="module")
def guild(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FederationProcesses]:
    with running(tmp_path_factory.mktemp("federation") / "guild", config_of("fedit", model)) as started:
        yield started


@pytest.mark.parametrize("family", FAMILIES)
def test_flower_over_tls_gives_the_results_of_local(
    family: str, guild: FederationProcesses, model: Path, tmp_path: Path
) -> None:
    config = config_of(family, model)
    experiment.run(config, tmp_path / "local")
    guild.set_run(config)
    guild.run()
    found, expected = ended(guild.run_folder), ended(tmp_path / "local")
    identity = (guild.run_folder / "run-id").read_text().strip()
    kept = {}
    for index in range(config.federation.clients):
        kept |= memories(guild.site(index) / "work" / "runs" / identity)
    assert_same(replace(found, memory=kept), newest(expected))
    for index in range(config.federation.clients):
        assert guild.trainer_says(index).count("Loading ") == 1


def test_kill_minus_nine_of_a_trainer_a_node_and_the_server_changes_no_bit(
    guild: FederationProcesses, model: Path, tmp_path: Path
) -> None:
    config = config_of("fedit", model, "federation.rounds=4", "federation.retries=1", "training.steps=60")
    experiment.run(config, tmp_path / "local")
    guild.set_run(config)
    marks = guild.trainer_says(2).count("train, round 2."), guild.trainer_says(2).count("train, round 3.")
    run = guild.begin_run()
    try:
        wait_for(lambda: guild.trainer_says(2).count("train, round 2.") > marks[0], run)
        os.kill(guild.trainer_pid(2), signal.SIGKILL)
        wait_for(lambda: guild.trainer_says(2).count("train, round 3.") > marks[1], run)
        os.kill(guild.pid_of(guild.clients[2], "flower-supernode"), signal.SIGKILL)
        wait_for(lambda: (guild.run_folder / "checkpoints" / "round-00003.checkpoint").exists(), run, 240)
        wait_for(lambda: "train, round 4." in guild.trainer_says(0), run)
        assert guild.server is not None
        os.kill(guild.pid_of(guild.server, "flower-superlink"), signal.SIGKILL)
        assert run.process.wait(120) != 0
    finally:
        run.end()
    guild.server.end()
    assert not (guild.run_folder / "checkpoints" / "round-00004.checkpoint").exists()
    guild.start_server()
    assert "Going on after round 3." in guild.run()
    found, expected = ended(guild.run_folder), ended(tmp_path / "local")
    rounds = [record for record in RunLog(guild.run_folder).read() if isinstance(record, RoundRecord)]
    assert [record.retried for record in rounds] == [[], [2], [2], []]
    assert [(record.rejected, record.strays) for record in rounds] == [([], [])] * 4

    def scores(records: list[dict[str, object]]) -> list[dict[str, object]]:
        return [record for record in records if record["kind"] in ("evaluation", "routing")]

    assert_same(
        replace(found, records=scores(found.records), memory={}),
        replace(expected, records=scores(expected.records), memory={}),
    )


def test_a_client_that_lies_another_way_each_round_is_left_out_each_time(
    guild: FederationProcesses, model: Path, tmp_path: Path
) -> None:
    """The state at the end is that of a run in which this client fails in these rounds."""
    limits = (f"federation.upload_limit_bytes={LIMIT_BYTES}", f"federation.deadline_seconds={DEADLINE_SECONDS}")
    rounds = len(EVERY_ROUND) + 1
    short = ("training.steps=1", "evaluation.every=9", "evaluation.max_examples=2")
    config = config_of("fedit", model, f"federation.rounds={rounds}", *limits, *short)
    guild.set_run(config)
    guild.clients.pop(2).end()
    here = [str(LYING), str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    guild.start_client(2, {"PYTHONPATH": os.pathsep.join(here)})
    try:
        guild.run()
    finally:
        guild.clients.pop(2).end()
        guild.start_client(2)
    *lied, honest = (record for record in RunLog(guild.run_folder).read() if isinstance(record, RoundRecord))
    for record, (_, reason) in zip(lied, EVERY_ROUND.values(), strict=True):
        assert [rejection.client for rejection in record.rejected] == [2]
        says(record.rejected[0].reason, reason)
    late = len(EVERY_ROUND)
    assert [(stray.round, stray.client, stray.dropped) for stray in honest.strays] == [
        (late, 2, "it is 1 round(s) late")
    ]
    left_out = late + 1 if honest.rejected else late
    grid = grid_of(trainers_of(config, tmp_path / "sites"))
    handle = grid.nodes[102].handle

    def failing(message: Message) -> Message | None:
        fails = message.kind == "train" and message.round <= left_out
        return message.reply(failure="left out") if fails else handle(message)

    grid.nodes[102].handle = failing
    serve_on(grid, config, tmp_path / "server")
    found, expected = ended(guild.run_folder), ended(tmp_path / "server/state/run")
    assert_same(replace(found, records=[], memory={}), replace(expected, records=[], memory={}))


def test_a_client_whose_key_is_not_registered_stays_outside(guild: FederationProcesses) -> None:
    site = guild.site(0)
    stranger = guild.folder / "client-009"
    stranger.mkdir()
    for name in ("site.yaml", "ca.pem"):
        (stranger / name).write_bytes((site / name).read_bytes())
    write_key(stranger / "node.key")
    guild.change_site(9, port=guild.ports[0] + 1 if guild.ports[0] + 1 not in guild.ports else guild.ports[0] - 1)
    started = guild.start_client(9)
    try:
        wait_for(lambda: "The node ended" in started.said(), started)
        said = " ".join(started.said().split())
    finally:
        started.end()
        del guild.clients[9]
    assert "does not let this site's key in: it is not registered there" in said
    assert "train" not in (stranger / "work" / "trainer.log").read_text()


def test_a_client_with_another_authoritys_certificate_is_told_so(
    guild: FederationProcesses, model: Path, tmp_path: Path
) -> None:
    other = FederationProcesses(tmp_path / "other", config_of("fedit", model))
    stranger = guild.folder / "client-008"
    stranger.mkdir()
    (stranger / "site.yaml").write_bytes((guild.site(0) / "site.yaml").read_bytes())
    (stranger / "ca.pem").write_bytes((other.site(0) / "ca.pem").read_bytes())
    write_key(stranger / "node.key")
    started = guild.start_client(8)
    try:
        assert started.process.wait(60) == 2
    finally:
        started.end()
        del guild.clients[8]
    assert "was signed by another authority" in started.said()
