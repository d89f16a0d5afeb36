"""Guild against its box: FLAME without its basis, averages by hand, models in between, messages and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.core.payload import ADAPTER
from fedguild.methods import build_method
from fedguild.methods.guild import Guild
from fedguild.model.backbone import Backbone
from fedguild.server.method import Method, Roster, client_model, excerpt_of
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client
from tests.oracles import guild as oracle

CLIENTS = (client(0, LARGE, 4), client(1, SMALL, 5), client(2, MIDDLE, 3), client(3, SMALL, 6))


def guild(**options: Any) -> Guild:
    return Guild(Guild.Settings(**{"rank": 2, **options}))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


# Lines 1 to 6


@pytest.mark.parametrize("start_norm", [None, 5])
def test_without_its_basis_and_its_mixture_it_is_flame_at_temperature_0_bit_for_bit(
    start_norm: float | None, olmoe_backbone: Backbone, tmp_path: Path
) -> None:
    """Uploads, states, global models and the clients' own; half of the clients a round. Both with A's start, too."""
    methods: tuple[Method, Method] = (
        guild(basis="received", start_norm=start_norm, mix=0),
        build_method("flame", {"rank": 2, "temperature": 0, "rescaler": "none", "start_norm": start_norm}),
    )
    federations = [Federation(olmoe_backbone, method, CLIENTS, tmp_path / method.name) for method in methods]
    states = [federation.start() for federation in federations]
    for round, some in enumerate(((0, 1), (1, 2), (0, 3)), start=1):
        sent = [federation.train(state, round, some) for federation, state in zip(federations, states, strict=True)]
        for one, other in zip(*sent, strict=True):
            assert_equal(one.payload.part(ADAPTER), other.payload.part(ADAPTER))
        states = [
            federation.method.aggregate(state, iter(uploads))
            for federation, state, uploads in zip(federations, states, sent, strict=True)
        ]
        assert_equal(dict(states[0].tensors), dict(states[1].tensors))
        for who in CLIENTS:
            models = []
            for federation, state in zip(federations, states, strict=True):
                method, model = federation.method, federation.model
                excerpt, memory = excerpt_of(method, state, model, who), federation.memory.load(who.name, round + 1)
                models.append(
                    (
                        method.deploy(state, model, who.budget),
                        client_model(method, excerpt, model, who, memory),
                        client_model(method, excerpt, model, who, memory, "received"),
                    )
                )
            for found, expected in zip(*models, strict=True):
                assert found is not None
                assert expected is not None
                assert found.plan == expected.plan
                assert_equal(dict(found.tensors), dict(expected.tensors))
    assert any(bool(value.any()) for name, value in states[0].part(ADAPTER).items() if name.endswith("lora_B"))


def test_it_starts_in_its_basis(olmoe_backbone: Backbone) -> None:
    """Line 1: the rows of every A are orthogonal and of norm c, and B is 0."""
    method = guild(basis_norm=3.0)
    theta = method.start(olmoe_backbone.info, Roster([LARGE]), torch.Generator().manual_seed(0)).part(ADAPTER)
    for name, value in theta.items():
        if name.endswith("lora_B"):
            assert not bool(value.any())
        else:
            gram = value @ value.mT
            torch.testing.assert_close(gram, (9 * torch.eye(2)).expand_as(gram), rtol=1e-5, atol=1e-5)


# Line 7


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_a_clients_own_model_lies_where_line_7_says(mix: float, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Number by number; at the ends it is the one model or the other, bit for bit."""
    federation = Federation(olmoe_backbone, guild(mix=mix), CLIENTS, tmp_path)
    method, model, state = federation.method, federation.model, federation.start()
    sent = federation.train(state)
    state = method.aggregate(state, iter(sent))
    for who, delivered in zip(CLIENTS, sent, strict=True):
        memory = federation.memory.load(who.name, 2)
        own = client_model(method, excerpt_of(method, state, model, who), model, who, memory)
        assert own.plan == method.plan(model, who.budget)
        received, trained = state.part(ADAPTER), delivered.payload.part(ADAPTER)
        assert own.tensors.keys() == received.keys()
        if mix in (0.0, 1.0):
            assert_equal(dict(own.tensors), trained if mix else received)
        for name, value in own.tensors.items():
            for place in (0, -1, value.numel() // 2):
                numbers = (float(tensor[name].flatten()[place]) for tensor in (received, trained))
                assert float(value.flatten()[place]) == pytest.approx(oracle.mixed(*numbers, mix), rel=1e-4, abs=1e-6)


# Messages and memory


@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_a_client_keeps_one_adapter_at_most(mix: float, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, guild(mix=mix), CLIENTS, tmp_path)
    sent = federation.train(federation.start())[0]
    kept = federation.memory.load(sent.client.name, 2)
    assert_equal(dict(kept.tensors), dict(sent.payload.tensors) if mix else {})
