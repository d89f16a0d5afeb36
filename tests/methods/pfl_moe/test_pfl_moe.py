"""PFL-MoE: the uniform mean, what each client makes of its examples, and the model that it ends up with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.core.payload import Payload
from fedguild.data.batches import Encoded, collate
from fedguild.export.weights import beyond_weights
from fedguild.methods.pfl_moe import PflMoe, PflMoeSettings
from fedguild.methods.pfl_moe.logit_mixture import BIAS, SECOND, WEIGHT
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.server.method import Roster, client_model
from tests.backbones import PAD, random_rows, tiny_backbone, tiny_model
from tests.methods.federation import LARGE, SETTINGS, SMALL, Federation, client
from tests.oracles import pfl_moe as oracle
from tests.oracles.lora import MergedModel

OPTIONS: dict[str, object] = {"rank": 2, "targets": ("q_proj", "v_proj"), "gate_learning_rate": 0.1}


def method(**options: object) -> PflMoe:
    return PflMoe(PflMoeSettings(**{**OPTIONS, **options}))


def federation_of(backbone: Backbone, folder: Path, *examples: int, **options: object) -> Federation:
    clients = [client(index, (LARGE, SMALL)[index % 2], count) for index, count in enumerate(examples)]
    return Federation(backbone, method(**options), clients, folder)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], value) for name, value in expected.items())


# What a client makes of its examples


def changed(federation: Federation, who: int, at: int) -> None:
    """Replaces one example by another of the same length, so that nothing else moves."""
    rows = federation.examples[who]
    (other,) = random_rows([len(rows[at].input_ids)], 900 + at)
    rows[at] = Encoded(tuple(other), rows[at].prompt_length)


def test_a_quarter_of_the_examples_is_the_gates(llama_backbone: Backbone, tmp_path: Path) -> None:
    """A change of exactly 2 of 8 leaves the personal adapter as it was; the upload is of two batches of two."""
    runs = {}
    for at in (None, *range(8)):
        federation = federation_of(llama_backbone, tmp_path / str(at), 8, personal_epochs=1)
        if at is not None:
            changed(federation, 0, at)
        sent = federation.train(federation.start(), 1)[0].payload.part("adapter")
        runs[at] = sent, federation.memory.load("client-000", 2)
    sent, kept = runs[None]
    others = [runs[at] for at in range(8)]
    assert sum(same(memory.part("personal"), kept.part("personal")) for _, memory in others) == 2
    assert not any(same(memory.part("gate"), kept.part("gate")) for _, memory in others)
    assert sum(not same(other, sent) for other, _ in others) == 4


def test_both_start_from_what_was_received(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """With a learning rate of 0 for line 6 both are theta; else theta_p moves, and theta_i is another adapter still."""
    for rate, moves in ((0.0, False), (None, True)):
        federation = federation_of(olmoe_backbone, tmp_path / str(rate), 6, personal_learning_rate=rate)
        state = federation.start()
        state = federation.method.aggregate(state, iter(federation.train(state, 1)))
        received = state.part("adapter")
        (sent,) = federation.train(state, 2)
        memory = federation.memory.load("client-000", 3)
        assert same(memory.part("received"), received)
        assert same(memory.part("personal"), received) != moves
        assert not same(sent.payload.part("adapter"), received)
        assert not same(sent.payload.part("adapter"), memory.part("personal"))


@pytest.mark.parametrize(("examples", "trained"), [(1, False), (2, True)])
def test_a_single_example_is_not_enough_for_a_gate(
    examples: int, trained: bool, llama_backbone: Backbone, tmp_path: Path
) -> None:
    """With one, theta_p trains on it and g stays 1/2; with two, each phase has its own."""
    federation = federation_of(llama_backbone, tmp_path, examples, 4)
    state = federation.start()
    federation.train(state, 1)
    memory = federation.memory.load("client-000", 2)
    assert bool(memory.part("gate")[WEIGHT].any()) == trained
    assert not same(memory.part("personal"), state.part("adapter"))
    assert federation.memory.load("client-001", 2).part("gate")[WEIGHT].any()


def test_personalising_counts_as_the_clients_work(llama_backbone: Backbone, tmp_path: Path) -> None:
    """Tokens and examples of both trainings; steps and loss are those of line 3."""
    reports = []
    for first in (1, 2):
        federation = federation_of(llama_backbone, tmp_path / str(first), 8, personal_from=first, personal_epochs=1)
        epoch = SETTINGS.model_copy(update={"epochs": 1, "steps": None})
        (delivery,) = federation.deliver(federation.start(), settings=epoch)
        reports.append(delivery.report)
    both, plain = reports
    assert (plain.examples, both.examples) == (8, 14)
    assert plain.tokens < both.tokens < 2 * plain.tokens
    assert (both.steps, both.loss) == (plain.steps, plain.loss)


# The client's own model


@pytest.mark.parametrize("features", ["hidden", "embedding"])
def test_the_own_model_mixes_what_the_client_kept(features: str, tmp_path: Path) -> None:
    """Against the loops, from memory alone: the theta of the state has moved on."""
    backbone = tiny_backbone("llama", dtype=torch.float64)
    federation = federation_of(backbone, tmp_path, 6, 5, features=features)
    server, state = federation.method, federation.start()
    state = server.aggregate(state, iter(federation.train(state, 1)))
    state = server.aggregate(state, iter(federation.train(state, 2)))
    row = random_rows([8], 77)[0]
    plain = tiny_model("llama", dtype=torch.float64)
    for who in federation.clients:
        memory = federation.memory.load(who.name, 3)
        deployment = client_model(server, state, federation.model, who, memory)
        with SlotModel(backbone, [deployment.plan]) as model, torch.no_grad():
            model.load(0, deployment.tensors)
            found = model.token_losses(collate([[Encoded(tuple(row), 3)]], PAD))
        plan = server.plan(federation.model, who.budget)
        kept = [{n: value.double() for n, value in memory.part(part).items()} for part in ("received", "personal")]
        merged = [MergedModel(plain, backbone.info, plan, adapter) for adapter in kept]
        gate = memory.part("gate")
        expected = oracle.Mixture(plain, *merged, gate[WEIGHT], gate[BIAS], features).losses(row, 3)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        assert not same(memory.part("received"), state.part("adapter"))


def test_a_client_without_a_personal_model_has_the_global_one(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Mixed with itself, so that it fits into one pass with clients that have one; plain before anyone has."""
    federation = federation_of(olmoe_backbone, tmp_path, 4, 4, personal_from=2, targets=("router", "experts"))
    server, model, state = federation.method, federation.model, federation.start()
    batch = collate([[Encoded(tuple(row), 2) for row in random_rows([7, 5], 3)]], PAD)
    for round, who in ((1, (0, 1)), (2, (0,))):
        state = server.aggregate(state, iter(federation.train(state, round, who)))
        assert bool(federation.memory.load("client-000", round + 1).tensors) == (round == 2)
    plain, fresh = (
        server.deploy(state, model, LARGE),
        client_model(server, state, model, federation.clients[1], Payload()),
    )
    own = client_model(server, state, model, federation.clients[0], federation.memory.load("client-000", 3))
    assert fresh.plan == own.plan != plain.plan
    losses = []
    for deployment in (plain, fresh, own):
        with SlotModel(olmoe_backbone, [deployment.plan]) as slots, torch.no_grad():
            slots.load(0, deployment.tensors)
            losses.append(slots.token_losses(batch))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(losses[2], losses[0], rtol=1e-3)
    early = client_model(server, Payload(state.tensors, {"rounds": 1}), model, federation.clients[0], Payload())
    assert early.plan == plain.plan


def test_the_own_model_is_no_set_of_weights(olmoe_backbone: Backbone) -> None:
    """Which is what an export says."""
    server = method()
    state = server.start(olmoe_backbone.info, Roster([LARGE]), torch.Generator().manual_seed(0))
    state = Payload(state.tensors, {"rounds": 1})
    deployment = client_model(server, state, olmoe_backbone.info, client(0, LARGE), Payload())
    assert beyond_weights(deployment.plan) == ["LogitMixture"]
    assert any(name.startswith(SECOND) for name in deployment.tensors)
