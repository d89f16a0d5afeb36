"""FedProx: the penalty, how often it counts, and mu = 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.engines.local import LocalEngine
from fedguild.methods import build_method
from fedguild.methods.fedavg import FedAvg, FedAvgSettings
from fedguild.methods.fedprox import FedProx, FedProxSettings, squared_distance
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.server.engine import Task
from fedguild.server.method import Method
from tests.backbones import random_adapter, tiny_backbone
from tests.methods.federation import LARGE, SMALL, Federation, client, upload
from tests.oracles import fedprox as oracle

SGD = TrainingSettings(optimizer="sgd", learning_rate=0.3, batch_size=2, steps=2, max_grad_norm=None)
ADAMW = TrainingSettings(
    optimizer="adamw",
    weight_decay=0.1,
    learning_rate=0.02,
    batch_size=2,
    gradient_accumulation_steps=2,
    steps=3,
    max_grad_norm=0.5,
)
CLIENTS = [client(0, LARGE, 4), client(1, SMALL, 7), client(2, LARGE, 1)]
EVERYTHING = {"rank": 2, "gate": "full", "experts": "lora", "targets": ("attention",)}


def fedprox(mu: float, **options: object) -> FedProx:
    return FedProx(FedProxSettings(**{**EVERYTHING, "mu": mu, **options}))


def trained(
    method: Method, backbone: Backbone, folder: Path, settings: TrainingSettings
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The start, what every client uploads of one round from it, and what it keeps."""
    federation = Federation(backbone, method, CLIENTS, folder)
    state = federation.start()
    engine = LocalEngine(backbone, federation.examples, settings, federation.memory, seed=1)
    tasks = [Task(1, who, method.download(state, federation.model, who)) for who in CLIENTS]
    sent = [delivery.upload.part("adapter") for delivery in engine.train(method, federation.model, tasks)]
    kept = [dict(federation.memory.load(who.name, 2).tensors) for who in CLIENTS]
    return state.part("adapter"), sent, kept


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# Eq. 2


@pytest.mark.parametrize("experts", ["lora", "full"])
def test_the_penalty_and_its_gradient(experts: str) -> None:
    """Of three clients at once, whose tensors have their slots at different axes, in fp64."""
    backbone = tiny_backbone("olmoe", dtype=torch.float64)
    method, mu = fedprox(0.7, experts=experts), 0.7
    plan = method.plan(backbone.info, LARGE)
    start = [random_adapter(backbone.info, plan, seed) for seed in (1, 2, 3)]
    now = [random_adapter(backbone.info, plan, seed) for seed in (4, 5, 6)]
    now[2] = start[2]
    with SlotModel(backbone, [plan] * 3) as model:
        for slot, tensors in enumerate(start):
            model.load(slot, tensors)
        received = {name: tensor.stored.detach().clone() for name, tensor in model.trainables.items()}
        for slot, tensors in enumerate(now):
            model.load(slot, tensors)
        found = mu / 2 * squared_distance(model.trainables, received)
        found.sum().backward()
        slopes = [
            {name: tensor.own(slot, of=tensor.stored.grad).clone() for name, tensor in model.trainables.items()}
            for slot in range(3)
        ]
    expected = [oracle.penalty(mine, theirs, mu) for mine, theirs in zip(now, start, strict=True)]
    torch.testing.assert_close(found.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0)
    assert expected[2] == 0.0
    for slot in range(3):
        for name, slope in oracle.gradient(now[slot], start[slot], mu).items():
            torch.testing.assert_close(slopes[slot][name], slope, rtol=1e-10, atol=1e-12)


def test_two_clients_by_hand() -> None:
    """The mean is FedAvg's: n = 10 and 30, 2 and 6: (10 · 2 + 30 · 6) / 40 = 5."""
    name = "model.layers.0.mlp.gate.delta"
    sent = [
        upload(client(i, LARGE, n), adapter={name: torch.tensor([[a]])}) for i, n, a in ((0, 10, 2.0), (1, 30, 6.0))
    ]
    found = fedprox(0.1).aggregate(Payload.of({"adapter": {name: torch.zeros(1, 1)}}), iter(sent))
    assert found.part("adapter")[name].item() == 5.0


@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_steps_by_hand(accumulation: int, tmp_path: Path) -> None:
    """SGD, learning rate h: the first step does not feel the penalty, the second subtracts h mu (theta_1 - theta^t).

    Both runs meet the second step at the same theta_1 and with the same examples, so that their difference is
    that term and nothing else: once, also where a step is several passes, and where a client has fewer of them.
    """
    backbone, mu = tiny_backbone("olmoe", dtype=torch.float64), 0.8
    settings = SGD.model_copy(update={"gradient_accumulation_steps": accumulation})
    plain, pulled = fedprox(0.0), fedprox(mu)
    start, first, _ = trained(plain, backbone, tmp_path / "a", settings.model_copy(update={"steps": 1}))
    _, same, _ = trained(pulled, backbone, tmp_path / "b", settings.model_copy(update={"steps": 1}))
    _, free, _ = trained(plain, backbone, tmp_path / "c", settings)
    _, held, _ = trained(pulled, backbone, tmp_path / "d", settings)
    for slot in range(len(CLIENTS)):
        for name in start:
            torch.testing.assert_close(same[slot][name], first[slot][name], rtol=1e-12, atol=1e-14)
            moved = first[slot][name] - start[name]
            expected = free[slot][name] - settings.learning_rate * mu * moved
            torch.testing.assert_close(held[slot][name], expected, rtol=1e-9, atol=1e-12)
        assert max(float((held[slot][name] - free[slot][name]).abs().max()) for name in start) > 1e-4


def test_a_strong_penalty_holds_everybody(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    settings = SGD.model_copy(update={"learning_rate": 1e-3, "steps": 8})
    moved = []
    for mu in (0.0, 500.0):
        start, sent, _ = trained(fedprox(mu), olmoe_backbone, tmp_path / str(mu), settings)
        moved.append([sum(float((own[name] - start[name]).square().sum()) for name in start) for own in sent])
    assert all(0 < held < 0.25 * free for free, held in zip(*moved, strict=True))


# mu = 0


@pytest.mark.parametrize("personal", [False, True])
@pytest.mark.parametrize("experts", ["lora", "full"])
def test_without_a_penalty_it_is_fedavg(experts: str, personal: bool, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Bit by bit, in what is sent, kept and aggregated; with decay, clipping and accumulation."""
    options = {**EVERYTHING, "experts": experts, "personal": personal}
    ours, theirs = FedProx(FedProxSettings(**options, mu=0)), FedAvg(FedAvgSettings(**options))
    results = [trained(method, olmoe_backbone, tmp_path / method.name, ADAMW) for method in (ours, theirs)]
    (start, sent, kept), (their_start, their_sent, their_kept) = results
    assert_equal(start, their_start)
    for found, expected in zip([*sent, *kept], [*their_sent, *their_kept], strict=True):
        assert_equal(found, expected)
    assert all(bool(part) == personal for part in kept)
    uploads = [upload(who, adapter=part) for who, part in zip(CLIENTS, sent, strict=True)]
    after = [
        dict(method.aggregate(Payload.of({"adapter": start}), iter(uploads)).part("adapter"))
        for method in (ours, theirs)
    ]
    assert_equal(*after)


def test_the_penalty_moves_something(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    results = [trained(fedprox(mu), olmoe_backbone, tmp_path / str(mu), ADAMW)[1] for mu in (0.0, 1.0)]
    for free, held in zip(*results, strict=True):
        assert any(not torch.equal(free[name], value) for name, value in held.items())


def test_a_dense_model(llama_backbone: Backbone, tmp_path: Path) -> None:
    method = fedprox(0.1, gate="none", experts="none", targets=("attention", "mlp"))
    _, sent, _ = trained(method, llama_backbone, tmp_path, ADAMW)
    expected = method.expected_upload(llama_backbone.info, CLIENTS[0], Payload())
    assert {f"adapter/{name}" for name in sent[0]} == expected.keys()
    with pytest.raises(ConfigError, match=r"need experts, but .* is dense"):
        fedprox(0.1).plan(llama_backbone.info, LARGE)


def test_a_negative_weight() -> None:
    with pytest.raises(ConfigError, match=r"method\.mu: .*greater than or equal to 0, got -1\.\nIt is: mu of Eq\. 2"):
        build_method("fedprox", {"mu": -1})
