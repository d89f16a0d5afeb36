"""One round against scripted clients: who is asked, what is accepted, what is written down."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import LocalReport
from fedguild.config.federation import FederationSettings
from fedguild.core.codec import encode
from fedguild.core.errors import QuorumError
from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.methods.fedit import FedIT
from fedguild.model.info import ModelInfo
from fedguild.server.diagnosis import SHRINKAGE
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Task, Wait
from fedguild.server.guard import Held, NormBound
from fedguild.server.method import Method, Roster
from fedguild.server.round import Outcome, RoundSetup
from fedguild.server.rounds import run_round

CLIENTS = [ClientInfo(index, Budget("all", 4, 2), examples=10) for index in range(4)]
ASK_ALL = FederationSettings()
FAILED = "the client went away"


class Scripted:
    """An engine whose clients add their index + 1 to what they got, unless the script says otherwise."""

    def __init__(self, script: Mapping[int, Callable[[Payload], Payload | None]] | None = None) -> None:
        self.script = script or {}
        self.tasks: list[Task] = []

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        self.tasks = list(tasks)
        for task in tasks:
            honest = plus(task.download, task.client.index + 1)
            upload = self.script.get(task.client.index, lambda payload: payload)(honest)
            yield Delivery(
                task,
                upload,
                method.plan(model, task.client.budget),
                LocalReport(steps=2, tokens=50 + task.client.index),
                torch.full((2, 8), 0.5) if task.client.index else None,
                failure=FAILED if upload is None else "",
            )


def plus(payload: Payload, value: float) -> Payload:
    return Payload({name: tensor + value for name, tensor in payload.tensors.items()})


def with_nan(payload: Payload) -> Payload:
    name, tensor = next(iter(payload.tensors.items()))
    broken = tensor.clone()
    broken.view(-1)[3] = float("nan")
    return Payload({**payload.tensors, name: broken})


def transposed(payload: Payload) -> Payload:
    name, tensor = next(iter(payload.tensors.items()))
    return Payload({**payload.tensors, name: tensor.T.contiguous()})


def nothing(_: Payload) -> None:
    return None


@pytest.fixture
def model(olmoe_backbone) -> ModelInfo:
    return olmoe_backbone.info


@pytest.fixture
def method() -> Method:
    return build_method("fedit", {"rank": 2, "targets": ("q_proj", "experts")})


@pytest.fixture
def state(method: Method, model: ModelInfo) -> Payload:
    return method.start(model, Roster([CLIENTS[0].budget]), torch.Generator().manual_seed(0))


def play(
    method: Method,
    state: Payload,
    model: ModelInfo,
    engine: Scripted,
    rules: FederationSettings = ASK_ALL,
    clients: Sequence[ClientInfo] = CLIENTS,
    **more: Any,
) -> Outcome:
    return run_round(5, state, clients, RoundSetup(method, model, engine, rules, 3, **more))


def moved(outcome: Outcome, state: Payload) -> float:
    """Returns by how much every value of the state went up, which must be the same for all."""
    steps = torch.cat([(outcome.state.tensors[n] - tensor).reshape(-1) for n, tensor in state.tensors.items()])
    assert torch.allclose(steps, steps[0].expand_as(steps), atol=1e-6)
    return float(steps.mean())


def test_a_round_averages_what_every_client_sent(method, state, model):
    outcome = play(method, state, model, Scripted())
    assert moved(outcome, state) == pytest.approx((1 + 2 + 3 + 4) / 4, abs=1e-6)
    assert outcome.round == 5
    assert outcome.asked == CLIENTS
    assert outcome.rejected == {}
    assert [delivery.task.client.index for delivery in outcome.deliveries] == [0, 1, 2, 3]
    assert outcome.tokens() == {0: 50, 1: 51, 2: 52, 3: 53}
    assert outcome.frequencies().keys() == {1, 2, 3}


def test_an_upload_that_the_guard_leaves_out_is_not_diagnosed(method, state, model, tmp_path):
    """The others' changes are alike in direction, 1, 2 and 3: (1 + 4 + 9) / 3 over 2^2."""
    five = [*CLIENTS, ClientInfo(4, CLIENTS[0].budget, examples=10)]
    engine = Scripted({3: lambda honest: plus(honest, 1e4), 4: nothing})
    rules = FederationSettings(quorum=0.5)
    far = play(method, state, model, engine, rules, five, filters=[Held(tmp_path), NormBound()], diagnose=True)
    assert far.accepted == [0, 1, 2]
    found = {one.name: one.values for one in far.observations}
    assert found[SHRINKAGE].tolist() == pytest.approx([14 / 12] * len(found[SHRINKAGE]))
    assert far.frequencies().keys() == {1, 2}


def test_traffic_is_the_length_of_what_would_be_sent(method, state, model):
    engine = Scripted({2: lambda payload: Payload({**payload.tensors}, {"steps": 7})})
    outcome = play(method, state, model, engine)
    for task in engine.tasks:
        index = task.client.index
        traffic = outcome.traffic[index]
        scalars = {"steps": 7} if index == 2 else {}
        sent = Payload(plus(task.download, index + 1).tensors, scalars)
        assert (traffic.round, traffic.client) == (5, index)
        assert traffic.download_bytes == len(encode(task.download))
        assert traffic.upload_bytes == len(encode(sent))
        assert traffic.upload_by_part["adapter"] == sum(t.numel() * 4 for t in sent.tensors.values())


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (with_nan, r"^'adapter/.*' has NaN or infinity in 1 of its 32 values\.$"),
        (transposed, r"^'adapter/.*' has the shape \[16, 2\], but \[2, 16\] is expected\.$"),
        (lambda payload: Payload({}), r"^the upload lacks .* and \d+ more; expected \d+ tensors\.$"),
        (nothing, f"^{FAILED}$"),
    ],
)
def test_what_is_no_valid_upload_is_left_out_and_recorded(method, state, model, break_it, reason):
    outcome = play(method, state, model, Scripted({1: break_it}))
    assert moved(outcome, state) == pytest.approx((1 + 3 + 4) / 3, abs=1e-6)
    assert list(outcome.rejected) == [1]
    assert re.search(reason, outcome.rejected[1]), outcome.rejected[1]
    assert [delivery.task.client.index for delivery in outcome.deliveries] == [0, 1, 2, 3]
    assert outcome.traffic[1].download_bytes > 0
    assert (outcome.traffic[1].upload_bytes == 0) is (break_it is nothing)


def test_the_server_holds_one_upload_at_a_time(method, state, model):
    events = []

    class Watched(Scripted):
        def train(self, *arguments):
            for delivery in super().train(*arguments):
                events.append(f"{delivery.task.client.index} arrives")
                yield delivery

    class Watching(FedIT):
        def aggregate(self, state, uploads):
            def seen():
                for upload in uploads:
                    yield upload
                    events.append(f"{upload.client.index} is added")

            return super().aggregate(state, seen())

    outcome = play(Watching(method.settings), state, model, Watched({1: with_nan}))
    assert events == ["0 arrives", "0 is added", "1 arrives", "2 arrives", "2 is added", "3 arrives", "3 is added"]
    assert all(delivery.upload is None for delivery in outcome.deliveries)


class Hands:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("fedguild.server.clock.time", SimpleNamespace(perf_counter=lambda: self.now))


def test_the_phases_add_up_to_the_round(method, state, model, monkeypatch):
    hands = Hands(monkeypatch)

    class Slow(Scripted):
        def train(self, *arguments):
            for delivery in super().train(*arguments):
                hands.now += 10
                yield delivery

    class Thorough(FedIT):
        def download(self, *arguments):
            hands.now += 1
            return super().download(*arguments)

        def schema(self, *arguments):
            hands.now += 0.25
            return super().schema(*arguments)

        def aggregate(self, state, uploads):
            def seen():
                for upload in uploads:
                    hands.now += 3
                    yield upload

            hands.now += 2
            return super().aggregate(state, seen())

    outcome = play(Thorough(method.settings), state, model, Slow({2: with_nan}))
    assert outcome.phase_seconds == {"download": 4.0, "train": 40.0, "validate": 1.0, "aggregate": 2.0 + 3 * 3}
    assert sum(outcome.phase_seconds.values()) == hands.now


def test_below_the_quorum_the_round_fails_and_the_state_is_as_it_was(method, state, model):
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    two = {0: with_nan, 3: nothing}
    assert play(method, state, model, Scripted(two)).rejected.keys() == {0, 3}
    with pytest.raises(QuorumError, match="1 of 4 clients delivered a valid upload, but the quorum is 2") as caught:
        play(method, state, model, Scripted({**two, 2: transposed}))
    assert all(reason in str(caught.value) for reason in ("client-000: 'adapter/", "NaN", f"client-003: {FAILED}"))
    assert "client-002: 'adapter/" in str(caught.value)
    assert "[16, 2]" in str(caught.value)
    assert "client-001" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors.items())
