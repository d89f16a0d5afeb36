"""Guild against its box: FLAME without its basis, averages by hand, models in between, messages and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.core.payload import ADAPTER, Payload
from fedguild.methods import build_method
from fedguild.methods.guild import Guild
from fedguild.model.backbone import Backbone
from fedguild.server.method import Method
from fedguild.server.optimizer import server_step, takes_steps
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
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
                excerpt, memory = method.excerpt(state, model, who), federation.memory.load(who.name, round + 1)
                models.append(
                    (
                        method.deploy(state, model, who.budget),
                        method.personalize(excerpt, model, who, memory),
                        method.as_received(excerpt, model, who, memory),
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
    theta = method.start(olmoe_backbone.info, [LARGE], torch.Generator().manual_seed(0)).part(ADAPTER)
    for name, value in theta.items():
        if name.endswith("lora_B"):
            assert not bool(value.any())
        else:
            gram = value @ value.mT
            torch.testing.assert_close(gram, (9 * torch.eye(2)).expand_as(gram), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_a_round_of_the_server_is_the_box(clients: int, olmoe_backbone: Backbone) -> None:
    """With the server's step of 1.5."""
    method, model = guild(), olmoe_backbone.info
    state = method.start(model, [LARGE], torch.Generator().manual_seed(0))
    plan = method.plan(model, LARGE)
    uploads = [
        upload(client(index, LARGE, 3 + 5 * index), adapter=random_tensors(model, plan, index))
        for index in range(clients)
    ]
    assert takes_steps(method)
    after = server_step(state, method.aggregate(state, iter(uploads)), step=1.5, momentum=0.0)
    sizes = [sent.client.examples for sent in uploads]
    for name, before in state.part(ADAPTER).items():
        values = torch.stack([sent.payload.part(ADAPTER)[name].flatten() for sent in uploads])
        for place in (0, -1, before.numel() // 2):
            expected = oracle.theta(float(before.flatten()[place]), values[:, place].tolist(), sizes, 1.5)
            assert float(after.part(ADAPTER)[name].flatten()[place]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_no_upload_leaves_the_state(olmoe_backbone: Backbone) -> None:
    method = guild()
    state = method.start(olmoe_backbone.info, [LARGE, SMALL], torch.Generator().manual_seed(0))
    assert_equal(dict(method.aggregate(state, iter(())).tensors), dict(state.tensors))


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
        own = method.personalize(method.excerpt(state, model, who), model, who, memory)
        assert own.plan == method.plan(model, who.budget)
        received, trained = state.part(ADAPTER), delivered.payload.part(ADAPTER)
        assert own.tensors.keys() == received.keys()
        if mix in (0.0, 1.0):
            assert_equal(dict(own.tensors), trained if mix else received)
        for name, value in own.tensors.items():
            for place in (0, -1, value.numel() // 2):
                numbers = (float(tensor[name].flatten()[place]) for tensor in (received, trained))
                assert float(value.flatten()[place]) == pytest.approx(oracle.mixed(*numbers, mix), rel=1e-4, abs=1e-6)


def test_a_client_that_never_took_part_has_the_global_model(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, guild(), CLIENTS, tmp_path)
    method, model, state = federation.method, federation.model, federation.start()
    state = method.aggregate(state, iter(federation.train(state, 1, (0, 1))))
    own = method.personalize(method.excerpt(state, model, CLIENTS[3]), model, CLIENTS[3], Payload())
    expected = method.deploy(state, model, SMALL)
    assert expected is not None
    assert own.plan == expected.plan
    assert_equal(dict(own.tensors), dict(expected.tensors))


@pytest.mark.parametrize("mix", ["own", 1.5, -0.1])
def test_a_mix_that_is_none_is_refused(mix: Any) -> None:
    with pytest.raises(ValueError, match="mix"):
        guild(mix=mix)


# Messages and memory


@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_a_client_keeps_one_adapter_at_most(mix: float, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, guild(mix=mix), CLIENTS, tmp_path)
    sent = federation.train(federation.start())[0]
    kept = federation.memory.load(sent.client.name, 2)
    assert_equal(dict(kept.tensors), dict(sent.payload.tensors) if mix else {})


def test_an_upload_is_the_lora_of_flames_and_nothing_else(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    sent = []
    for method in (guild(), build_method("flame", {"rank": 2})):
        federation = Federation(olmoe_backbone, method, CLIENTS, tmp_path / method.name)
        tensors = federation.train(federation.start())[0].payload.tensors
        sent.append({name: value.shape for name, value in tensors.items()})
    assert sent[0] == {name: shape for name, shape in sent[1].items() if name.startswith("adapter/")} != sent[1]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "switch"])
def test_other_families_train(family: str, tmp_path: Path) -> None:
    backbone = tiny_backbone(family)
    budgets = [LARGE, SMALL] if backbone.info.top_k >= 4 else [SMALL, SMALL]
    who = [client(index, budget, 4) for index, budget in enumerate(budgets)]
    federation = Federation(backbone, guild(), who, tmp_path)
    state = federation.start()
    for round in (1, 2):
        state = federation.method.aggregate(state, iter(federation.train(state, round)))
    for name, value in state.part(ADAPTER).items():
        assert bool(value.isfinite().all()), name
    assert any(bool(value.any()) for name, value in state.part(ADAPTER).items() if name.endswith("lora_B"))
