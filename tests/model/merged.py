"""Slots against plain models with merged weights, one row at a time."""

from __future__ import annotations

from typing import Any

import torch

from fedguild.data.batches import Encoded, collate
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows
from tests.oracles.lora import MergedModel


def assert_equal_to_merged(
    backbone: Backbone, plain: Any, plans: list[AdapterPlan], lengths: list[list[int]], near: float = 1e-6
) -> None:
    """Random slots have the losses and gradients of `plain` with their weights; in fp64, routing weights in fp32."""
    rows = [[Encoded(tuple(ids), 2) for ids in random_rows(own, slot)] for slot, own in enumerate(lengths)]
    adapters = [random_adapter(backbone.info, plan, slot) for slot, plan in enumerate(plans)]
    with SlotModel(backbone, plans) as model:
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        losses = model.token_losses(collate(rows, PAD))
        losses.sum().backward()
        assert all(tensor.stored.grad is None for name, tensor in model.loaded.items() if name not in model.trainables)
        found = [{n: t.own(slot, of=t.stored.grad) for n, t in model.trainables.items()} for slot in range(len(plans))]
    parts = losses.detach().split([sum(row.response_tokens for row in own) for own in rows])
    for slot, (plan, adapter) in enumerate(zip(plans, adapters, strict=True)):
        trained = sorted(trainable_shapes(backbone.info, plan))
        assert found[slot].keys() == set(trained)
        if not rows[slot]:
            assert not any(gradient.any() for gradient in found[slot].values())
            continue
        leaves = {name: value.clone().requires_grad_(name in trained) for name, value in adapter.items()}
        alone = MergedModel(plain, backbone.info, plan, leaves)
        expected = torch.cat([alone.losses(row.input_ids, row.prompt_length) for row in rows[slot]])
        torch.testing.assert_close(parts[slot], expected.detach(), rtol=1e-6, atol=1e-6)
        slow = torch.autograd.grad(expected.sum(), [leaves[name] for name in trained])
        for name, gradient in zip(trained, slow, strict=True):
            assert gradient.any(), name
            limit = near * float(gradient.abs().max() + 1)
            torch.testing.assert_close(found[slot][name], gradient, rtol=1e-5, atol=limit, msg=name)
