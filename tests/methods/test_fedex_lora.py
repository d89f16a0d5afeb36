"""FedEx-LoRA: averaged factors and their residual are together the average of the products."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.merge_ledger import VERSION
from fedguild.core.accounting import bytes_by_part
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.core.seeding import torch_rng
from fedguild.methods.fedex_lora import FedExLoRA, FedExLoRASettings, residual
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.server.low_rank import by_module
from fedguild.server.merge_history import echo, merges
from fedguild.server.method import Roster, Upload
from tests.methods.federation import LARGE, SMALL, Federation, client, random_tensors
from tests.oracles.fedex_lora import average_of_products, averages, product_of_averages
from tests.oracles.fedex_lora import residual as dense_residual
from tests.oracles.low_rank import dense_product
from tests.oracles.merges import change_of

EVERYTHING = ("attention", "router", "experts")
QUERY, EXPERT = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.up_proj"


def fedex(**options: object) -> FedExLoRA:
    return FedExLoRA(FedExLoRASettings(**{"rank": 3, "alpha": 6.0, "targets": EVERYTHING, **options}))


def uploads_of(method: FedExLoRA, state: Payload, model: ModelInfo, who: list[ClientInfo]) -> list[Upload]:
    plan = method.plan(model, LARGE)
    scalars = echo(method.download(state, model, who[0]))
    return [Upload(1, one, Payload(with_part(ADAPTER, random_tensors(model, plan, one.index)), scalars)) for one in who]


def start(method: FedExLoRA, model: ModelInfo) -> Payload:
    return method.start(model, Roster([LARGE]), torch_rng(0, "start"))


def clients_of(*examples: int) -> list[ClientInfo]:
    return [client(index, LARGE, count) for index, count in enumerate(examples)]


@pytest.mark.parametrize("clients", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_residual_makes_the_average_exact(clients: int, dtype: torch.dtype) -> None:
    """In fp64 to 1e-10, in fp32 to 1e-5, for unequal weights and experts."""
    rng = torch_rng(clients, "clients")
    sizes = {"q.lora_A": (3, 7), "q.lora_B": (9, 3), "e.up_proj.lora_A": (4, 3, 7), "e.up_proj.lora_B": (4, 9, 3)}
    sent = [
        {name: torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for name, shape in sizes.items()}
        for _ in range(clients)
    ]
    weights = [(2 * index + 1) / clients**2 for index in range(clients)]
    average = {name: value.to(dtype) for name, value in averages(sent, weights).items()}
    found = residual(list(zip(sent, weights, strict=True)), average, 0.7)
    limit = 1e-10 if dtype is torch.float64 else 1e-5
    for module, factors in found.items():
        assert factors.down.dtype is dtype
        assert factors.rank == (clients - 1) * 3
        product = dense_product(factors.down, factors.up)
        torch.testing.assert_close(product, dense_residual(sent, weights, module, 0.7), rtol=limit, atol=limit)
        whole = product + 0.7 * dense_product(average[f"{module}.lora_A"], average[f"{module}.lora_B"])
        expected = 0.7 * average_of_products(sent, weights, module)
        torch.testing.assert_close(whole, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_adapter_and_backbone_are_together_the_exact_average(olmoe_backbone: Backbone, weights: str) -> None:
    method, model = fedex(weights=weights), olmoe_backbone.info
    state, who = start(method, model), clients_of(2, 5, 8)
    uploads = uploads_of(method, state, model, who)
    after = method.aggregate(state, iter(uploads))
    clients = [sent.payload.part(ADAPTER) for sent in uploads]
    shares = [1 / 3] * 3 if weights == "uniform" else [2 / 15, 5 / 15, 8 / 15]
    deployment = method.deploy(after, model, SMALL)
    assert deployment is not None
    apart = 0.0
    for module, factors in by_module(deployment.tensors).items():
        change = change_of(deployment.merged, module)
        assert change is not None
        expected = 2.0 * average_of_products(clients, shares, module)
        torch.testing.assert_close(
            change + 2.0 * dense_product(factors.down, factors.up), expected, rtol=1e-5, atol=1e-5
        )
        product = dense_product(factors.down, factors.up)
        torch.testing.assert_close(product, product_of_averages(clients, shares, module), rtol=1e-5, atol=1e-5)
        apart = max(apart, float(change.abs().max()))
    assert apart > 0.1


def test_an_expert_that_nobody_activated_stays_bit_by_bit(olmoe_backbone: Backbone) -> None:
    """Its factors came back as they were sent: their average is the same, and the residual exactly 0."""
    method, model = fedex(targets=("experts",)), olmoe_backbone.info
    state, who = start(method, model), clients_of(2, 5, 8)
    state = method.aggregate(state, iter(uploads_of(method, state, model, who)))
    received = state.part(ADAPTER)
    uploads = [
        Upload(
            2, one, Payload(with_part(ADAPTER, _but_expert_three(received, random_tensors(model, plan, 7 + one.index))))
        )
        for one in who
        for plan in (method.plan(model, LARGE),)
    ]
    after = method.aggregate(state, iter(uploads))
    for name, value in after.part(ADAPTER).items():
        assert torch.equal(value[3], received[name][3])
    second = {name: value for name, value in merges(after).items() if name.startswith("2/")}
    for module in by_module(received):
        change = change_of(second, module)
        assert change is not None
        assert not change[3].any()
        assert change[2].any()


def _but_expert_three(received: dict[str, Tensor], trained: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, value in trained.items():
        value[3] = received[name][3]
    return trained


def test_clients_that_agree_leave_no_residual(olmoe_backbone: Backbone) -> None:
    method, model = fedex(), olmoe_backbone.info
    state, who = start(method, model), clients_of(2, 5, 8)
    one = uploads_of(method, state, model, who)[0].payload
    after = method.aggregate(state, (Upload(1, other, one) for other in who))
    assert not any(change_of(merges(after), module).any() for module in (QUERY, EXPERT))  # type: ignore[union-attr]


def test_one_client_alone_is_fedit_and_nothing_is_merged(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """And it need not be sent anything but the adapter in the next round."""
    federation = Federation(olmoe_backbone, fedex(), clients_of(4), tmp_path)
    state = federation.start()
    for round in (1, 2):
        uploads = federation.train(state, round)
        state = federation.method.aggregate(state, iter(uploads))
        assert state.scalars[VERSION] == 0
        for name, value in uploads[0].payload.part(ADAPTER).items():
            assert torch.equal(state.tensors[f"adapter/{name}"], value)
        sent = bytes_by_part(federation.method.download(state, federation.model, federation.clients[0]))
        assert sent.keys() == {"adapter", "header"}


def test_the_residual_travels_with_one_rank_less_than_the_stack(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """(n - 1) r ranks where the paper sends (n + 1) r."""
    federation = Federation(olmoe_backbone, fedex(), clients_of(4, 3, 5), tmp_path)
    state = federation.start()
    state = federation.method.aggregate(state, iter(federation.train(state)))
    sent = bytes_by_part(federation.method.download(state, federation.model, federation.clients[0]))
    assert sent["merge"] == 2 * sent["adapter"]


def test_the_scale(olmoe_backbone: Backbone) -> None:
    assert fedex().plan(olmoe_backbone.info, LARGE).lora.scale == 2.0
    assert fedex(scaling="root").plan(olmoe_backbone.info, SMALL).lora.scale == 6.0 / math.sqrt(3)
    assert fedex().plan(olmoe_backbone.info, SMALL).active_experts == 1
