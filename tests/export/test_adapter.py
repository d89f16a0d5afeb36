"""Adapter folders in the hands of plain peft and transformers, against our own logits."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fedguild.core.errors import ModelError
from fedguild.export.adapter import obstacle, peft_config, write_adapter
from fedguild.export.weights import stacked_factors
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


def test_an_expert_by_hand(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Expert 5's gate rows are fused rank rows 10, 11 of 0 … 15; its B columns are 5 and 13 of gate, 21, 29 of up."""
    plan = AdapterPlan((Lora(1, 0.5, ("experts",)),))
    deployment = deployment_of(olmoe_backbone, plan)
    write_adapter(tmp_path, olmoe_backbone.info, deployment, base="b")
    experts = olmoe_backbone.info.moe[1].experts
    file, ours = load_file(tmp_path / "adapter_model.safetensors"), deployment.tensors
    down, up = (file[f"base_model.model.{experts}.base_layer.lora_{part}.weight"] for part in "AB")
    assert (tuple(down.shape), tuple(up.shape)) == ((16, 16), (16, 16))
    assert torch.equal(down[10], ours[f"{experts}.gate_proj.lora_A"][5, 0])
    assert torch.equal(down[11], ours[f"{experts}.up_proj.lora_A"][5, 0])
    assert torch.equal(up[:8, 5], ours[f"{experts}.gate_proj.lora_B"][5, :, 0])
    assert torch.equal(up[8:, 13], ours[f"{experts}.up_proj.lora_B"][5, :, 0])
    assert up[8:, 5].abs().max() == 0
    assert up[:8, 13].abs().max() == 0


def test_the_config_of_a_mixture_of_experts(olmoe_backbone: Backbone) -> None:
    config = peft_config(olmoe_backbone.info, AdapterPlan((Lora(20, 0.8, EVERYTHING),)), base="b")
    assert config["target_modules"] == [f"self_attn.{leaf}_proj" for leaf in "koqv"]
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.gate.weight"]
    assert (config["r"], config["lora_alpha"]) == (20, 16)
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"gate_up_proj": 40}, {"gate_up_proj": 32})
    assert json.loads(json.dumps(config)) == config


def test_the_config_of_a_dense_model(llama_backbone: Backbone) -> None:
    config = peft_config(llama_backbone.info, AdapterPlan((Lora(4, 2.0, ("q_proj", "mlp")),)), base="b", revision="v1")
    assert config["target_modules"] == ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj"]
    assert config["target_parameters"] is None
    assert (config["lora_alpha"], config["rank_pattern"]) == (8, {})
    assert (config["base_model_name_or_path"], config["revision"]) == ("b", "v1")


def test_two_modules_with_one_input_stack() -> None:
    tensors = {
        "a.lora_A": torch.tensor([[1.0, 2.0]]),
        "a.lora_B": torch.tensor([[3.0]]),
        "b.lora_A": torch.tensor([[4.0, 5.0]]),
        "b.lora_B": torch.tensor([[6.0]]),
    }
    down, up = stacked_factors(tensors, ("a", "b"))
    assert down.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert up.tolist() == [[3.0, 0.0], [0.0, 6.0]]


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
