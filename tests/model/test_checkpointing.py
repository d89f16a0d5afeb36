"""Gradient checkpointing: equal losses and gradients, less kept, nothing else changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedguild.core.errors import ModelError
from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import make_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import MOE_FAMILIES, PAD, random_adapter, random_rows, tiny_backbone, tiny_model

ROWS = [
    [Encoded(tuple(ids), 1) for ids in random_rows(lengths, seed)] for seed, lengths in enumerate([[9, 4], [6], []])
]


def losses_and_gradients(family: str, checkpointing: bool, dropout: float):
    backbone = tiny_backbone(family, gradient_checkpointing=checkpointing, attention_dropout=0.3)
    moe = family in MOE_FAMILIES
    targets = ("attention", "router", "experts") if moe else ("attention", "mlp")
    plan = AdapterPlan((Lora(4, 0.5, targets, dropout=dropout), OutputScale("per_layer" if moe else "none")))
    plans = [replace(plan.with_lora(rank=r), active_experts=k if moe else None) for k, r in ((2, 3), (4, 1), (1, 4))]
    kept = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with SlotModel(backbone, plans) as model:
        for slot, own in enumerate(plans):
            model.load(slot, random_adapter(backbone.info, own, slot))
        model.dropout.seed([11, 12, 13])
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            losses = model.token_losses(collate(ROWS, PAD))
        losses.sum().backward()
        grads = {name: trainable.stored.grad.clone() for name, trainable in model.trainables.items()}
    return losses.detach(), grads, sum(kept)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2 greedy", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_are_equal(family, dropout):
    losses, grads, kept = losses_and_gradients(family, False, dropout)
    again, recomputed, kept_less = losses_and_gradients(family, True, dropout)
    assert torch.equal(losses, again)
    for name, grad in grads.items():
        assert torch.equal(grad, recomputed[name]), name
    assert kept_less < 0.5 * kept


def test_generation_keeps_its_cache_under_checkpointing():
    """A layer that checkpoints drops the cache, so that each new token would see itself only."""
    plan = AdapterPlan((Lora(4, 0.5, ("attention", "experts")),))
    prompts = [random_rows([6, 3], 1)]
    texts = []
    for checkpointing in (False, True):
        backbone = tiny_backbone("olmoe", gradient_checkpointing=checkpointing)
        with SlotModel(backbone, [plan]) as model:
            model.load(0, random_adapter(backbone.info, plan, 1))
            texts.append(model.generate(prompts, 8))
    assert texts[0] == texts[1]
    assert max(map(len, texts[0][0])) > 3


def test_a_model_without_checkpointed_layers_is_refused():
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList()
    with pytest.raises(ModelError, match="gradient_checkpointing=false"):
        make_backbone(model, None, name="layerless", gradient_checkpointing=True)
