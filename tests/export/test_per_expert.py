"""Per-expert adapters: peft's fused form bit for bit, the servers' rules, and the merged model's logits by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fedguild.core.errors import ModelError
from fedguild.export.adapter import peft_tensors
from fedguild.export.card import Origin, per_expert_card
from fedguild.export.per_expert import factors_from_experts, published_names, write_per_expert
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import Deployment
from tests.export.conftest import assert_same_logits, backbone_of, deployment_of, plain_logits, slot_logits

BaseFolder = Callable[..., Path]
EVERYWHERE = ("attention", "router", "experts")
FAMILIES = ("olmoe", "mixtral", "qwen3_moe")
EXPERTS, RANK, SCALE = 8, 3, 0.7
PLAN = AdapterPlan((Lora(RANK, SCALE, EVERYWHERE),))
EXPERT_KEY = re.compile(r"base_model\.model\.(model\.layers\.\d+\.\w+)\.experts\.(\d+)\.(\w+)\.lora_([AB])\.weight")
THREE = {"olmoe": ("gate_proj", "down_proj", "up_proj"), "mixtral": ("w1", "w2", "w3")}
"""A family's names of w1, w2, w3 in vLLM, in the order in which `pack_moe` takes them; `olmoe`'s for all others."""


def exported(family: str, base: Path, folder: Path) -> tuple[Backbone, Deployment, dict[str, Tensor], dict]:
    backbone = backbone_of(base)
    deployment = deployment_of(backbone, PLAN)
    write_per_expert(folder, backbone, deployment, base=str(base))
    config = json.loads((folder / "adapter_config.json").read_text())
    return backbone, deployment, load_file(folder / "adapter_model.safetensors"), config


def split(fused: dict[str, Tensor], experts: str, three: tuple[str, ...], inner: int) -> dict[str, Tensor]:
    """Per-expert keys of one layer, from peft's fused form by the rule of its packing: A expert-slowest, B fastest."""
    gate, down, up = three
    parts: dict[str, Tensor] = {}
    down_a, down_b = (fused[f"{experts}.lora_{side}.weight"] for side in "AB")
    both_a, both_b = (fused[f"{experts}.base_layer.lora_{side}.weight"] for side in "AB")
    for expert in range(EXPERTS):
        parts[f"{expert}.{down}.A"] = down_a.view(EXPERTS, RANK, -1)[expert]
        parts[f"{expert}.{down}.B"] = down_b.view(-1, RANK, EXPERTS)[..., expert]
        a, b = both_a.view(EXPERTS, 2 * RANK, -1)[expert], both_b.view(-1, 2 * RANK, EXPERTS)[..., expert]
        parts[f"{expert}.{gate}.A"], parts[f"{expert}.{up}.A"] = a[:RANK], a[RANK:]
        parts[f"{expert}.{gate}.B"], parts[f"{expert}.{up}.B"] = b[:inner, :RANK], b[inner:, RANK:]
        assert not b[:inner, RANK:].any()
        assert not b[inner:, :RANK].any()
    return parts


def joined(parts: dict[str, Tensor], three: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fused A and B of down and of gate and up, from per-expert keys."""
    gate, down, up = three
    of = [{name: parts[f"{expert}.{name}"] for name in _names(three)} for expert in range(EXPERTS)]
    down_a = torch.cat([one[f"{down}.A"] for one in of])
    down_b = torch.stack([one[f"{down}.B"] for one in of], dim=-1).flatten(1)
    both_a = torch.cat([torch.cat([one[f"{gate}.A"], one[f"{up}.A"]]) for one in of])
    both_b = torch.stack([torch.block_diag(one[f"{gate}.B"], one[f"{up}.B"]) for one in of], dim=-1).flatten(1)
    return down_a, down_b, both_a, both_b


def _names(three: tuple[str, ...]) -> list[str]:
    return [f"{name}.{side}" for name in three for side in "AB"]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_form_is_the_other_bit_for_bit(family: str, base_folder: BaseFolder, tmp_path: Path) -> None:
    backbone, deployment, ours, _ = exported(family, base_folder(family), tmp_path)
    back = factors_from_experts(backbone, deployment.plan, ours)
    assert back.keys() == deployment.tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in deployment.tensors.items())
    fused = peft_tensors(backbone.info, deployment)
    three = THREE.get(family, THREE["olmoe"])
    for moe in backbone.info.moe:
        layer = moe.experts.split(".")[2]
        own = {
            f"{key[2]}.{key[3]}.{key[4]}": value
            for name, value in ours.items()
            if (key := EXPERT_KEY.fullmatch(name)) and key[1].split(".")[2] == layer
        }
        parts = split(fused, f"base_model.model.{moe.experts}", three, moe.width)
        assert own.keys() == parts.keys()
        assert all(torch.equal(own[name], parts[name]) for name in own)
        again = joined(own, three)
        names = [f"{moe.experts}{where}.lora_{side}.weight" for where in ("", ".base_layer") for side in "AB"]
        assert all(torch.equal(fused[f"base_model.model.{n}"], tensor) for n, tensor in zip(names, again, strict=True))
    linear = {name: value for name, value in ours.items() if "self_attn" in name}
    assert all(torch.equal(fused[name], value) for name, value in linear.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_packing_are_what_the_servers_take(family, base_folder, tmp_path):
    """The rules in the docstring of `fedguild.export.per_expert`, written down again from the servers' side."""
    backbone, _, ours, config = exported(family, base_folder(family), tmp_path)
    assert all(re.fullmatch(r"base_model\.model\.[\w.]+\.lora_[AB]\.weight", name) for name in ours)
    three = THREE.get(family, THREE["olmoe"])
    expected = {f"experts.{expert}.{name}" for expert in range(EXPERTS) for name in three}
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in ours}
    of_experts = [module for module in modules if ".experts" in module]
    assert {module[module.find(".experts") + 1 :] for module in of_experts} == expected
    assert len(of_experts) == len(backbone.info.moe) * len(expected)
    assert not any("base_layer" in name for name in ours)
    hidden, width = backbone.info.hidden, backbone.info.moe[0].width
    inputs = {three[0]: hidden, three[1]: width, three[2]: hidden}
    for name, value in ours.items():
        if key := EXPERT_KEY.fullmatch(name):
            inside, outside = inputs[key[3]], width if inputs[key[3]] == hidden else hidden
            assert tuple(value.shape) == ((RANK, inside) if key[4] == "A" else (outside, RANK))
        assert value.shape[0 if ".lora_A." in name else 1] == config["r"] == RANK
    assert config["lora_alpha"] / config["r"] == pytest.approx(SCALE)
    assert set(config) & {"rank_pattern", "alpha_pattern", "target_parameters", "modules_to_save"} == set()
    assert {module.rsplit(".", 1)[-1] for module in modules} == set(config["target_modules"])


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_by_hand_into_the_unfused_weights_it_gives_our_logits(family, base_folder, tmp_path):
    base = base_folder(family)
    backbone, deployment, ours, config = exported(family, base, tmp_path / "adapter")
    weights = load_file(base / "model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    for name in [name for name in ours if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weights[f"{module}.weight"] += scale * (ours[name.replace("lora_A", "lora_B")] @ ours[name])
    (tmp_path / "merged").mkdir()
    save_file(weights, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "merged" / "config.json").write_text((base / "config.json").read_text())
    found = plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    expected = slot_logits(backbone, deployment)
    assert_same_logits(found, expected)
    assert (plain_logits(AutoModelForCausalLM.from_pretrained(base)) - expected).abs().max() > 0.01


def test_what_an_adapter_cannot_carry_is_refused(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    plan = AdapterPlan((Lora(2, 1.0, ("experts",)), OutputScale("fixed", 2.0)))
    with pytest.raises(ModelError, match="scales the output of the experts"):
        write_per_expert(tmp_path, olmoe_backbone, deployment_of(olmoe_backbone, plan), base="b")
    assert not list(tmp_path.iterdir())


def test_a_weight_that_is_no_linear_layer_on_the_hub_is_named(olmoe_backbone, monkeypatch):
    weight = f"{olmoe_backbone.info.moe[0].experts}.down_proj"
    monkeypatch.setattr("fedguild.export.per_expert.revert_weight_conversion", lambda model, weights: weights)
    with pytest.raises(ModelError, match="is not stored as linear layers"):
        published_names(olmoe_backbone, weight, 1, EXPERTS)


def test_a_rank_beyond_vllms_largest_needs_the_merged_form(olmoe_backbone: Backbone) -> None:
    origin = Origin("run", "FedIT", 1, "all", "base", '"me/base"')
    for rank, told in ((512, "max_lora_rank=512)"), (513, "# vLLM takes ranks up to 512: export with --format merged")):
        card = per_expert_card(origin, olmoe_backbone.info, Deployment(AdapterPlan((Lora(rank, 1.0, EVERYWHERE),)), {}))
        assert told in card
        assert f"--max-lora-rank {rank}" in card
        assert ("LLM(" in card) is (rank == 512)
