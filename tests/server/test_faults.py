"""Faults between server and clients, on a scripted engine: each ends as documented."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import LocalReport
from fedguild.config.federation import FederationSettings
from fedguild.core.accounting import size_bytes
from fedguild.core.errors import QuorumError
from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.methods.fedit import FedIT
from fedguild.model.info import ModelInfo
from fedguild.privacy.dp.noise import Noise
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Task, Wait, not_needed, too_late
from fedguild.server.method import Method, Roster, Upload
from fedguild.server.private_mean import PrivateMean
from fedguild.server.round import Outcome, RoundSetup, Stray
from fedguild.server.rounds import run_round

CLIENTS = [ClientInfo(index, Budget("all", 4, 2), examples=10) for index in range(6)]
RULES = FederationSettings()
ROUND = 5
GONE = "the client went away"


class Recording(FedIT):
    """FedIT that remembers what it aggregated: (round, client index, value of the first tensor)."""

    def aggregate(self, state: Payload, uploads: Iterator[Upload]) -> Payload:
        self.seen: list[tuple[int, int]] = []

        def watched() -> Iterator[Upload]:
            for upload in uploads:
                self.seen.append((upload.round, upload.client.index))
                yield upload

        return super().aggregate(state, watched())


class Scripted:
    """An engine that honours its terms; `script[attempt][client]` says how a client fails, None that it delivers.

    `early` are deliveries that stand in front of those of the first attempt, `extra` behind them. `speed`
    says in which order clients answer, for `terms.enough`.
    """

    def __init__(
        self,
        *script: Mapping[int, str | float | None],
        early: Sequence[Delivery] = (),
        extra: Sequence[Delivery] = (),
        speed: Sequence[int] = (),
    ) -> None:
        self.script, self.early, self.extra, self.speed = script, list(early), list(extra), list(speed)
        self.asked: list[tuple[list[int], Wait]] = []

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        attempt = len(self.asked)
        self.asked.append(([task.client.index for task in tasks], terms))
        faults = self.script[attempt] if attempt < len(self.script) else {}
        fine = [task.client.index for task in tasks if faults.get(task.client.index) is None]
        fast = sorted(fine, key=lambda index: self.speed.index(index) if index in self.speed else index)[: terms.enough]
        enough = terms.enough is not None and len(fast) == terms.enough
        yield from self.early if attempt == 0 else ()
        for task in tasks:
            plan, fault = method.plan(model, task.client.budget), faults.get(task.client.index)
            if task.client.index in fast:
                yield delivered(method, model, task)
            elif enough:
                yield not_needed(task, plan, len(fast))
            elif isinstance(fault, float):
                yield too_late(task, plan, fault)
            elif fault == "nan":
                yield delivered(method, model, task, float("nan"))
            elif fault != "silent":
                yield Delivery(task, None, plan, failure=fault or "")
        yield from self.extra if attempt == 0 else ()

    def close(self) -> None: ...


def delivered(method: Method, model: ModelInfo, task: Task, value: float | None = None) -> Delivery:
    """What a client sends that adds its index + 1, or another value, to what it got."""
    added = task.client.index + 1 if value is None else value
    upload = Payload({name: tensor + added for name, tensor in task.download.tensors.items()})
    return Delivery(task, upload, method.plan(model, task.client.budget), LocalReport(steps=1, tokens=9))


@pytest.fixture
def model(olmoe_backbone) -> ModelInfo:
    return olmoe_backbone.info


@pytest.fixture
def method() -> Recording:
    return Recording(build_method("fedit", {"rank": 2, "targets": ("q_proj",)}).settings)


@pytest.fixture
def state(method, model) -> Payload:
    return method.start(model, Roster([CLIENTS[0].budget]), torch.Generator().manual_seed(0))


@pytest.fixture
def play(method, state, model):
    def run(
        engine: Scripted, accepted_before: Sequence[int] = (), again=None, filters=(), largest=math.inf, **rules
    ) -> Outcome:
        settings = RULES.model_copy(update=rules)
        setup = RoundSetup(method, model, engine, settings, 3, filters, None if filters else math.inf, again)
        return run_round(ROUND, state, CLIENTS, setup, accepted_before)

    return run


@pytest.fixture
def task(method, state, model):
    def make(round: int, index: int) -> Task:
        return Task(round, CLIENTS[index], method.download(state, model, CLIENTS[index]))

    return make


def moved(outcome: Outcome, state: Payload) -> float:
    """By how much every value of the state went up."""
    steps = torch.cat([(outcome.state.tensors[n] - tensor).reshape(-1) for n, tensor in state.tensors.items()])
    assert torch.allclose(steps, steps[0].expand_as(steps), atol=1e-5)
    return float(steps.mean())


def everybody_is_accounted_for(outcome: Outcome) -> None:
    fates = [*outcome.accepted, *outcome.rejected, *outcome.unneeded]
    assert sorted(fates) == [client.index for client in outcome.asked]
    assert outcome.traffic.keys() == {client.index for client in outcome.asked}


def test_without_faults_nothing_is_recorded_but_the_uploads(play, method, state):
    engine = Scripted()
    outcome = play(engine, deadline_seconds=60.0, retries=2, straggler_policy="next_round", upload_limit_bytes=10**9)
    everybody_is_accounted_for(outcome)
    assert engine.asked == [([0, 1, 2, 3, 4, 5], Wait(60.0, None, 3))]
    assert outcome.accepted == [0, 1, 2, 3, 4, 5]
    assert (outcome.rejected, outcome.unneeded, outcome.retried, outcome.strays) == ({}, [], [], [])
    assert moved(outcome, state) == pytest.approx(3.5, abs=1e-5)


def test_who_misses_the_deadline_is_left_out(play, method, state):
    outcome = play(Scripted({2: 60.0, 4: 60.0}), deadline_seconds=60.0)
    everybody_is_accounted_for(outcome)
    assert outcome.rejected == dict.fromkeys((2, 4), "did not answer within 60 s")
    assert method.seen == [(ROUND, index) for index in (0, 1, 3, 5)]
    assert moved(outcome, state) == pytest.approx((1 + 2 + 4 + 6) / 4, abs=1e-5)


@pytest.mark.parametrize("fault", [GONE, "nan", "silent", 3.0])
def test_a_client_that_fails_once_is_asked_again_and_nothing_is_lost(play, method, state, fault):
    engine = Scripted({1: fault, 3: fault}, {3: fault})
    outcome = play(engine, retries=2)
    everybody_is_accounted_for(outcome)
    assert [asked for asked, _ in engine.asked] == [[0, 1, 2, 3, 4, 5], [1, 3], [3]]
    assert outcome.retried == [1, 3]
    assert outcome.rejected == {}
    assert method.seen == [(ROUND, index) for index in (0, 2, 4, 5, 1, 3)]
    assert [delivery.task.client.index for delivery in outcome.deliveries] == [0, 1, 2, 3, 4, 5]
    assert not any(delivery.failure for delivery in outcome.deliveries)
    assert moved(outcome, state) == pytest.approx(3.5, abs=1e-5)


def test_before_central_noise_an_upload_that_is_not_finite_counts_as_nothing_and_is_not_told(play, state):
    """The others change every value by 1, 3, 4, 5 and 6."""
    quiet = PrivateMean(clip=1e6, noise_multiplier=1e-14, noise=Noise(b"key"))
    outcome = play(Scripted({1: "nan"}), filters=[quiet], quorum=1.0)
    assert outcome.rejected == {}
    assert outcome.accepted == [0, 1, 2, 3, 4, 5]
    assert moved(outcome, state) == pytest.approx(19 / 6, abs=1e-4)


def test_a_further_attempt_asks_who_may_be_asked_before_it_begins(play):
    engine = Scripted(*[dict.fromkeys((1, 2), GONE)] * 3)
    asked = []

    def again(round, clients):
        asked.append((round, [client.index for client in clients], len(engine.asked)))
        return clients[1:]

    outcome = play(engine, retries=2, again=again)
    assert asked == [(ROUND, [1, 2], 1), (ROUND, [1, 2], 2)]
    assert [indices for indices, _ in engine.asked[1:]] == [[2], [2]]
    assert outcome.retried == [2]
    everybody_is_accounted_for(outcome)


def test_retries_can_save_the_quorum_and_without_them_the_round_fails(play, state):
    three = dict.fromkeys((0, 1, 2, 3), GONE)
    assert play(Scripted(three), retries=1).accepted == [0, 1, 2, 3, 4, 5]
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    with pytest.raises(QuorumError, match="2 of 6 clients delivered a valid upload, but the quorum is 3") as caught:
        play(Scripted(three))
    assert f"client-003: {GONE}" in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors.items())


def test_who_answers_nothing_at_all_is_rejected(play):
    outcome = play(Scripted({5: "silent"}))
    everybody_is_accounted_for(outcome)
    assert outcome.rejected == {5: "nothing was delivered"}
    assert outcome.traffic[5].download_bytes == outcome.traffic[0].download_bytes


def test_over_selection_closes_with_the_wanted_number(play, method):
    engine = Scripted(speed=[5, 3, 0, 1, 2, 4])
    outcome = play(engine, client_fraction=0.5, over_selection=0.5)
    everybody_is_accounted_for(outcome)
    assert len(outcome.asked) == 5
    assert [terms for _, terms in engine.asked] == [Wait(None, 3, 2)]
    assert len(outcome.accepted) == len(method.seen) == 3
    assert outcome.rejected == {}
    assert len(outcome.unneeded) == 2
    failures = [delivery.failure for delivery in outcome.deliveries if delivery.failure]
    assert failures == ["not needed: 3 others were faster"] * 2


def test_the_quorum_is_of_the_wanted_not_of_the_asked(play):
    five = play(Scripted(), client_fraction=0.5, over_selection=1.0, quorum=1.0)
    assert len(five.asked) == 6
    assert len(five.accepted) == 3
    with pytest.raises(QuorumError, match="2 of 3 clients"):
        play(Scripted(dict.fromkeys(range(4), GONE)), client_fraction=0.5, over_selection=1.0, quorum=1.0)


def test_an_engine_that_delivers_more_than_enough_adds_nothing(play, method, monkeypatch):
    class Generous(Scripted):
        def train(self, method, model, tasks, terms=WAIT_FOR_ALL):
            return super().train(method, model, tasks)

    outcome = play(Generous(), client_fraction=0.5, over_selection=1.0)
    everybody_is_accounted_for(outcome)
    assert method.seen == [(ROUND, index) for index in (0, 1, 2)]
    assert outcome.unneeded == [3, 4, 5]


@pytest.mark.parametrize("where", ["early", "extra"])
def test_nothing_is_aggregated_twice(play, method, state, model, task, where):
    twin = delivered(method, model, task(ROUND, 2), 100.0)
    outcome = play(Scripted(**{where: [twin]}), straggler_policy="next_round")
    everybody_is_accounted_for(outcome)
    assert sorted(method.seen) == [(ROUND, index) for index in range(6)]
    (stray,) = outcome.strays
    assert stray == Stray(ROUND, 2, size_bytes(twin.upload), "the client's upload of round 5 was aggregated already")
    first_to_come = 100 if where == "early" else 3
    assert moved(outcome, state) == pytest.approx((1 + 2 + 4 + 5 + 6 + first_to_come) / 6, abs=1e-4)


def test_a_late_upload_is_dropped_unless_the_rules_say_otherwise(play, method, model, task, state):
    late = delivered(method, model, task(ROUND - 1, 2), 50.0)
    engine = Scripted({2: GONE}, early=[late])
    dropped = play(engine)
    assert dropped.strays == [Stray(ROUND - 1, 2, size_bytes(late.upload), "it is 1 round(s) late")]
    assert method.seen == [(ROUND, index) for index in (0, 1, 3, 4, 5)]
    kept = play(Scripted({2: GONE}, early=[late]), straggler_policy="next_round")
    assert kept.strays == [Stray(ROUND - 1, 2, size_bytes(late.upload))]
    assert method.seen == [*((ROUND, index) for index in (0, 1, 3, 4, 5)), (ROUND - 1, 2)]
    assert moved(kept, state) == pytest.approx((1 + 2 + 4 + 5 + 6 + 50) / 6, abs=1e-4)
    assert kept.rejected == {2: GONE}
    everybody_is_accounted_for(kept)


def test_a_late_upload_of_a_client_that_is_not_asked_now_is_kept_too(play, method, model, task):
    (absent, *_) = {0, 1, 2, 3, 4, 5} - {c.index for c in play(Scripted(), client_fraction=0.5).asked}
    late = delivered(method, model, task(ROUND - 1, absent))
    outcome = play(Scripted(early=[late]), client_fraction=0.5, straggler_policy="next_round")
    assert (ROUND - 1, absent) == method.seen[-1]
    assert len(outcome.accepted) == 3
    assert absent not in outcome.traffic
    everybody_is_accounted_for(outcome)


@pytest.mark.parametrize(
    ("age", "accepted_before", "reason"),
    [
        (1, (), "the client's upload of round 5 was aggregated instead"),
        (1, (2,), "the client's upload of round 4 was aggregated already"),
        (2, (), "it is 2 round(s) late"),
        (4, (), "it is 4 round(s) late"),
        (-2, (), "it is of round 7, but this is round 5"),
    ],
)
def test_a_late_upload_that_something_stands_in_for_is_dropped(
    play, method, model, task, state, age, accepted_before, reason
):
    late = delivered(method, model, task(ROUND - age, 2), 50.0)
    outcome = play(Scripted(early=[late]), accepted_before, straggler_policy="next_round")
    assert [stray.dropped for stray in outcome.strays] == [reason]
    assert (outcome.strays[0].round, outcome.strays[0].client) == (ROUND - age, 2)
    assert method.seen == [(ROUND, index) for index in range(6)]
    assert moved(outcome, state) == pytest.approx(3.5, abs=1e-5)


def test_of_two_late_uploads_of_one_client_the_second_is_dropped(play, method, model, task):
    late = [delivered(method, model, task(ROUND - 1, 2), value) for value in (50.0, 60.0)]
    outcome = play(Scripted({2: GONE}, early=late), straggler_policy="next_round")
    assert sorted(stray.dropped for stray in outcome.strays) == [
        "",
        "the client's upload of round 4 was aggregated already",
    ]
    assert method.seen.count((ROUND - 1, 2)) == 1


def test_a_late_upload_is_validated_against_its_own_task(play, method, model, task):
    broken = delivered(method, model, task(ROUND - 1, 2), float("inf"))
    outcome = play(Scripted({2: GONE}, early=[broken]), straggler_policy="next_round")
    assert "NaN or infinity" in outcome.strays[0].dropped
    assert (ROUND - 1, 2) not in method.seen


def test_an_upload_of_somebody_who_was_not_asked_is_dropped(play, method, model, task):
    (absent, *_) = {0, 1, 2, 3, 4, 5} - {c.index for c in play(Scripted(), client_fraction=0.5).asked}
    outcome = play(Scripted(early=[delivered(method, model, task(ROUND, absent))]), client_fraction=0.5)
    assert [(stray.client, stray.dropped) for stray in outcome.strays] == [
        (absent, "the client was not asked in this round")
    ]
    assert absent not in outcome.accepted
    everybody_is_accounted_for(outcome)


def test_an_upload_beyond_the_size_limit_is_rejected(play):
    sizes = [play(Scripted()).traffic[index].upload_bytes for index in range(6)]
    assert play(Scripted(), upload_limit_bytes=max(sizes)).rejected == {}
    with pytest.raises(QuorumError, match=f"the upload has {sizes[0]} bytes, beyond the limit of {sizes[0] - 1}"):
        play(Scripted(), upload_limit_bytes=sizes[0] - 1)
