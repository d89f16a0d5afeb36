"""Copies of the factors in the dtype of the products: made once, and anew after every change."""

from __future__ import annotations

import pytest
import torch

from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.lora import Lora
from fedguild.model.moe.casts import Casts
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone


def test_a_tensor_is_cast_once_until_it_changes():
    casts, tensor = Casts(), torch.ones(2, 3, requires_grad=True)
    first = casts.of(tensor, torch.bfloat16)
    assert first.dtype is torch.bfloat16
    assert not first.requires_grad
    assert casts.of(tensor, torch.bfloat16) is first
    tensor.detach().mul_(3.0)
    assert casts.of(tensor, torch.bfloat16).tolist() == [[3.0] * 3] * 2
    assert casts.of(tensor, torch.float16).dtype is torch.float16
    assert casts.of(tensor, torch.float32) is tensor


@pytest.mark.parametrize("scaled", [False, True])
def test_a_kept_cast_has_the_gradient_of_a_cast(scaled):
    """Also where an evaluation has made it."""
    casts, tensor = Casts(), torch.randn(3, 4, 5, requires_grad=True)
    scale = torch.tensor([0.5, 3.0, 0.1])[:, None, None] if scaled else None
    with torch.inference_mode():
        casts.with_gradient(tensor, torch.bfloat16, scale)
    weight = torch.randn(3, 4, 5).to(torch.bfloat16)
    for _ in range(2):
        (casts.with_gradient(tensor, torch.bfloat16, scale) * weight).sum().backward()
    found, tensor.grad = tensor.grad, None
    for _ in range(2):
        ((tensor if scale is None else tensor * scale).to(torch.bfloat16) * weight).sum().backward()
    assert torch.equal(found, tensor.grad)


def test_two_passes_of_a_step_cast_once_and_the_next_step_anew(monkeypatch):
    """Each of three projections' two factors in each of two layers, and the scale of each layer once for all.

    The losses follow the updates.
    """
    made = []
    original = Casts.of

    def counted(self, tensor, dtype):
        known = dict(self._kept)
        out = original(self, tensor, dtype)
        made.append(out is not tensor and known.get(id(tensor), (None,) * 3)[2] is not out)
        return out

    monkeypatch.setattr(Casts, "of", counted)
    backbone = tiny_backbone("olmoe", dtype=torch.bfloat16, initializer_range=0.1)
    plan = AdapterPlan((Lora(8, 1.0, ("experts",)),))
    batch = collate([[Encoded(tuple(ids), 1) for ids in random_rows([9, 9], 1)]], PAD)
    with SlotModel(backbone, [plan]) as model:
        model.load(0, random_adapter(backbone.info, plan, 1, size=0.1))
        optimizer = SlotOptimizer(model.trainables, TrainingSettings(optimizer="adamw"))
        counts, losses = [], []
        for _ in range(2):
            made.clear()
            for _ in range(2):
                losses.append(model.token_losses(batch).sum())
                losses[-1].backward()
            optimizer.step([0.05])
            counts.append(sum(made))
    assert counts == [12 + 2, 12]
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    assert losses[2] < losses[1]
