"""Linear layers trained in full against weights that were changed, values and gradients."""

from __future__ import annotations

import pytest
import torch

from fedguild.core.errors import ConfigError
from fedguild.data.batches import Encoded, collate
from fedguild.methods.fed_sb.full_linears import FullLinears
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.oracles.lora import MergedModel

PART = FullLinears(("attention", "mlp"))
PLAN = AdapterPlan((PART,))
BESIDE = AdapterPlan((Lora(2, 0.5, ("q_proj",)), PART))


@pytest.mark.parametrize("plan", [PLAN, BESIDE], ids=["alone", "beside LoRA"])
@pytest.mark.parametrize("lengths", [[[7, 5], [], [9]], [[4], [6], [3]]], ids=["unequal slots", "equal slots"])
def test_slots_equal_their_merged_models_in_losses_and_gradients(plan, lengths):
    backbone = tiny_backbone("llama", dtype=torch.float64)
    rows = [[Encoded(tuple(ids), 2) for ids in random_rows(own, seed)] for seed, own in enumerate(lengths)]
    adapters = [random_adapter(backbone.info, plan, seed) for seed in range(3)]
    with SlotModel(backbone, [plan] * 3) as model:
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        losses = model.token_losses(collate(rows, PAD))
        losses.sum().backward()
        found = [{name: t.own(slot, of=t.stored.grad) for name, t in model.trainables.items()} for slot in range(3)]
    parts = losses.detach().split([sum(row.response_tokens for row in own) for own in rows])
    plain = tiny_model("llama", dtype=torch.float64)
    for slot, adapter in enumerate(adapters):
        leaves = {name: value.clone().requires_grad_() for name, value in adapter.items()}
        if not rows[slot]:
            assert not any(gradient.any() for gradient in found[slot].values())
            continue
        alone = MergedModel(plain, backbone.info, plan, leaves)
        expected = torch.cat([alone.losses(row.input_ids, row.prompt_length) for row in rows[slot]])
        torch.testing.assert_close(parts[slot], expected, rtol=1e-6, atol=1e-6)
        for name, slow in zip(leaves, torch.autograd.grad(expected.sum(), list(leaves.values())), strict=True):
            assert slow.any()
            limit = 1e-6 * float(slow.abs().max() + 1)
            torch.testing.assert_close(found[slot][name], slow, rtol=1e-5, atol=limit, msg=name)


def test_shapes_and_start(olmoe_backbone):
    shapes = FullLinears(("q_proj",)).shapes(olmoe_backbone.info)
    assert shapes == {f"model.layers.{layer}.self_attn.q_proj.delta": (16, 16) for layer in (0, 1)}
    assert trainable_shapes(olmoe_backbone.info, AdapterPlan((FullLinears(("q_proj",)),))) == shapes
    for name, shape in shapes.items():
        assert not PART.initial(name, shape, torch.Generator()).any()
        layout = PART.layout(name, shape, torch.float32)
        assert layout.axis == 0
        assert layout.decays


def test_an_unknown_layer_is_refused(llama_backbone):
    with pytest.raises(ConfigError, match="w_proj name no layer"):
        FullLinears(("w_proj",)).shapes(llama_backbone.info)
