"""FlexLoRA: the averaged product, its truncation to every rank, and the scale undone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.payload import Payload
from fedguild.methods.flexlora import FlexLoRA, FlexLoRASettings
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.server.low_rank import by_module
from fedguild.server.method import Roster, Upload
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
from tests.oracles.flexlora import aggregate, orthonormal_rows, redistribute
from tests.oracles.low_rank import dense_product

EVERYTHING = ("attention", "router", "experts")
QUERY, EXPERT = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.down_proj"
ALPHA = 6.0


def flexlora(**options: object) -> FlexLoRA:
    return FlexLoRA(FlexLoRASettings(**{"rank": 3, "alpha": ALPHA, "targets": EVERYTHING, **options}))


def clients_of(ranks: tuple[int, ...]) -> list[ClientInfo]:
    return [client(index, Budget(f"r{rank}", 4, rank), 2 + 3 * index) for index, rank in enumerate(ranks)]


def adapters(model: ModelInfo, ranks: tuple[int, ...]) -> list[dict[str, Tensor]]:
    method = flexlora(rank=max(ranks))
    return [random_tensors(model, method.plan(model, Budget("b", 4, r)), seed) for seed, r in enumerate(ranks)]


def before_of(model: ModelInfo, rank: int) -> Payload:
    adapter = random_tensors(model, flexlora().plan(model, LARGE).with_lora(rank=rank), 99)
    return Payload.of({"adapter": adapter})


def uploads_of(clients: list[ClientInfo], sent: list[dict[str, Tensor]]) -> list[Upload]:
    return [upload(who, adapter=adapter) for who, adapter in zip(clients, sent, strict=True)]


def products(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Module -> B A, dense."""
    return {module: dense_product(factors.down, factors.up) for module, factors in by_module(tensors).items()}


@pytest.mark.parametrize("ranks", [(2, 3, 5), (1,), (1, 1), (4, 4, 4, 4), (5, 1)])
def test_every_rank_gets_the_best_approximation_of_the_average(
    ranks: tuple[int, ...], olmoe_backbone: Backbone
) -> None:
    """Against dense matrices and their decompositions in fp64, at every rank up to the highest."""
    model, who, sent = olmoe_backbone.info, clients_of(ranks), adapters(olmoe_backbone.info, ranks)
    method = flexlora(rank=5)
    state = method.aggregate(before_of(model, 5), iter(uploads_of(who, sent)))
    examples = [one.examples for one in who]
    for module, factors in by_module(sent[0]).items():
        own = [by_module(adapter)[module] for adapter in sent]
        update = aggregate([(factors.down, factors.up) for factors in own], examples, ALPHA)
        for rank in range(1, 6):
            deployed = method.deploy(state, model, Budget("b", 4, rank))
            found = by_module(dict(deployed.tensors))[module]
            assert found.rank == deployed.plan.rank == rank
            assert deployed.plan.lora.scale == ALPHA / rank
            expected = redistribute(update, rank, ALPHA)
            torch.testing.assert_close(dense_product(found.down, found.up), expected, rtol=1e-4, atol=1e-4)
        assert factors.rank == ranks[0]


def test_a_client_that_does_not_train_changes_nothing(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """One client of the highest rank at a rate of 0: the same ΔW and the same factors, to rounding."""
    federation = Federation(olmoe_backbone, flexlora(), [client(0, LARGE)], tmp_path)
    model = federation.model
    state = federation.method.aggregate(before_of(model, 3), uploads_of(federation.clients, adapters(model, (3,))))
    again = federation.method.aggregate(state, iter(federation.train(state, learning_rate=0.0)))
    for module, product in products(state.part("adapter")).items():
        torch.testing.assert_close(products(dict(again.part("adapter")))[module], product, rtol=1e-4, atol=1e-5)
    for name, value in state.part("adapter").items():
        torch.testing.assert_close(again.part("adapter")[name], value, rtol=1e-3, atol=1e-4)


def test_the_first_download_is_the_start_at_the_clients_rank(olmoe_backbone: Backbone) -> None:
    method, model = flexlora(), olmoe_backbone.info
    state = method.start(model, Roster([LARGE, SMALL]), torch.Generator().manual_seed(0))
    down = method.download(state, model, client(0, MIDDLE)).part("adapter")
    assert down.keys() == state.part("adapter").keys()
    assert torch.equal(down[f"{QUERY}.lora_A"], state.part("adapter")[f"{QUERY}.lora_A"][:2])
    assert torch.equal(down[f"{EXPERT}.lora_A"], state.part("adapter")[f"{EXPERT}.lora_A"][:, :2])
    assert all((value == 0).all() for name, value in down.items() if name.endswith("lora_B"))


def test_ranks_that_no_client_brought_can_still_train(olmoe_backbone: Backbone) -> None:
    """One client of rank 1: ranks 2 and 3 have B = 0 and rows of A that are orthonormal to the first."""
    model, method = olmoe_backbone.info, flexlora()
    state = method.aggregate(before_of(model, 3), uploads_of(clients_of((1,)), adapters(model, (1,))))
    for factors in by_module(state.part("adapter")).values():
        assert orthonormal_rows(factors.down)
        assert factors.up[..., :1].abs().max() > 0.1
        assert factors.up[..., 1:].abs().max() < 1e-4


def test_an_expert_that_nobody_activated(olmoe_backbone: Backbone) -> None:
    """B = 0 from every client: the update is exactly zero, and A can still train."""
    model, method, sent = olmoe_backbone.info, flexlora(), adapters(olmoe_backbone.info, (3, 2))
    for adapter in sent:
        adapter[f"{EXPERT}.lora_B"][2] = 0
    state = method.aggregate(before_of(model, 3), uploads_of(clients_of((3, 2)), sent))
    assert (state.part("adapter")[f"{EXPERT}.lora_B"][2] == 0).all()
    assert orthonormal_rows(state.part("adapter")[f"{EXPERT}.lora_A"])
    assert state.part("adapter")[f"{EXPERT}.lora_B"][3].abs().max() > 0


def test_a_layer_narrower_than_the_rank(olmoe_backbone: Backbone) -> None:
    """A router of 8 experts at rank 12: ranks 9 to 12 are zero, as the product cannot have them."""
    model, method = olmoe_backbone.info, flexlora(rank=12)
    sent = adapters(model, (12, 5))
    state = method.aggregate(before_of(model, 12), uploads_of(clients_of((12, 5)), sent))
    shapes = {name: value.shape for name, value in before_of(model, 12).part("adapter").items()}
    assert {name: value.shape for name, value in state.part("adapter").items()} == shapes
    narrow = [f for f in by_module(state.part("adapter")).values() if min(f.up.shape[-2], f.down.shape[-1]) < 12]
    assert narrow
    for factors in narrow:
        width = min(factors.up.shape[-2], factors.down.shape[-1])
        assert (factors.down[..., width:, :] == 0).all()
        assert (factors.up[..., width:] == 0).all()
        assert factors.up[..., :width].abs().max() > 0
