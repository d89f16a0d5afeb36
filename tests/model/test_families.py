"""Every family's whole model: our view against transformers' own, and against merged weights."""

from __future__ import annotations

import pytest
import torch

from tests.backbones import (
    DENSE_FAMILIES,
    FAMILIES,
    MOE_FAMILIES,
    lora_plan,
    random_rows,
    tiny_backbone,
    tiny_model,
)
from tests.model.merged import assert_equal_to_merged

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
def test_slots_equal_their_merged_models_in_losses_and_gradients(family):
    """Three slots of mixed rank, scale and active experts, one of them without rows."""
    moe = family in MOE_FAMILIES
    kind = "per_layer" if moe else "none"
    plans = [
        lora_plan(rank, scale, EVERY_TARGET[family], active if moe else None, output_scale=kind)
        for rank, scale, active in ((3, 0.5, 2), (1, 2.0, None), (4, 1.0, 1))
    ]
    backbone, plain = (make(family, dtype=torch.float64) for make in (tiny_backbone, tiny_model))
    assert_equal_to_merged(backbone, plain, plans, [[7, 5], [], [9]])
