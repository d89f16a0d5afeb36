"""Adapter folders in the hands of plain peft and transformers, against our own logits."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fedguild.core.errors import ModelError
from fedguild.export.adapter import WEIGHTS_FILE, factors_from_peft, obstacle, write_adapter
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import Deployment
from tests.backbones import DENSE_FAMILIES, MOE_FAMILIES, TOP_K, lora_plan
from tests.export.conftest import assert_same_logits, backbone_of, deployment_of, plain_logits, slot_logits

BaseFolder = Callable[..., Path]
SHARED_MLP = ("qwen2_moe", "deepseek_v2 greedy")
EVERYTHING = ("attention", "router", "experts")

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")


def loaded_by_peft(base: Path, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)


CASES = [
    *((family, EVERYTHING) for family in MOE_FAMILIES),
    *((family, ("attention", "mlp")) for family in DENSE_FAMILIES),
    *((family, ("mlp", "experts")) for family in SHARED_MLP),
    ("olmoe", ("experts",)),
    ("olmoe", ("router",)),
    ("mixtral", ("q_proj", "v_proj")),
]


@pytest.mark.parametrize(("family", "targets"), CASES, ids=[f"{family}-{'+'.join(t)}" for family, t in CASES])
def test_peft_gives_our_logits(family: str, targets: tuple[str, ...], base_folder: BaseFolder, tmp_path: Path) -> None:
    base = base_folder(family)
    backbone = backbone_of(base)
    deployment = deployment_of(backbone, AdapterPlan((Lora(3, 0.7, targets),)))
    write_adapter(tmp_path, backbone.info, deployment, base=str(base))
    again = factors_from_peft(backbone.info, deployment.plan, load_file(tmp_path / WEIGHTS_FILE))
    assert again.keys() == deployment.tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in deployment.tensors.items())
    ours = slot_logits(backbone, deployment)
    assert_same_logits(plain_logits(loaded_by_peft(base, tmp_path)), ours)
    change = (plain_logits(AutoModelForCausalLM.from_pretrained(base)) - ours).abs().max()
    assert change > 0.01 * ours.abs().max()


def test_a_rank_below_the_full_one_keeps_the_full_ones_scale(base_folder: BaseFolder, tmp_path: Path) -> None:
    base = base_folder("olmoe")
    backbone = backbone_of(base)
    deployment = deployment_of(backbone, AdapterPlan((Lora(1, 16 / 12, EVERYTHING),)))
    write_adapter(tmp_path, backbone.info, deployment, base=str(base))
    assert_same_logits(plain_logits(loaded_by_peft(base, tmp_path)), slot_logits(backbone, deployment))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"active_experts": TOP_K}, ""),
        ({"output_scale": "fixed", "start": 1.0}, ""),
        ({"active_experts": 2}, "it runs 2 of the model's 4 active experts"),
        ({"output_scale": "fixed", "start": 2.0}, "scales the output of the experts, by 2 to 2"),
        ({"output_scale": "shared"}, "scales the output of the experts"),
        ({"output_scale": "per_layer"}, "scales the output of the experts"),
    ],
)
def test_what_an_adapter_cannot_carry(changes: dict, told: str, olmoe_backbone: Backbone) -> None:
    plan = lora_plan(2, 1.0, ("experts",), **changes)
    found = obstacle(olmoe_backbone.info, deployment_of(olmoe_backbone, plan))
    assert told in found
    assert bool(found) == bool(told)


@pytest.mark.parametrize("parts", [(), (OutputScale("fixed", 1.0),)])
def test_a_plan_without_lora_is_no_adapter(parts: tuple[OutputScale, ...], olmoe_backbone: Backbone) -> None:
    found = obstacle(olmoe_backbone.info, deployment_of(olmoe_backbone, AdapterPlan(parts)))
    assert found == "it trains no LoRA"


def test_experts_trained_in_full_are_refused(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    plan = AdapterPlan((Lora(2, 1.0, ("q_proj",)), FullExperts()))
    deployment = deployment_of(olmoe_backbone, plan)
    told = r"4 of its weights are trained in full, for example model\.layers\.0\.mlp\.experts\.gate_up_proj"
    assert re.search(told, obstacle(olmoe_backbone.info, deployment))
    with pytest.raises(ModelError, match=rf"An adapter alone cannot carry the model: {told}(.|\n)*merged form"):
        write_adapter(tmp_path, olmoe_backbone.info, deployment, base="b")
    assert not list(tmp_path.iterdir())


def test_a_learned_scale_of_one_is_no_obstacle(olmoe_backbone: Backbone) -> None:
    plan = AdapterPlan((Lora(2, 1.0, ("experts",)), OutputScale("per_layer")))
    tensors = deployment_of(olmoe_backbone, plan).tensors
    ones = {name: torch.ones(()) if name.endswith("output_scale") else value for name, value in tensors.items()}
    assert obstacle(olmoe_backbone.info, Deployment(plan, ones)) == ""
