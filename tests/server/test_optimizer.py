"""The server's optimizer: against a loop, off by default, kept in the state alone, refused where it means nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.client.cohort import LocalReport
from fedguild.config import load_config
from fedguild.config.federation import FederationSettings
from fedguild.core.errors import ConfigError
from fedguild.core.payload import ADAPTER, Payload
from fedguild.methods import METHODS, build_method
from fedguild.runs.setup import check_config
from fedguild.server import checkpoint
from fedguild.server.engine import Delivery, Task
from fedguild.server.method import Roster
from fedguild.server.optimizer import MOMENTUM, own_state, server_step, takes_steps
from fedguild.server.round import RoundSetup
from fedguild.server.rounds import run_round
from tests.methods.federation import LARGE, SMALL, client, upload
from tests.oracles import server_optimizer as oracle

NAME = "model.layers.0.self_attn.q_proj.lora_B"


def state(values: Any, **parts: Any) -> Payload:
    return Payload.of({ADAPTER: {NAME: torch.tensor(values)}, **{key: {NAME: value} for key, value in parts.items()}})


@pytest.mark.parametrize(("step", "momentum"), [(1.5, 0.0), (0.3, 0.9), (1.0, 0.5), (2.0, 0.99)])
def test_rounds_are_those_of_the_loop(step: float, momentum: float) -> None:
    """Three rounds of three clients of unequal sizes, one without examples, through the aggregate of FedAvg."""
    rng, sizes = torch.Generator().manual_seed(3), (4, 0, 9)
    start, trained = torch.randn(5, generator=rng), torch.randn(3, 3, 5, generator=rng)
    method = build_method("fedavg", {})
    found = state(start.tolist())
    for uploads in trained:
        sent = [
            upload(client(index, LARGE, examples), adapter={NAME: uploads[index]})
            for index, examples in enumerate(sizes)
        ]
        after = method.aggregate(own_state(found), iter(sent))
        found = server_step(found, after, step=step, momentum=momentum)
    expected = oracle.rounds(start.tolist(), trained.tolist(), sizes, step=step, momentum=momentum)
    torch.testing.assert_close(found.part(ADAPTER)[NAME], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert bool(found.part(MOMENTUM)) == (momentum > 0)


def test_at_the_defaults_nothing_is_touched() -> None:
    after = state([0.1, 0.2])
    assert server_step(state([0.3, 0.7]), after, step=1.0, momentum=0.0) is after
    assert own_state(after) is after


def test_what_nobody_trained_stays_and_keeps_its_momentum() -> None:
    before = state([1.0, 2.0], server_momentum=torch.tensor([5.0, 5.0]))
    after = server_step(before, state([1.0, 2.0]), step=1.5, momentum=0.9)
    assert after.part(ADAPTER)[NAME].tolist() == [1.0, 2.0]
    assert after.part(MOMENTUM)[NAME].tolist() == [5.0, 5.0]


def test_rolora_moves_the_factor_of_the_round_alone(olmoe_backbone: Any) -> None:
    """Its clients are sent neither the momentum nor anything else that they did not get without it."""
    method, model = build_method("rolora", {"rank": 2}), olmoe_backbone.info
    clients = [client(0, LARGE, 3), client(1, SMALL, 2)]
    engine, rules = _Scripted(), FederationSettings(clients=2, server_step=1.5, server_momentum=0.5)
    found = method.start(model, Roster([LARGE, SMALL]), torch.Generator().manual_seed(0))
    for number, trained in ((1, "lora_B"), (2, "lora_A"), (3, "lora_B")):
        after = run_round(number, found, clients, RoundSetup(method, model, engine, rules, 0)).state
        before, moved = found.part(ADAPTER), after.part(ADAPTER)
        assert {name.rsplit(".")[-1] for name in moved if not torch.equal(moved[name], before[name])} == {trained}
        assert all({name.partition("/")[0] for name in sent.tensors} == {ADAPTER} for sent in engine.downloads)
        found = after
    assert found.part(MOMENTUM).keys() == found.part(ADAPTER).keys()


class _Scripted:
    """An engine whose clients add 1 to what they are to train."""

    def train(self, method: Any, model: Any, tasks: Sequence[Task], terms: Any = None) -> Iterator[Delivery]:
        self.downloads = [task.download for task in tasks]
        for task in tasks:
            names = method.schema(model, task.client, task.download).tensors
            sent = Payload({name: task.download.tensors[name] + 1.0 for name in names})
            yield Delivery(task, sent, method.plan(model, task.client.budget), LocalReport(steps=1, tokens=1), None)


NOT_STEPPED = {
    "fdlora",
    "fed-sb",
    "fedalign-moe",
    "fedamole",
    "fedex-lora",
    "fedmoe",
    "flexlora",
    "flora",
    "florist",
    "ub-smoe",
}
"""What docs/guides/comparing.md says why of."""


def test_every_method_takes_steps_but_those_whose_aggregate_is_no_mean_of_one_adapter() -> None:
    assert {name for name in METHODS if not takes_steps(build_method(name, {}))} == NOT_STEPPED


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("flora", "the aggregate of flora is not a mean towards which the server could take a step"),
        ("fdlora", "fdlora has a server's step of its own"),
    ],
)
@pytest.mark.parametrize("setting", ["server_step=1.5", "server_momentum=0.5"])
def test_it_is_refused_with_a_reason(method: str, reason: str, setting: str) -> None:
    config = load_config(f"{method}/tiny-tasks", [f"federation.{setting}"])
    with pytest.raises(ConfigError, match=reason):
        check_config(config)


def test_momentum_survives_its_checkpoint(olmoe_backbone: Any, tmp_path: Path) -> None:
    """The round after a checkpoint is read ends in the same bits; one that lost the momentum would not."""
    method, model = build_method("fedit", {"rank": 2}), olmoe_backbone.info
    clients = [client(0, LARGE, 3), client(1, SMALL, 2)]
    rules = FederationSettings(clients=2, server_step=1.5, server_momentum=0.5)

    def after(number: int, before: Payload) -> Payload:
        return run_round(number, before, clients, RoundSetup(method, model, _Scripted(), rules, 0)).state

    first = after(1, method.start(model, Roster([LARGE, SMALL]), torch.Generator().manual_seed(0)))
    checkpoint.save(tmp_path, 1, first, fingerprint="x")
    found = after(2, checkpoint.load(tmp_path, 1, fingerprint="x").state)
    expected, forgotten = after(2, first), after(2, own_state(first))
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        assert torch.equal(found.tensors[name], value)
        assert not torch.equal(forgotten.tensors[name], value)
