"""Linear layers trained in full against weights that were changed, values and gradients."""

from __future__ import annotations

import pytest
import torch

from fedguild.core.errors import ConfigError
from fedguild.methods.fed_sb.full_linears import FullLinears
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from tests.backbones import tiny_backbone, tiny_model
from tests.model.merged import assert_equal_to_merged

PART = FullLinears(("attention", "mlp"))
PLAN = AdapterPlan((PART,))
BESIDE = AdapterPlan((Lora(2, 0.5, ("q_proj",)), PART))


@pytest.mark.parametrize("plan", [PLAN, BESIDE], ids=["alone", "beside LoRA"])
@pytest.mark.parametrize("lengths", [[[7, 5], [], [9]], [[4], [6], [3]]], ids=["unequal slots", "equal slots"])
def test_slots_equal_their_merged_models_in_losses_and_gradients(plan, lengths):
    backbone, plain = (make("llama", dtype=torch.float64) for make in (tiny_backbone, tiny_model))
    assert_equal_to_merged(backbone, plain, [plan] * 3, lengths)


def test_an_unknown_layer_is_refused(llama_backbone):
    with pytest.raises(ConfigError, match="w_proj name no layer"):
        FullLinears(("w_proj",)).shapes(llama_backbone.info)
