"""A sub-MoE computes what a model without the other experts computes, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.core.errors import ConfigError, ModelError
from fedguild.data.batches import Encoded, collate
from fedguild.methods.fedmoe.held_experts import HeldExperts
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.oracles.lora import merged_parameters

SETS = ((0, 3, 5, 6), (1, 2, 3, 4, 7))
PLAN = AdapterPlan((Lora(3, 0.5, ("q_proj", "experts")), FullRouter(), HeldExperts()))


def plan_of(*held: tuple[int, ...]) -> AdapterPlan:
    return AdapterPlan((PLAN.lora, FullRouter(), HeldExperts(held)))


def cut_losses(model: Any, backbone: Backbone, adapter: dict[str, Tensor], ids: tuple[int, ...]) -> Tensor:
    """The losses of `ids[2:]` under a plain model whose routers and experts have the held rows and no others."""
    weights = merged_parameters(model, backbone.info, PLAN, adapter)
    for layer, held in zip(backbone.info.moe, SETS, strict=True):
        for name in (f"{layer.router}.weight", f"{layer.experts}.gate_up_proj", f"{layer.experts}.down_proj"):
            weights[name] = weights[name][list(held)]
    inputs = {"input_ids": torch.tensor([ids]), "use_cache": False}
    log_p = torch.func.functional_call(model, weights, (), inputs).logits[0].log_softmax(dim=-1)
    return torch.stack([-log_p[at - 1, ids[at]] for at in range(2, len(ids))])


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen3_moe", "qwen2_moe"])
def test_a_sub_moe_is_a_model_without_the_other_experts(family: str) -> None:
    """Also where the weights of the active experts are scaled to sum to 1; fp64, beside a slot that holds all."""
    backbone = tiny_backbone(family, dtype=torch.float64)
    adapters = [random_adapter(backbone.info, PLAN, seed) for seed in (1, 2)]
    rows = [tuple(row) for row in random_rows([9, 6], 4)]
    batch = collate([[Encoded(rows[0], 2)], [Encoded(rows[1], 2)]], PAD)
    with SlotModel(backbone, [plan_of(), plan_of(*SETS)]) as model:
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        losses = model.token_losses(batch)[7:]
        losses.sum().backward()
        found = {name: tensor.own(1, of=tensor.stored.grad) for name, tensor in model.trainables.items()}
    leaves = {name: value.clone().requires_grad_() for name, value in adapters[1].items()}
    expected = cut_losses(tiny_model(family, dtype=torch.float64), backbone, leaves, rows[1])
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    gradients = torch.autograd.grad(expected.sum(), list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-8)
        assert bool(gradient.any())
    for layer, held in zip(backbone.info.moe, SETS, strict=True):
        others = [e for e in range(8) if e not in held]
        for name, gradient in found.items():
            if name.startswith((layer.experts, layer.router)):
                assert not gradient[others].any()


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2 greedy", "switch"])
def test_nothing_else_is_activated_or_counted(family: str) -> None:
    """One slot holds some experts, the other one all; every slot chooses as it would alone."""
    backbone = tiny_backbone(family, dtype=torch.float64)
    plan = PLAN.with_lora(targets=("experts",))
    layers = len(backbone.info.moe)
    held = SETS[:layers]
    plans = [AdapterPlan((plan.lora, FullRouter(), HeldExperts(held))), plan]
    batch = collate([[Encoded(tuple(random_rows([24], slot)[0]), 18)] for slot in (0, 1)], PAD, backbone.info.seq2seq)
    with SlotModel(backbone, plans) as model, model.collect_routing() as routing, torch.no_grad():
        together = model.token_losses(batch)
    others = torch.zeros((), dtype=torch.int64)
    for layer, own in enumerate(held):
        counts = routing.counts[layer]
        assert set(counts[0].nonzero().flatten().tolist()) <= set(own)
        others += counts[1].sum() - counts[1, list(own)].sum()
        assert counts[0].sum() == routing.layer_tokens[layer, 0] * backbone.info.top_k
    assert others > 0
    for slot, plan in enumerate(plans):
        with SlotModel(backbone, [plan]) as model, torch.no_grad():
            rows = [[Encoded(tuple(random_rows([24], slot)[0]), 18)]]
            losses = model.token_losses(collate(rows, PAD, backbone.info.seq2seq))
        torch.testing.assert_close(losses, together[6 * slot : 6 * slot + 6], rtol=1e-9, atol=1e-9)


def test_sets_change_between_passes(olmoe_backbone: Backbone) -> None:
    batch = collate([[Encoded(tuple(random_rows([9], 1)[0]), 2)]], PAD)
    layers = [layer.experts for layer in olmoe_backbone.info.moe]
    losses = []
    with SlotModel(olmoe_backbone, [PLAN]) as model, torch.no_grad():
        for held in (tuple(range(8)), SETS[0], SETS[1]):
            model.attached[HeldExperts].hold(0, {name: torch.tensor(held) for name in layers})
            losses.append(model.token_losses(batch))
    with SlotModel(olmoe_backbone, [PLAN.without(HeldExperts)]) as model, torch.no_grad():
        assert torch.equal(model.token_losses(batch), losses[0])
    assert not torch.allclose(losses[0], losses[1])
    assert not torch.allclose(losses[1], losses[2])


@pytest.mark.parametrize("held", [(0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 8), (-1, 0, 1, 2)])
def test_sets_that_cannot_be_are_refused(held: tuple[int, ...], olmoe_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match=r"at least 4 of the experts 0 to 7, but holds \["):
        SlotModel(olmoe_backbone, [plan_of(held, SETS[1])])
    SlotModel(olmoe_backbone, [PLAN]).close()


@pytest.mark.parametrize(
    ("family", "told"), [("llama", "A sub-MoE needs a mixture-of-experts"), ("deepseek_v3", "A sub-MoE needs a router")]
)
def test_models_without_such_a_router_are_refused(family: str, told: str) -> None:
    backbone = tiny_backbone(family)
    with pytest.raises(ModelError, match=told):
        SlotModel(backbone, [AdapterPlan((Lora(2, 1.0, ("o_proj",)), HeldExperts()))])
