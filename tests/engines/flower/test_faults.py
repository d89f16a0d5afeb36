"""Faults of clients and of the network, on the loopback Grid with the real trainer code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedguild import experiment
from fedguild.config import Config
from fedguild.engines.flower.message import Message
from fedguild.errors import ConfigError, QuorumError
from fedguild.federation.trainer_service import TrainerService
from fedguild.model.backbone import Backbone
from fedguild.server.run_log import ClientRecord, RoundRecord, RunLog
from tests.engines.flower.faulty_replies import poison, widen, with_upload
from tests.engines.flower.loopback import LoopbackGrid, LoopbackNode
from tests.engines.flower.loopback_federation import QUICK, Lines, grid_of, serve_on, small_config, trainers_of
from tests.experiment.runs import Killed, assert_same, ended, kill_at, save_model, says

Change = Callable[[Message], Message | None]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    model = save_model(tmp_path_factory.mktemp("model"))
    extra = ("evaluation.every=9", "evaluation.max_examples=2", "training.steps=1")
    return small_config(model, *QUICK, *extra, base="fedit/tiny-tasks")


@pytest.fixture(scope="module")
def backbone(config: Config) -> Backbone:
    from fedguild.setup import load_model

    return load_model(config)


def federation(
    config: Config, folder: Path, backbone: Backbone, **client_two: Any
) -> tuple[LoopbackGrid, list[TrainerService]]:
    """Returns three clients, of which the last has other settings."""
    trainers = trainers_of(config, folder, backbone, [{}, {}, client_two])
    return grid_of(trainers), trainers


def last(grid: LoopbackGrid) -> LoopbackNode:
    """Returns client 2's node."""
    return grid.nodes[102]


def changed(node: LoopbackNode, rounds: tuple[int, ...], change: Change) -> None:
    """Changes a node's replies to the training of some rounds."""
    honest = node.handle

    def handle(message: Message) -> Message | None:
        reply = honest(message)
        return change(reply) if message.kind == "train" and message.round in rounds and reply is not None else reply

    node.handle = handle


def rounds_of(folder: Path) -> list[RoundRecord]:
    records = RunLog(folder / "state" / "run").read()
    return [record for record in records if isinstance(record, RoundRecord)]


WRONG: dict[str, tuple[Change, str]] = {
    "not a number": (with_upload(poison), "has NaN or infinity"),
    "a wrong shape": (with_upload(widen), "has the shape"),
    "damaged bytes": (lambda message: replace(message, body=message.body[:-100]), "cannot be decoded"),
    "another run": (lambda message: replace(message, run="0" * 32), "the upload is of the run '0000"),
    "another round": (lambda message: replace(message, round=7), "the upload is of round 7, but round 1 was asked for"),
    "another client": (lambda message: replace(message, client=0), "this client was not asked for one"),
    "no report": (lambda message: replace(message, metadata={}), "lacks a readable report"),
    "a failure of its own": (lambda message: message.reply(failure="out of memory"), "out of memory"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_upload_is_left_out_and_the_run_goes_on(
    wrong: str, config: Config, backbone: Backbone, tmp_path: Path
) -> None:
    change, reason = WRONG[wrong]
    grid, _ = federation(config, tmp_path, backbone)
    changed(last(grid), (1,), change)
    serve_on(grid, config, tmp_path)
    first, second = rounds_of(tmp_path)
    assert [rejection.client for rejection in first.rejected] == [2]
    says(first.rejected[0].reason, reason)
    assert not second.rejected


def test_an_oversized_upload_is_refused_before_it_is_decoded(
    config: Config, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = config.model_copy(
        update={"federation": config.federation.model_copy(update={"upload_limit_bytes": 100_000})}
    )
    grid, _ = federation(limited, tmp_path, backbone)
    changed(last(grid), (1, 2), lambda message: replace(message, body=b"\0" * 100_001))
    decoded: list[int] = []
    from fedguild.engines.flower import engine

    original = engine.decode
    monkeypatch.setattr(engine, "decode", lambda data, source: decoded.append(len(data)) or original(data, source))
    serve_on(grid, limited, tmp_path)
    for record in rounds_of(tmp_path):
        says(record.rejected[0].reason, "100001 bytes, beyond the limit of 100000")
    assert max(decoded) < 100_001


def test_an_upload_that_is_asked_for_again_is_aggregated_once(
    config: Config, backbone: Backbone, tmp_path: Path
) -> None:
    retrying = config.model_copy(update={"federation": config.federation.model_copy(update={"retries": 1})})
    grid, _ = federation(retrying, tmp_path, backbone)
    calls: list[Message] = []

    def once(message: Message) -> Message:
        calls.append(message)
        return poisoned(message) if len(calls) == 1 else message

    poisoned = with_upload(poison)
    changed(last(grid), (1, 2), once)
    serve_on(grid, retrying, tmp_path)
    first, second = rounds_of(tmp_path)
    assert (first.retried, first.rejected, first.strays) == ([2], [], [])
    assert not second.retried
    experiment.run(config, tmp_path / "local")
    found, expected = ended(tmp_path / "state" / "run"), ended(tmp_path / "local")
    assert_same(replace(found, records=[], memory={}), replace(expected, records=[], memory={}))


@pytest.mark.parametrize(("late", "expected"), [("drop", "it is 1 round(s) late"), ("next_round", "")])
def test_a_reply_after_the_deadline(
    late: str, expected: str, config: Config, backbone: Backbone, tmp_path: Path
) -> None:
    federal = config.federation.model_copy(update={"deadline_seconds": 4.0, "late": late, "rounds": 3})
    hasty = config.model_copy(update={"federation": federal})
    grid, _ = federation(hasty, tmp_path, backbone)
    first_client = grid.nodes[100].handle

    def handle(message: Message) -> Message | None:
        if message.kind == "train" and message.round == 2:
            grid.withheld.clear()
        return first_client(message)

    grid.nodes[100].handle = handle
    changed(grid.nodes[100], (1,), lambda message: grid.withheld.add(102) or message)
    changed(last(grid), (2,), lambda message: message.reply(failure="busy"))
    serve_on(grid, hasty, tmp_path)
    first, second, _ = rounds_of(tmp_path)
    says(first.rejected[0].reason, "did not answer within 4 s")
    assert [(stray.round, stray.client, stray.dropped) for stray in second.strays] == [(1, 2, expected)]


def test_a_machine_that_is_gone_is_a_failure_and_not_a_wait(config: Config, backbone: Backbone, tmp_path: Path) -> None:
    grid, _ = federation(config, tmp_path, backbone)
    node, honest = last(grid), last(grid).handle

    def handle(message: Message) -> Message:
        reply = honest(message)
        if message.kind == "hello":
            node.error = 5
        return reply

    node.handle = handle  # type: ignore[assignment]
    serve_on(grid, config, tmp_path)
    for record in rounds_of(tmp_path):
        says(record.rejected[0].reason, "it is gone: its machine stopped answering")


def test_a_machine_that_is_off_is_not_asked(config: Config, backbone: Backbone, tmp_path: Path) -> None:
    grid, _ = federation(config, tmp_path, backbone)
    changed(last(grid), (1,), lambda message: setattr(last(grid), "online", False) or message)
    serve_on(grid, config, tmp_path)
    first, second = rounds_of(tmp_path)
    assert not first.rejected
    assert second.rejected[0].reason == "it is not connected"


def test_a_client_that_was_restarted_while_it_worked_is_not_waited_for(
    config: Config, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedguild.engines.flower.engine import FlowerEngine

    patient = FlowerEngine.__init__
    monkeypatch.setattr(
        FlowerEngine, "__init__", lambda *given, **named: patient(*given, **{**named, "silence_seconds": 0.0})
    )
    grid, _ = federation(config, tmp_path, backbone)
    changed(last(grid), (1,), lambda message: None)
    serve_on(grid, config, tmp_path)
    first, second = rounds_of(tmp_path)
    says(first.rejected[0].reason, "it lost its task: it was restarted while it worked")
    assert not second.rejected


def test_a_client_that_comes_back_on_another_machine_number_takes_part_again(
    config: Config, backbone: Backbone, tmp_path: Path
) -> None:
    grid, trainers = federation(config, tmp_path, backbone)

    def move(message: Message) -> Message:
        last(grid).online = False
        grid.nodes[202] = LoopbackNode(202, trainers[2].handle)
        return message

    changed(last(grid), (1,), move)
    waiting = config.model_copy(update={"federation": config.federation.model_copy(update={"retries": 3, "rounds": 3})})
    serve_on(grid, waiting, tmp_path)
    assert not rounds_of(tmp_path)[-1].rejected


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"methods": ["flame"]}, "the method 'fedit' is not among accept.methods (flame)"),
    "clients": ({"min_clients": 3}, "the uploads of only 2 client(s), below accept.min_clients of 3"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_site_refuses_a_run_and_the_server_says_why(
    refusal: str, config: Config, backbone: Backbone, tmp_path: Path
) -> None:
    accept, reason = REFUSALS[refusal]
    grid, _ = federation(config, tmp_path, backbone, accept=accept)
    lines = Lines()
    with pytest.raises(QuorumError) as caught:
        serve_on(grid, config, tmp_path, lines, wait_seconds=0.5)
    says(caught.value.message, "client-002", "refused by its site", reason)
    assert lines.says("does not take part", reason)


def test_a_site_refuses_too_many_steps(config: Config, backbone: Backbone, tmp_path: Path) -> None:
    longer = config.model_copy(update={"training": config.training.model_copy(update={"steps": 3})})
    grid, _ = federation(longer, tmp_path, backbone, accept={"max_steps": 2})
    with pytest.raises(QuorumError, match=r"a round asks for 3 steps, beyond accept\.max_steps of 2"):
        serve_on(grid, longer, tmp_path, wait_seconds=0.5)


@pytest.mark.parametrize(
    ("accept", "reason"),
    [
        ({"leave": ["adapter/*self_attn*"]}, "may not leave: accept.leave is adapter/*self_attn*"),
        ({"max_upload_bytes": 100}, "beyond accept.max_upload_bytes of 100"),
    ],
)
def test_a_site_lets_out_no_more_than_it_says(
    accept: dict[str, Any], reason: str, config: Config, backbone: Backbone, tmp_path: Path
) -> None:
    grid, _ = federation(config, tmp_path, backbone, accept=accept)
    serve_on(grid, config, tmp_path)
    for record in rounds_of(tmp_path):
        says(record.rejected[0].reason, "refused by its site", reason)
    sent = [one for one in RunLog(tmp_path / "state" / "run").read() if isinstance(one, ClientRecord)]
    assert all(record.upload_bytes == 0 for record in sent if record.client == 2)


def test_a_key_registered_for_one_client_cannot_speak_for_another(
    config: Config, backbone: Backbone, tmp_path: Path
) -> None:
    grid, _ = federation(config, tmp_path, backbone)
    last(grid).name = "client-001"
    with pytest.raises(QuorumError, match="its key was registered for client-001, but it says that it is client-002"):
        serve_on(grid, config, tmp_path, wait_seconds=0.5)


def test_two_machines_cannot_be_one_client(config: Config, backbone: Backbone, tmp_path: Path) -> None:
    grid, trainers = federation(config, tmp_path, backbone)
    grid.nodes[300] = LoopbackNode(300, trainers[0].handle)
    lines = Lines()
    serve_on(grid, config, tmp_path, lines)
    assert lines.says("another node is client-000 already")


def test_a_run_below_its_quorum_stops_and_goes_on_when_the_clients_are_back(
    config: Config, backbone: Backbone, tmp_path: Path
) -> None:
    strict = config.model_copy(update={"federation": config.federation.model_copy(update={"quorum": 1.0})})
    grid, trainers = federation(strict, tmp_path, backbone)
    changed(last(grid), (2,), lambda message: message.reply(failure="the disk is full"))
    with pytest.raises(QuorumError, match="client-002: the disk is full"):
        serve_on(grid, strict, tmp_path)
    assert len(rounds_of(tmp_path)) == 1
    serve_on(grid_of(trainers), strict, tmp_path)
    experiment.run(strict, tmp_path / "local")
    found, expected = ended(tmp_path / "state" / "run"), ended(tmp_path / "local")
    assert_same(replace(found, memory={}), replace(expected, memory={}))


@pytest.mark.parametrize("moment", ["fedguild.server.checkpoint.save", "fedguild.server.run_log.RunLog.append"])
def test_a_server_that_is_killed_goes_on_to_the_same_bits(
    moment: str, config: Config, backbone: Backbone, tmp_path: Path
) -> None:
    grid, trainers = federation(config, tmp_path, backbone)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, moment, 3)
        with pytest.raises(Killed):
            serve_on(grid, config, tmp_path)
    serve_on(grid_of(trainers), config, tmp_path)
    experiment.run(config, tmp_path / "local")
    found, expected = ended(tmp_path / "state" / "run"), ended(tmp_path / "local")
    assert_same(replace(found, memory={}), replace(expected, memory={}))


def test_another_config_does_not_go_on_with_a_run(config: Config, backbone: Backbone, tmp_path: Path) -> None:
    grid, trainers = federation(config, tmp_path, backbone)
    serve_on(grid, config, tmp_path)
    other = config.model_copy(update={"seed": config.seed + 1})
    with pytest.raises(ConfigError, match=r"run\.yaml is not what the run in .* began with"):
        serve_on(grid_of(trainers), other, tmp_path)


def test_pooled_scores_need_examples_that_do_not_leave(config: Config, backbone: Backbone, tmp_path: Path) -> None:
    asking = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"pooled": True})})
    grid, _ = federation(asking, tmp_path, backbone)
    with pytest.raises(ConfigError, match=r"evaluation\.pooled"):
        serve_on(grid, asking, tmp_path)


def test_a_server_without_data_has_the_clients_score_their_own_models(
    config: Config, backbone: Backbone, tmp_path: Path
) -> None:
    grid, trainers = federation(config, tmp_path, backbone)
    result = serve_on(grid, config, tmp_path, reads_data=False, deliver=True)
    assert set(result.own) == {"client-000", "client-001", "client-002"}
    assert not result.scores
    experiment.run(
        config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"clients": True})}),
        tmp_path / "local",
    )
    for trainer in trainers:
        assert list((trainer.work / "models").iterdir())


class Clock:
    """A clock that only moves while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.125)


def test_a_client_that_is_away_is_waited_for_once(
    config: Config, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("fedguild.engines.flower.engine.time", clock)
    longer = config.model_copy(update={"federation": config.federation.model_copy(update={"rounds": 3})})
    grid, _ = federation(longer, tmp_path, backbone)
    changed(last(grid), (1,), lambda message: setattr(last(grid), "online", False) or message)
    serve_on(grid, longer, tmp_path, reconnect_seconds=60.0)
    assert [len(record.rejected) for record in rounds_of(tmp_path)] == [0, 1, 1]
    assert 60.0 <= clock.now < 120.0, "waited for in the second round, not again in the third"


def test_a_client_that_comes_back_in_time_takes_part(config: Config, backbone: Backbone, tmp_path: Path) -> None:
    grid, _ = federation(config, tmp_path, backbone)
    changed(last(grid), (1,), lambda message: setattr(last(grid), "online", False) or message)
    changed(grid.nodes[100], (2,), lambda message: setattr(last(grid), "online", True) or message)
    serve_on(grid, config, tmp_path, reconnect_seconds=60)
    assert not any(record.rejected for record in rounds_of(tmp_path))
