"""FedProx: the penalty, how often it counts, and mu = 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings
from fedguild.methods.fedprox import FedProx, FedProxSettings, squared_distance
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.server.method import Method
from tests.backbones import random_adapter, tiny_backbone
from tests.methods.federation import LARGE, SMALL, Federation, client
from tests.oracles import fedprox as oracle

SGD = TrainingSettings(optimizer="sgd", learning_rate=0.3, batch_size=2, steps=2, max_grad_norm=None)
CLIENTS = [client(0, LARGE, 4), client(1, SMALL, 7), client(2, LARGE, 1)]
EVERYTHING = {"rank": 2, "gate": "full", "experts": "lora", "targets": ("attention",)}


def fedprox(mu: float, **options: object) -> FedProx:
    return FedProx(FedProxSettings(**{**EVERYTHING, "mu": mu, **options}))


def trained(
    method: Method, backbone: Backbone, folder: Path, settings: TrainingSettings
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The start, and what every client uploads of one round from it."""
    federation = Federation(backbone, method, CLIENTS, folder)
    state = federation.start()
    return state.part("adapter"), [one.payload.part("adapter") for one in federation.train(state, settings=settings)]


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


@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_steps_by_hand(accumulation: int, tmp_path: Path) -> None:
    """SGD, learning rate h: the first step does not feel the penalty, the second subtracts h mu (theta_1 - theta^t).

    Both runs meet the second step at the same theta_1 and with the same examples, so that their difference is
    that term and nothing else: once, also where a step is several passes, and where a client has fewer of them.
    """
    backbone, mu = tiny_backbone("olmoe", dtype=torch.float64), 0.8
    settings = SGD.model_copy(update={"gradient_accumulation_steps": accumulation})
    plain, pulled = fedprox(0.0), fedprox(mu)
    start, first = trained(plain, backbone, tmp_path / "a", settings.model_copy(update={"steps": 1}))
    _, same = trained(pulled, backbone, tmp_path / "b", settings.model_copy(update={"steps": 1}))
    _, free = trained(plain, backbone, tmp_path / "c", settings)
    _, held = trained(pulled, backbone, tmp_path / "d", settings)
    for slot in range(len(CLIENTS)):
        for name in start:
            torch.testing.assert_close(same[slot][name], first[slot][name], rtol=1e-12, atol=1e-14)
            moved = first[slot][name] - start[name]
            expected = free[slot][name] - settings.learning_rate * mu * moved
            torch.testing.assert_close(held[slot][name], expected, rtol=1e-9, atol=1e-12)
        assert max(float((held[slot][name] - free[slot][name]).abs().max()) for name in start) > 1e-4
