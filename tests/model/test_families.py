"""Every family's whole model: our view against transformers' own, and against merged weights."""

from __future__ import annotations

import pytest
import torch

from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import (
    DENSE_FAMILIES,
    FAMILIES,
    MOE_FAMILIES,
    PAD,
    lora_plan,
    random_adapter,
    random_rows,
    tiny_backbone,
    tiny_model,
)
from tests.oracles.lora import MergedModel

EVERY_TARGET = {
    **dict.fromkeys(MOE_FAMILIES, ("attention", "mlp", "router", "experts")),
    **dict.fromkeys(DENSE_FAMILIES, ("attention", "mlp")),
    "olmoe": ("attention", "router", "experts"),
    "mixtral": ("attention", "router", "experts"),
    "qwen3_moe": ("attention", "router", "experts"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_slot_model_the_backbone_is_the_plain_model(family):
    ids = torch.tensor(random_rows([9, 9], seed=1))
    with torch.no_grad():
        expected = tiny_model(family)(ids).logits
        found = tiny_backbone(family).model(ids).logits
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_with_b_at_zero_the_losses_are_the_plain_models(family):
    backbone = tiny_backbone(family)
    plan = AdapterPlan((Lora(4, 2.0, EVERY_TARGET[family]),))
    adapter = random_adapter(backbone.info, plan, seed=2)
    adapter = {name: value * (not name.endswith("lora_B")) for name, value in adapter.items()}
    ids = random_rows([11, 6], seed=3)
    plain = tiny_model(family)
    with SlotModel(backbone, [plan]) as model, torch.no_grad():
        model.load(0, adapter)
        found = model.token_losses(collate([[Encoded(tuple(row), 1) for row in ids]], PAD))
        expected = torch.cat(
            [
                torch.nn.functional.cross_entropy(
                    plain(torch.tensor([row])).logits[0, :-1], torch.tensor(row[1:]), reduction="none"
                )
                for row in ids
            ]
        )
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_equal_their_merged_models_in_losses_and_gradients(family):
    """Three slots of mixed rank, scale and active experts, one of them without rows; fp64."""
    backbone = tiny_backbone(family, dtype=torch.float64)
    moe = family in MOE_FAMILIES
    kind = "per_layer" if moe else "none"
    plans = [
        lora_plan(rank, scale, EVERY_TARGET[family], active if moe else None, output_scale=kind)
        for rank, scale, active in ((3, 0.5, 2), (1, 2.0, None), (4, 1.0, 1))
    ]
    rows = [
        [Encoded(tuple(ids), 2) for ids in random_rows(lengths, seed)] for seed, lengths in enumerate([[7, 5], [], [9]])
    ]
    adapters = [random_adapter(backbone.info, plan, seed) for seed, plan in enumerate(plans)]
    with SlotModel(backbone, plans) as model:
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        losses = model.token_losses(collate(rows, PAD))
        losses.sum().backward()
        found = [
            {name: t.own(slot, of=t.stored.grad) for name, t in model.trainables.items()} for slot in range(len(plans))
        ]
    plain = tiny_model(family, dtype=torch.float64)
    parts = losses.detach().split([sum(row.response_tokens for row in slot_rows) for slot_rows in rows])
    for slot, (plan, adapter) in enumerate(zip(plans, adapters, strict=True)):
        leaves = {name: value.clone().requires_grad_() for name, value in adapter.items()}
        if not rows[slot]:
            assert all(not grad.any() for grad in found[slot].values())
            continue
        alone = MergedModel(plain, backbone.info, plan, leaves)
        expected = torch.cat([alone.losses(row.input_ids, row.prompt_length) for row in rows[slot]])
        assert torch.allclose(parts[slot], expected, rtol=1e-6, atol=1e-6)
        grads = torch.autograd.grad(expected.sum(), list(leaves.values()))
        for (name, ours), grad in zip(((name, found[slot][name]) for name in leaves), grads, strict=True):
            assert ours.shape == grad.shape
            assert torch.allclose(ours, grad, rtol=1e-5, atol=1e-6 * float(grad.abs().max() + 1)), name
        assert all(float(grad.abs().max()) > 0 for grad in grads)
