"""FedSA-LoRA: A is everybody's, B its client's alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings
from fedguild.core.payload import ADAPTER, Payload
from fedguild.methods import build_method
from fedguild.methods.fedsa_lora import FedSALoRA, factors
from fedguild.model.backbone import Backbone
from fedguild.server.method import client_model, excerpt_of
from tests.backbones import tiny_backbone, tiny_model
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors
from tests.oracles.fedsa_lora import Loss, rounds
from tests.oracles.lora import MergedModel

TARGETS = ["attention", "router", "experts"]
WHOLE_BATCH = TrainingSettings(optimizer="sgd", learning_rate=0.1, batch_size=64, steps=1, max_grad_norm=None)
"""One step on all examples of a client."""


def fedsa(**options: object) -> FedSALoRA:
    method = build_method("fedsa-lora", {"rank": 2, "targets": TARGETS, **options})
    assert isinstance(method, FedSALoRA)
    return method


def own_models(federation: Federation, state: Payload, round: int) -> list[dict[str, Tensor]]:
    """Every client's own model after a round."""
    return [
        dict(
            client_model(
                federation.method,
                excerpt_of(federation.method, state, federation.model, who),
                federation.model,
                who,
                federation.memory.load(who.name, round + 1),
            ).tensors
        )
        for who in federation.clients
    ]


# By hand, and against the equations


def test_three_rounds_follow_the_equations(tmp_path: Path) -> None:
    """Two, then one, then three clients of other sizes, against gradient descent on each client's merged weights."""
    clients = [client(0, LARGE, 3), client(1, LARGE, 5), client(2, LARGE, 2)]
    backbone, method = tiny_backbone("llama", dtype=torch.float64), fedsa(targets=["q_proj", "mlp"])
    federation = Federation(backbone, method, clients, tmp_path)
    model, plan = federation.model, federation.method.plan(federation.model, LARGE)
    plain = tiny_model("llama", dtype=torch.float64)

    def loss_of(index: int) -> Loss:
        rows = federation.examples[index]

        def loss(adapter: Mapping[str, Tensor]) -> Tensor:
            merged = MergedModel(plain, model, plan, adapter)
            return torch.cat([merged.losses(row.input_ids, row.prompt_length) for row in rows]).mean()

        return loss

    state = federation.start()
    down = {name: value.double() for name, value in state.part(ADAPTER).items()}
    up = {name: torch.zeros_like(value).double() for name, value in random_tensors(model, plan, 0).items()}
    present = ((0, 1), (2,), (0, 1, 2))
    expected = rounds(down, factors(up, "lora_B"), [loss_of(i) for i in range(3)], [3, 5, 2], present, rate=0.1)
    for round, (who, (shared, ups)) in enumerate(zip(present, expected, strict=True), start=1):
        state = federation.method.aggregate(state, iter(federation.train(state, round, who, settings=WHOLE_BATCH)))
        for own, expected_up in zip(own_models(federation, state, round), ups, strict=True):
            assert own.keys() == {*shared, *expected_up}
            for name, value in {**shared, **expected_up}.items():
                torch.testing.assert_close(own[name].double(), value, rtol=1e-5, atol=1e-7)


# A known method


def test_one_client_is_fedit(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Bit by bit over three rounds: its own B is the B that FedIT would send it."""
    fedit = build_method("fedit", {"rank": 2, "alpha": 16.0, "targets": TARGETS, "active_experts": "budget"})
    ours = Federation(olmoe_backbone, fedsa(), [client(0, MIDDLE)], tmp_path / "ours")
    theirs = Federation(olmoe_backbone, fedit, [client(0, MIDDLE)], tmp_path / "theirs")
    state, expected = ours.start(), theirs.start()
    for round in (1, 2, 3):
        state = ours.method.aggregate(state, iter(ours.train(state, round)))
        expected = fedit.aggregate(expected, iter(theirs.train(expected, round)))
        (own,) = own_models(ours, state, round)
        assert own.keys() == expected.part(ADAPTER).keys()
        assert all(torch.equal(own[name], value) for name, value in expected.part(ADAPTER).items())


# Edges


def test_an_absent_client_keeps_its_b_and_gets_the_new_a(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Client 1 sits round 2 out; client 2 never takes part and has B = 0."""
    clients = [client(0, LARGE), client(1, SMALL), client(2, MIDDLE)]
    federation = Federation(olmoe_backbone, fedsa(), clients, tmp_path)
    state = federation.method.aggregate(federation.start(), iter(federation.train(federation.start(), 1, (0, 1))))
    before = own_models(federation, state, 1)
    after_two = federation.method.aggregate(state, iter(federation.train(state, 2, (0,))))
    after = own_models(federation, after_two, 2)
    for name, value in after_two.part(ADAPTER).items():
        assert all(torch.equal(own[name], value) for own in after)
    assert any(not torch.equal(after[1][name], before[1][name]) for name in after_two.part(ADAPTER))
    ups = factors(before[1], "lora_B")
    assert any(bool(value.any()) for value in ups.values())
    assert all(torch.equal(after[1][name], value) for name, value in ups.items())
    assert any(not torch.equal(after[0][name], before[0][name]) for name in ups)
    assert not any(bool(after[2][name].any()) for name in ups)


def test_a_client_that_lost_its_b_starts_again_from_zero(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """As it would if it took part for the first time."""
    lost, new = (Federation(olmoe_backbone, fedsa(), [client(0, LARGE)], tmp_path / name) for name in ("a", "b"))
    state = lost.method.aggregate(lost.start(), iter(lost.train(lost.start())))
    for file in (lost.memory.folder / "client-000").iterdir():
        file.unlink()
    (found,), (expected,) = lost.train(state, 2), new.train(state, 2)
    assert all(torch.equal(found.payload.tensors[name], value) for name, value in expected.payload.tensors.items())
