"""Faults of clients and of the network, on the loopback Grid with the real trainer code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message as FlowerMessage

from fedguild.config import Config
from fedguild.core.errors import ConfigError, QuorumError
from fedguild.federation.audit import AuditLog
from fedguild.federation.flower import engine, ipc, replies
from fedguild.federation.flower.message import Message
from fedguild.federation.revocation import Revocations
from fedguild.federation.schema import HEADER_BYTES
from fedguild.federation.trainer_service import TrainerService
from fedguild.measuring.log.records import ClientRecord, RoundRecord, RunLog
from fedguild.runs import experiment
from tests.federation.flower.faulty_replies import FAULTS, LIMIT_BYTES, poison, with_upload
from tests.federation.flower.loopback import LoopbackGrid, LoopbackNode
from tests.federation.flower.loopback_federation import QUICK, Lines, grid_of, serve_on, small_config, trainers_of
from tests.runs.runs import Ended, Killed, assert_same, ended, kill_at, says

Change = Callable[[Message], Message | None]


class Clock:
    """A clock that advances only while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.ends = 0.0, math.inf
        self.due: list[tuple[float, Callable[[], Any]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.125)
        assert self.now < self.ends, "somebody waits for ever"
        while self.due and self.due[0][0] <= self.now:
            self.due.pop(0)[1]()

    def after(self, seconds: float, event: Callable[[], Any]) -> None:
        """Calls `event` in so many seconds; events are added in the order of their times."""
        self.due.append((self.now + seconds, event))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the engine and of the registry, so that no test waits."""
    clock = Clock()
    for module in ("engine", "client_registry"):
        monkeypatch.setattr(f"fedguild.federation.flower.{module}.time", clock)
    return clock


@pytest.fixture(scope="module")
def config(olmoe_folder: Path) -> Config:
    extra = ("evaluation.every=99", "evaluation.max_examples=2", "training.steps=1")
    return small_config(olmoe_folder, *QUICK, *extra, base="fedit/tiny-tasks")


_LOCAL: dict[str, Ended] = {}


@pytest.fixture
def local(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The config's run on `local`, without the clients' memory."""
    if config.model.path not in _LOCAL:
        folder = tmp_path_factory.mktemp("local") / "run"
        experiment.run(config, folder)
        _LOCAL[config.model.path] = replace(ended(folder), memory={})
    return _LOCAL[config.model.path]


def changed(config: Config, section: str, **changes: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def federation(config: Config, folder: Path, **client_two: Any) -> tuple[LoopbackGrid, list[TrainerService]]:
    trainers = trainers_of(config, folder, [{}, {}, client_two])
    return grid_of(trainers), trainers


def last(grid: LoopbackGrid) -> LoopbackNode:
    return grid.nodes[102]


def change_replies(node: LoopbackNode, rounds: tuple[int, ...], change: Change) -> None:
    honest = node.handle

    def handle(message: Message) -> Message | None:
        reply = honest(message)
        return change(reply) if message.kind == "train" and message.round in rounds and reply is not None else reply

    node.handle = handle


def disconnect(node: LoopbackNode, after_round: int) -> None:
    change_replies(node, (after_round,), lambda reply: setattr(node, "online", False) or reply)


def rounds_of(folder: Path) -> list[RoundRecord]:
    records = RunLog(folder / "state" / "run").read()
    return [record for record in records if isinstance(record, RoundRecord)]


def test_faulty_uploads_are_left_out_and_the_run_goes_on(config, tmp_path, monkeypatch):
    """One fault a round, and none in the last; what is too large is refused before it is decoded."""
    faults = {name: fault for name, fault in FAULTS.items() if name != "too late"}
    config = changed(config, "federation", upload_limit_bytes=LIMIT_BYTES, rounds=len(faults) + 1)
    grid, _ = federation(config, tmp_path)
    for number, (change, _) in enumerate(faults.values(), start=1):
        change_replies(last(grid), (number,), change)
    decoded_bytes: list[int] = []
    decode = engine.decode
    monkeypatch.setattr(engine, "decode", lambda data, *more: decoded_bytes.append(len(data)) or decode(data, *more))
    serve_on(grid, config, tmp_path)
    *faulty, honest = rounds_of(tmp_path)
    for record, (name, (_, reason)) in zip(faulty, faults.items(), strict=True):
        assert [rejection.client for rejection in record.rejected] == [2], name
        says(record.rejected[0].reason, reason)
    assert not honest.rejected
    assert max(decoded_bytes) <= LIMIT_BYTES


def test_scores_that_are_not_public_are_refused_before_anything_is_trained(config: Config, tmp_path: Path) -> None:
    """A server without data has the clients' own models scored; nothing of that waits for the first evaluation."""
    private = changed(config, "evaluation", eval_on_start=False)
    private = changed(private, "privacy", unit="client", noise_multiplier=1.0)
    grid, _ = federation(private, tmp_path)
    with pytest.raises(ConfigError, match="scores of the clients' own models are not public"):
        serve_on(grid, private, tmp_path, server_evaluation=False)
    assert rounds_of(tmp_path) == []


def test_an_upload_that_is_requested_again_is_aggregated_once(config: Config, local: Ended, tmp_path: Path) -> None:
    retrying = changed(config, "federation", retries=1)
    grid, _ = federation(retrying, tmp_path)
    replies: list[Message] = []

    def poison_the_first(reply: Message) -> Message:
        replies.append(reply)
        return with_upload(poison)(reply) if len(replies) == 1 else reply

    change_replies(last(grid), (1, 2), poison_the_first)
    serve_on(grid, retrying, tmp_path)
    first, second = rounds_of(tmp_path)
    assert (first.retried, first.rejected, first.strays) == ([2], [], [])
    assert not second.retried
    assert_same(replace(ended(tmp_path / "state" / "run"), records=[], memory={}), replace(local, records=[]))


@pytest.mark.parametrize(("late", "dropped"), [("drop", "it is 1 round(s) late"), ("next_round", "")])
def test_a_reply_after_the_deadline(late: str, dropped: str, config: Config, tmp_path: Path) -> None:
    hasty = changed(config, "federation", deadline_seconds=4.0, straggler_policy=late, rounds=3)
    grid, _ = federation(hasty, tmp_path)
    first = grid.nodes[100]
    change_replies(first, (1,), lambda reply: grid.withheld.add(102) or reply)
    change_replies(first, (2,), lambda reply: grid.withheld.clear() or reply)
    change_replies(last(grid), (2,), lambda reply: reply.reply(failure="busy"))
    serve_on(grid, hasty, tmp_path)
    first_round, second_round, _ = rounds_of(tmp_path)
    says(first_round.rejected[0].reason, "did not answer within 4 s")
    assert [(stray.round, stray.client, stray.dropped) for stray in second_round.strays] == [(1, 2, dropped)]


def test_a_client_that_was_asked_twice_and_answers_both_times_late(config: Config, tmp_path: Path) -> None:
    """Both arrive in the next round, and count as one."""
    hasty = changed(config, "federation", deadline_seconds=4.0, straggler_policy="next_round", rounds=3, retries=1)
    grid, _ = federation(hasty, tmp_path)
    change_replies(grid.nodes[100], (1,), lambda reply: grid.withheld.add(102) or reply)
    change_replies(grid.nodes[100], (2,), lambda reply: grid.withheld.clear() or reply)
    change_replies(last(grid), (2,), lambda reply: reply.reply(failure="busy"))
    sent = kinds_sent(last(grid))
    serve_on(grid, hasty, tmp_path)
    assert sent.count("train") > 3
    strays = rounds_of(tmp_path)[1].strays
    assert [(stray.round, stray.client) for stray in strays] == [(1, 2)] * 2
    assert sorted(stray.dropped for stray in strays) == ["", "the client's upload of round 1 was aggregated already"]
    assert not list((tmp_path / "state").rglob("*.upload"))


def test_answers_that_nobody_waits_for_any_more_are_deleted(config, tmp_path, monkeypatch):
    """To tasks, questions and probes: else they stay in Flower's database, whatever a client sends."""
    monkeypatch.setattr(replies, "SWEEP_SECONDS", 0.0)
    hasty = changed(config, "federation", deadline_seconds=40.0, rounds=6)
    hasty = changed(hasty, "evaluation", every=1)
    grid, _ = federation(hasty, tmp_path)
    asked: list[tuple[str, int]] = []
    honest = last(grid).handle
    last(grid).handle = lambda message: asked.append((message.kind, message.round)) or honest(message)
    change_replies(grid.nodes[100], (1,), lambda reply: grid.withheld.add(102) or reply)
    change_replies(grid.nodes[100], (5,), lambda reply: grid.withheld.clear() or reply)
    serve_on(grid, hasty, tmp_path, server_evaluation=False, patience_seconds=50.0)
    assert {("train", 1), ("hello", 1), ("score", 1)} <= set(asked)
    assert [len(record.rejected) for record in rounds_of(tmp_path)] == [1, 1, 1, 1, 0, 0]
    assert not grid.replies


def test_few_of_the_requests_that_were_given_up_are_looked_at_at_once() -> None:
    polled: list[str] = []

    class Silent:
        def poll(self, message_id: str, limit_bytes: int | None) -> None:
            assert limit_bytes == 0
            polled.append(message_id)

    given_up = replies.Abandoned(Silent())  # type: ignore[arg-type]
    for number in range(replies.MOST + 100):
        given_up.add(str(number))
    assert len(given_up) == replies.MOST
    for now in (0.0, 1.0, replies.SWEEP_SECONDS):
        given_up.sweep(now)
    assert polled == [str(100 + number) for number in range(2 * replies.AT_ONCE)]
    assert len(given_up) == replies.MOST


def test_a_machine_that_is_gone_is_a_failure_and_not_a_wait(config: Config, tmp_path: Path) -> None:
    grid, _ = federation(config, tmp_path)
    node, honest = last(grid), last(grid).handle

    def handle(message: Message) -> Message | None:
        reply = honest(message)
        if message.kind == "hello":
            node.error = 5
        return reply

    node.handle = handle
    serve_on(grid, config, tmp_path)
    for record in rounds_of(tmp_path):
        says(record.rejected[0].reason, "it is gone: its machine stopped answering")


def test_a_client_that_was_restarted_while_it_worked_is_not_waited_for(config, tmp_path, monkeypatch):
    initialise = engine.FlowerEngine.__init__
    monkeypatch.setattr(
        engine.FlowerEngine, "__init__", lambda *args, **named: initialise(*args, **{**named, "silence_seconds": 0.0})
    )
    grid, _ = federation(config, tmp_path)
    change_replies(last(grid), (1,), lambda reply: None)
    serve_on(grid, config, tmp_path)
    first, second = rounds_of(tmp_path)
    says(first.rejected[0].reason, "it lost its task: it was restarted during the training")
    assert not second.rejected


@pytest.mark.parametrize(
    "failure", [ipc.TRAINER_DIED, pytest.param(f"{ipc.TRAINER_ABSENT} (waited 600 s)", marks=pytest.mark.long)]
)
def test_a_client_whose_trainer_is_killed_while_it_says_who_it_is_is_asked_again(failure, config, tmp_path):
    config = changed(config, "federation", quorum=1.0)
    grid, _ = federation(config, tmp_path)
    honest, left = last(grid).handle, [failure]

    def handle(message: Message) -> Message | None:
        return message.reply(failure=left.pop()) if message.kind == "hello" and left else honest(message)

    last(grid).handle = handle
    lines = Lines()
    serve_on(grid, config, tmp_path, lines)
    assert not left
    assert not [record for record in rounds_of(tmp_path) if record.rejected]
    assert lines.says("A node did not identify itself", failure)
    assert not lines.says("cannot take part")


def test_a_client_that_comes_back_as_another_node_takes_part_again(config: Config, tmp_path: Path) -> None:
    patient = changed(config, "federation", retries=3, rounds=3)
    grid, trainers = federation(patient, tmp_path)

    def move(reply: Message) -> Message:
        last(grid).online = False
        grid.nodes[202] = LoopbackNode(202, trainers[2].handle)
        return reply

    change_replies(last(grid), (1,), move)
    serve_on(grid, patient, tmp_path)
    assert not rounds_of(tmp_path)[-1].rejected


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"methods": ["flame"]}, "the method 'fedit' is not among accept.methods (flame)"),
    "clients": ({"min_clients": 4}, "the uploads of only 3 client(s), below accept.min_clients of 4"),
    "steps": ({"max_steps": 2}, "a round asks for 3 steps, beyond accept.max_steps of 2"),
    "batch": ({"min_batch": 1000}, "below accept.min_batch of 1000"),
    "training": ({"requests": ["score"]}, "'train' is not among accept.requests (score)"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_site_refuses_a_run_and_the_server_says_why(refusal: str, config: Config, tmp_path: Path) -> None:
    accept, reason = REFUSALS[refusal]
    config = changed(changed(config, "training", steps=3), "federation", quorum=1.0)
    grid, _ = federation(config, tmp_path, accept=accept)
    lines = Lines()
    with pytest.raises(QuorumError) as caught:
        serve_on(grid, config, tmp_path, lines, wait_seconds=0.5)
    says(caught.value.message, "client-002", "refused by its site", reason)
    assert lines.says("cannot take part", reason)


def test_a_refusal_is_a_reason_and_not_an_absence(config: Config, tmp_path: Path, clock: Clock) -> None:
    """A client that was turned away is neither waited for nor called absent."""
    grid, _ = federation(config, tmp_path, accept={"methods": ["flame"]})
    lines = Lines()
    serve_on(grid, config, tmp_path, lines, grace_seconds=60.0, reconnect_seconds=120.0)
    assert clock.now < 10
    assert [record.rejected[0].reason for record in rounds_of(tmp_path)] == [
        "refused by its site: the method 'fedit' is not among accept.methods (flame)"
    ] * len(rounds_of(tmp_path))


@pytest.mark.parametrize("refusing", [{0, 1, 2}, {0, 2}])
def test_a_run_that_too_many_refuse_ends_at_once(refusing, config, tmp_path, clock):
    policy = {"accept": {"min_examples": 1000}}
    trainers = trainers_of(config, tmp_path, [policy if index in refusing else {} for index in range(3)])
    with pytest.raises(QuorumError) as caught:
        serve_on(grid_of(trainers), config, tmp_path, wait_seconds=600.0)
    assert clock.now < 1
    says(caught.value.message, f"{len(refusing)} of 3 clients cannot take part, but the run needs 2")
    for index in refusing:
        says(
            caught.value.message, f"client-{index:03d}: refused by its site: a round trains on", "min_examples of 1000"
        )


def test_a_round_that_too_many_refuse_ends_while_others_train(config, tmp_path, clock):
    policy = {"accept": {"leave": ["nothing/*"]}}
    grid = grid_of(trainers_of(config, tmp_path, [{}, policy, policy]))
    change_replies(grid.nodes[100], (1,), lambda reply: None)  # still training
    lines = Lines()
    with pytest.raises(QuorumError) as caught:
        serve_on(grid, config, tmp_path, lines)
    assert clock.now < 2
    says(
        caught.value.message, "2 of 3 clients refuse, and the round needs 2 uploads", "client-001: refused by its site"
    )
    assert lines.says("Round 1: client 2: refused by its site: the tensor", "accept.leave is nothing/*")


def test_scores_that_all_refuse_name_the_reasons(config: Config, tmp_path: Path) -> None:
    policy = {"accept": {"requests": ["train"]}}
    grid = grid_of(trainers_of(config, tmp_path, [policy] * 3))
    with pytest.raises(QuorumError) as caught:
        serve_on(grid, config, tmp_path, server_evaluation=False)
    says(caught.value.message, "client-002: refused by its site: 'score' is not among accept.requests (train)")


def test_a_site_that_is_corrected_takes_part_from_the_next_round_on(config, tmp_path, clock):
    """It keeps its key, and so the node that was turned away; what it hears meanwhile is said once."""
    four = changed(config, "federation", rounds=4)
    grid, _ = federation(four, tmp_path, accept={"methods": ["flame"]})
    refusing, corrected, asked = last(grid).handle, trainers_of(four, tmp_path)[2], []
    last(grid).handle = lambda message: asked.append(message.kind) or refusing(message)

    def pass_time(reply: Message) -> Message:
        clock.now += 70.0
        if reply.round == 2:
            last(grid).handle = corrected.handle
        return reply

    change_replies(grid.nodes[100], (1, 2), pass_time)
    lines = Lines()
    serve_on(grid, four, tmp_path, lines, grace_seconds=3.0)
    assert asked == ["hello", "hello"]
    assert len([line for line in lines.lines if "client-002 cannot take part" in line]) == 1
    assert [len(record.rejected) for record in rounds_of(tmp_path)] == [1, 1, 0, 0]
    audit = AuditLog(tmp_path / "state").read()
    assert [entry["event"] for entry in audit if entry.get("name") == "client-002"] == ["refused", "accepted"]


def test_a_client_whose_key_was_revoked_is_not_asked_again(config: Config, tmp_path: Path, clock: Clock) -> None:
    grid, _ = federation(config, tmp_path)
    Revocations(tmp_path / "state").add("client-002")
    honest, asked = last(grid).handle, []
    last(grid).handle = lambda message: asked.append(message.kind) or honest(message)
    change_replies(grid.nodes[100], (1,), lambda reply: setattr(clock, "now", clock.now + 1000.0) or reply)
    serve_on(grid, config, tmp_path, grace_seconds=3.0)
    assert asked == ["hello"]


@pytest.mark.parametrize(
    ("accept", "reason"),
    [
        ({"leave": ["adapter/*self_attn*"]}, "may not leave: accept.leave is adapter/*self_attn*"),
        ({"max_upload_bytes": 100}, "beyond accept.max_upload_bytes of 100"),
    ],
)
def test_a_site_lets_out_no_more_than_it_says(accept, reason, config, tmp_path):
    grid, _ = federation(config, tmp_path, accept=accept)
    serve_on(grid, config, tmp_path)
    for record in rounds_of(tmp_path):
        says(record.rejected[0].reason, "refused by its site", reason)
    records = [record for record in RunLog(tmp_path / "state" / "run").read() if isinstance(record, ClientRecord)]
    assert all(record.upload_bytes == 0 for record in records if record.client == 2)


def test_a_site_that_only_trains_gives_no_scores_and_takes_no_model_home(config: Config, tmp_path: Path) -> None:
    grid, trainers = federation(config, tmp_path, accept={"requests": ["train"]})
    lines = Lines()
    result = serve_on(grid, config, tmp_path, lines, server_evaluation=False, deliver=True)
    assert set(result.own) == {"client-000", "client-001"}
    assert not any(record.rejected for record in rounds_of(tmp_path))
    assert lines.says("client 2 has no scores: refused by its site: 'score' is not among accept.requests (train)")
    assert lines.says("The model of client 2: refused by its site: 'deliver' is not among accept.requests (train)")
    assert [(trainer.work / "models").exists() for trainer in trainers] == [True, True, False]


def test_a_run_begins_with_a_quorum_and_others_join_at_the_next_round(config, local, tmp_path):
    """The one that comes late weighs by the size that it says when it comes."""
    three = changed(config, "federation", rounds=3)
    grid, _ = federation(three, tmp_path)
    last(grid).online = False
    change_replies(grid.nodes[100], (1,), lambda reply: setattr(last(grid), "online", True) or reply)
    lines = Lines()
    serve_on(grid, three, tmp_path, lines, grace_seconds=3.0, reconnect_seconds=60.0)
    assert lines.says("Continuing without client-002 for now")
    first, *later = rounds_of(tmp_path)
    assert {each.client: each.reason for each in first.rejected} == {2: "it is not connected"}
    assert not any(record.rejected for record in later)
    records = [record for record in RunLog(tmp_path / "state" / "run").read() if isinstance(record, ClientRecord)]
    examples = {record.round: record.examples for record in records if record.client == 2}
    assert examples[1] == 0
    assert examples[2] == examples[3] > 0


def test_a_method_that_begins_with_every_client_waits_for_every_client(config: Config, tmp_path: Path) -> None:
    other = small_config(Path(config.model.path), *QUICK, "evaluation.pooled=false", base="fedmoe/tiny-tasks")
    grid, _ = federation(other, tmp_path)
    last(grid).online = False
    with pytest.raises(QuorumError, match=r"After 5 s these clients are still missing: client-002"):
        serve_on(grid, other, tmp_path, grace_seconds=0.0)


def test_a_client_that_says_nothing_does_not_hold_up_a_round_for_ever(config, tmp_path, clock):
    """Without a deadline of the round: once most have delivered, the others have `patience_seconds`."""
    grid, _ = federation(config, tmp_path)
    change_replies(last(grid), (1,), lambda reply: None)
    answered = last(grid).handle
    last(grid).handle = lambda message: None if message.round == 1 else answered(message)
    serve_on(grid, config, tmp_path, patience_seconds=60.0)
    first, second = rounds_of(tmp_path)
    says(first.rejected[0].reason, "did not answer within 6")
    assert 60.0 <= clock.now < 90.0
    assert not second.rejected


def silent_from(grid: LoopbackGrid, round: int) -> None:
    """The last client answers neither tasks nor questions."""
    answered = last(grid).handle
    last(grid).handle = lambda message: None if message.round >= round else answered(message)


def answers_hello_alone(grid: LoopbackGrid, round: int) -> None:
    """As one does whose machine was restarted and lost its task."""
    change_replies(last(grid), tuple(range(round, 99)), lambda reply: None)


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize(("attack", "waits"), [(silent_from, 60.0), (answers_hello_alone, 30.0)])
def test_a_client_that_is_always_late_is_waited_for_less_and_less(attack, waits, retries, config, tmp_path, clock):
    """Six times in 16 rounds: the wait grows with the logarithm of the rounds; nor is it sent more.

    In rounds 1, 2, 3, 5, 8 and 13, or with a retry twice in round 1 and in rounds 2, 4, 7 and 12.
    """
    longer = changed(config, "federation", rounds=16, retries=retries)
    grid, _ = federation(longer, tmp_path)
    attack(grid, 1)
    sent = kinds_sent(last(grid))
    serve_on(grid, longer, tmp_path, patience_seconds=60.0)
    rounds = rounds_of(tmp_path)
    assert [rejection.client for record in rounds for rejection in record.rejected] == [2] * 16
    says(rounds[3 - retries].rejected[0].reason, "it held up the others 3 times and is waited for again in 1 round")
    assert 6 * waits <= clock.now < 8 * waits, "16 waits before"
    assert sent.count("train") == 6, "what it is sent stays in Flower's database"


def test_a_client_that_was_late_and_is_back_takes_part_as_before(config: Config, tmp_path: Path, clock: Clock) -> None:
    longer = changed(config, "federation", rounds=7)
    grid, _ = federation(longer, tmp_path)
    change_replies(grid.nodes[100], (1, 6), lambda reply: grid.withheld.symmetric_difference_update({102}) or reply)
    change_replies(grid.nodes[100], (4,), lambda reply: grid.withheld.clear() or reply)
    serve_on(grid, longer, tmp_path, patience_seconds=60.0)
    assert [len(record.rejected) for record in rounds_of(tmp_path)] == [1, 1, 1, 1, 0, 1, 1]


def test_a_late_client_is_asked_in_a_round_that_needs_it(config: Config, tmp_path: Path, clock: Clock) -> None:
    """Whoever is left must be more than half, and a quorum: with two of three silent the third decides alone."""
    hasty = changed(config, "federation", rounds=6, deadline_seconds=30.0, quorum=0.3)
    trainers = trainers_of(hasty, tmp_path, [{"accept": {"min_clients": 1}}] * 3)
    grid = grid_of(trainers)
    for node in (101, 102):
        change_replies(grid.nodes[node], tuple(range(1, 7)), lambda reply: None)
    serve_on(grid, hasty, tmp_path)
    assert clock.now >= 6 * 30.0


def test_a_client_that_fails_is_asked_again_and_says_nothing(config, tmp_path, clock):
    """A second attempt, of which most clients are not a part, has the patience of the first."""
    retrying = changed(config, "federation", rounds=1, retries=1)
    grid, trainers = federation(retrying, tmp_path)
    asked: list[Message] = []

    def fails_once(message: Message) -> Message | None:
        asked.append(message)
        if message.round == 0:
            return trainers[2].handle(message)
        return message.reply(failure="busy") if len(asked) == 2 else None

    last(grid).handle = fails_once
    clock.ends = 1000.0
    serve_on(grid, retrying, tmp_path, patience_seconds=60.0)
    says(rounds_of(tmp_path)[0].rejected[0].reason, "did not answer within 6")


def trainer_dies(grid: LoopbackGrid, clock: Clock, request: Message) -> Message:
    """Its node says so after 50 seconds."""
    grid.withheld.add(102)
    clock.after(50.0, grid.withheld.clear)
    return request.reply(failure="its trainer died")


def node_dies(grid: LoopbackGrid, clock: Clock, request: Message) -> Message:
    """Flower says so after 50 seconds, and lets the node reconnect another 100 seconds later."""
    last(grid).online = False
    clock.after(150.0, lambda: setattr(last(grid), "online", True))
    return trainer_dies(grid, clock, request)


def machine_is_restarted(grid: LoopbackGrid, clock: Clock, request: Message) -> None:
    """It answers questions again, but has lost its task."""


@pytest.mark.parametrize("fault", [trainer_dies, node_dies, machine_is_restarted])
def test_a_client_that_dies_and_comes_back_misses_no_round(fault, config, tmp_path, clock):
    """Though the others had to wait for it, and its patience would have ended before it is back."""
    retrying = changed(config, "federation", retries=1)
    grid, trainers = federation(retrying, tmp_path)
    asked: list[int] = []

    def handle(message: Message) -> Message | None:
        if message.kind == "train":
            asked.append(message.round)
            if asked in ([1], [1, 1, 2]):
                return fault(grid, clock, message)
        return trainers[2].handle(message)

    last(grid).handle, clock.ends = handle, 1000.0
    serve_on(grid, retrying, tmp_path, patience_seconds=60.0, reconnect_seconds=120.0)
    assert [(record.retried, record.rejected) for record in rounds_of(tmp_path)] == [([2], [])] * 2


def kinds_sent(node: LoopbackNode) -> list[str]:
    """Returns a list to which the kinds of the requests of a node will be added."""
    kinds: list[str] = []
    honest = node.handle
    node.handle = lambda message: kinds.append(message.kind) or honest(message)
    return kinds


def test_a_client_that_never_gives_scores_is_asked_for_them_less_and_less(config, tmp_path, clock):
    longer = changed(changed(config, "federation", rounds=15), "evaluation", every=1)
    grid, _ = federation(longer, tmp_path)
    change_answers(last(grid), "score", lambda reply: None)
    sent = kinds_sent(last(grid))
    lines = Lines()
    serve_on(grid, longer, tmp_path, lines, server_evaluation=False, patience_seconds=60.0)
    assert lines.says("client 2 has no scores: it held up the others 3 times")
    assert sent.count("score") == 6
    assert clock.now < 60.0 * 8, "16 or more evaluations waited 60 s each before"


def test_one_client_that_answers_at_once_does_not_shut_out_those_that_train(config, tmp_path, clock):
    """The wait for the last begins when most have delivered, of whom one at least has trained."""
    one = changed(config, "federation", rounds=1, quorum=0.3)
    trainers = trainers_of(one, tmp_path, [{"accept": {"min_clients": 1}}] * 3)
    grid = grid_of(trainers)

    def answer_later(node: LoopbackNode, seconds: float) -> None:
        def handle(message: Message) -> Message | None:
            reply = trainers[node.id - 100].handle(message)
            if message.kind == "train":
                grid.withheld.add(node.id)
                release.append((clock.now + seconds, node.id))
            return reply

        node.handle = handle

    release: list[tuple[float, int]] = []
    answer_later(grid.nodes[100], 1000.0)
    answer_later(grid.nodes[101], 5000.0)
    sleep = clock.sleep

    def sleep_and_release(seconds: float) -> None:
        sleep(seconds + 10.0)
        grid.withheld -= {node for due, node in release if clock.now >= due}

    clock.sleep = sleep_and_release  # type: ignore[method-assign]
    serve_on(grid, one, tmp_path, patience_seconds=60.0)
    assert not rounds_of(tmp_path)[0].rejected


def test_a_key_registered_for_one_client_cannot_speak_for_another(config: Config, tmp_path: Path) -> None:
    config = changed(config, "federation", quorum=1.0)
    grid, _ = federation(config, tmp_path)
    last(grid).name = "client-001"
    with pytest.raises(QuorumError, match="its key was registered for client-001, but it claims to be client-002"):
        serve_on(grid, config, tmp_path, wait_seconds=0.5)


def test_two_machines_cannot_be_one_client(config: Config, tmp_path: Path) -> None:
    grid, trainers = federation(config, tmp_path)
    grid.nodes[300] = LoopbackNode(300, trainers[0].handle)
    lines = Lines()
    serve_on(grid, config, tmp_path, lines)
    assert lines.says("another node is already client-000")


def test_a_run_below_its_quorum_stops_and_goes_on_when_the_clients_are_back(config, local, tmp_path):
    strict = changed(config, "federation", quorum=1.0)
    grid, trainers = federation(strict, tmp_path)
    change_replies(last(grid), (2,), lambda reply: reply.reply(failure="the disk is full"))
    with pytest.raises(QuorumError, match="client-002: the disk is full"):
        serve_on(grid, strict, tmp_path)
    assert len(rounds_of(tmp_path)) == 1
    serve_on(grid_of(trainers), strict, tmp_path)
    assert_same(replace(ended(tmp_path / "state" / "run"), memory={}), local)


@pytest.mark.parametrize(
    "moment",
    [
        "fedguild.server.checkpoint.save",
        pytest.param("fedguild.measuring.log.records.RunLog.append", marks=pytest.mark.long),
    ],
)
def test_a_server_that_is_killed_goes_on_to_the_same_bits(moment, config, local, tmp_path):
    """And another config does not go on with its run."""
    grid, trainers = federation(config, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, moment, 3)
        with pytest.raises(Killed):
            serve_on(grid, config, tmp_path)
    with pytest.raises(ConfigError, match=r"run\.yaml is not the config that the run in .* started with"):
        serve_on(grid_of(trainers), config.model_copy(update={"seed": config.seed + 1}), tmp_path)
    serve_on(grid_of(trainers), config, tmp_path)
    assert_same(replace(ended(tmp_path / "state" / "run"), memory={}), local)


def test_a_client_that_is_away_is_waited_for_once(config: Config, tmp_path: Path, clock: Clock) -> None:
    longer = changed(config, "federation", rounds=3)
    grid, _ = federation(longer, tmp_path)
    disconnect(last(grid), after_round=1)
    serve_on(grid, longer, tmp_path, reconnect_seconds=60.0)
    assert [len(record.rejected) for record in rounds_of(tmp_path)] == [0, 1, 1]
    assert 60.0 <= clock.now < 120.0, "waited for in the second round, not again in the third"


def change_answers(node: LoopbackNode, kind: str, change: Change) -> None:
    honest = node.handle

    def handle(message: Message) -> Message | None:
        reply = honest(message)
        return change(reply) if message.kind == kind and reply is not None else reply

    node.handle = handle


def test_an_answer_that_is_too_large_for_its_kind_is_that_clients_failure(config: Config, tmp_path: Path) -> None:
    grid, _ = federation(config, tmp_path)
    for kind, size_bytes in (("score", HEADER_BYTES), ("deliver", 2**20), ("train", HEADER_BYTES + 2**26)):
        change_answers(last(grid), kind, lambda reply, size=size_bytes: replace(reply, body=bytes(size)))
    lines = Lines()
    result = serve_on(grid, config, tmp_path, lines, server_evaluation=False, deliver=True)
    assert set(result.own) == {"client-000", "client-001"}
    for record in rounds_of(tmp_path):
        says(record.rejected[0].reason, "its answer has more than", "which none of its kind can have")
    assert lines.says("client 2 has no scores: its answer has more than 16777216 bytes")
    assert lines.says("The model of client 2: its answer has more than 1048576 bytes")


def test_a_description_that_is_too_large_does_not_let_a_node_in(config: Config, tmp_path: Path) -> None:
    grid, _ = federation(config, tmp_path)
    change_answers(last(grid), "hello", lambda reply: replace(reply, body=bytes(2**20)))
    lines = Lines()
    serve_on(grid, config, tmp_path, lines, grace_seconds=0.0)
    assert lines.says("A node did not identify itself: its answer has more than 1048576 bytes")
    assert all(record.rejected for record in rounds_of(tmp_path))


@pytest.mark.parametrize(
    "kind", ["train", "score", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("hello", "deliver"))]
)
def test_a_node_that_is_gone_when_a_message_is_sent_stops_nothing(kind, config, tmp_path, monkeypatch):
    """Flower takes no message for a node whose key was revoked after the last look at who is there."""
    grid, _ = federation(config, tmp_path)
    push = grid.push_messages
    kinds = {"hello": "query", "train": "train", "score": "evaluate", "deliver": "evaluate.deliver"}

    def take(messages: Iterable[FlowerMessage]) -> list[str]:
        (message,) = messages
        gone = message.metadata.dst_node_id == 102 and message.metadata.message_type == kinds[kind]
        return [] if gone else push([message])

    monkeypatch.setattr(grid, "push_messages", take)
    lines = Lines()
    result = serve_on(grid, config, tmp_path, lines, server_evaluation=False, deliver=True, grace_seconds=0.0)
    assert set(result.own) >= {"client-000", "client-001"}
    reason = "Flower did not accept a message"
    if kind == "train":
        assert all(reason in record.rejected[0].reason for record in rounds_of(tmp_path))
    else:
        assert lines.says(reason)


def test_a_client_that_gives_no_scores_is_waited_for_as_long_as_in_training(config, tmp_path, clock):
    grid, _ = federation(config, tmp_path)
    for kind in ("score", "deliver"):
        change_answers(last(grid), kind, lambda reply: None)
    lines = Lines()
    result = serve_on(grid, config, tmp_path, lines, server_evaluation=False, deliver=True, patience_seconds=60.0)
    assert set(result.own) == {"client-000", "client-001"}
    assert lines.says("client 2 has no scores: did not answer within 60 s, when most others had")
    assert lines.says("The model of client 2: did not answer within 60 s, when most others had")
    assert clock.now < 60.0 * 5, "score_seconds is an hour, for every evaluation and for the delivery"
