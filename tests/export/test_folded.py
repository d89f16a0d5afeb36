"""A factor between A and B in an export: plain peft and plain transformers get two factors, or none."""

from __future__ import annotations

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fedguild.export.adapter import write_adapter
from fedguild.export.merged import write_merged
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from tests.export.conftest import assert_same_logits, backbone_of, deployment_of, plain_logits, slot_logits

TARGETS = {"olmoe": ("attention", "router", "experts"), "llama": ("attention", "mlp")}

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")


def between(family: str) -> AdapterPlan:
    return AdapterPlan((Lora(3, 0.7, TARGETS[family], middle=True, frozen=("lora_A", "lora_B")),))


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_the_written_model_gives_our_logits(form, family, base_folder, tmp_path):
    base = base_folder(family)
    backbone = backbone_of(base)
    deployment = deployment_of(backbone, between(family))
    if form == "adapter":
        write_adapter(tmp_path, backbone.info, deployment, base=str(base))
        written = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    else:
        write_merged(tmp_path, backbone, deployment)
        written = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = slot_logits(backbone, deployment)
    assert_same_logits(plain_logits(written), ours)
    change = (plain_logits(AutoModelForCausalLM.from_pretrained(base)) - ours).abs().max()
    assert change > 0.01 * ours.abs().max()
