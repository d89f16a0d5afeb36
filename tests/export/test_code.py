"""Export folders with modelling code: plain transformers gives what FedGuild's slots give, without FedGuild."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fedguild.core.errors import ModelError
from fedguild.export.code import standalone_of, write_code
from fedguild.export.live import attached
from fedguild.methods.fedamole.mixture import MixtureOfLora
from fedguild.methods.pfl_moe.logit_mixture import LogitMixture
from fedguild.methods.ub_smoe.modulated_routing import ModulatedRouting
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.adapters.soft_prompt import SoftPrompt
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import Deployment
from tests import families
from tests.backbones import MOE_FAMILIES, is_released, random_adapter, tiny_backbone

PROMPTS = [[5, 9, 3, 7], [4, 8], [11, 6, 10]]
EVERYWHERE = ("attention", "router", "experts")
LORA = Lora(2, 2.0, EVERYWHERE)
HELD = tuple(
    (f"model.layers.{layer}.self_attn.{leaf}", ids)
    for layer, ids in ((0, (1, 4, 2)), (1, (5, 0)))
    for leaf in ("q_proj", "v_proj")
)
MIXTURE = MixtureOfLora(("q_proj", "v_proj"), 2, 2.0, 6, 3, 2, held=HELD)
PARTS: dict[str, tuple[AdapterPart, ...]] = {
    "modulated": (LORA, ModulatedRouting(candidates=3)),
    "modulated, the largest preserved": (LORA, ModulatedRouting("preserve", 1, "native")),
    "renormalised alone": (LORA, ModulatedRouting("none", 2)),
    "modulated beside an output scale": (LORA, OutputScale(), ModulatedRouting(candidates=3)),
    "mixture of lora": (MIXTURE,),
    "mixture of lora, vanilla": (replace(MIXTURE, router="vanilla", shared=False, renormalise=False),),
    "mixture of lora, by width": (replace(MIXTURE, score_scale="hidden"),),
    "mixture of logits": (LogitMixture(2, EVERYWHERE), LORA),
    "mixture of logits, by embeddings": (LogitMixture(2, ("q_proj",), "embedding"), Lora(2, 2.0, ("q_proj",))),
}


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the copies that transformers makes of modelling code out of the user's cache."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def made(parts: tuple[AdapterPart, ...], family: str = "olmoe", active: int | None = 2) -> tuple[Backbone, Deployment]:
    backbone = tiny_backbone(family) if family in MOE_FAMILIES else families.tiny_backbone(family)
    backbone.tokenizer = None
    plan = AdapterPlan(parts, active)
    tensors = {name: value.float() for name, value in random_adapter(backbone.info, plan, seed=5).items()}
    return backbone, Deployment(plan, tensors)


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def padded() -> dict[str, Tensor]:
    width = max(map(len, PROMPTS))
    return {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in PROMPTS]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in PROMPTS]),
    }


@torch.no_grad()
def seen(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the prompts, at their ends; those of a prompt alone; and greedy continuations."""
    inputs = padded()
    continued = model.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    return model(**inputs).logits[:, -1], model(torch.tensor(PROMPTS[:1])).logits, continued


@pytest.mark.parametrize("label", PARTS)
def test_plain_transformers_computes_and_generates_what_fedguild_does(label: str, tmp_path: Path) -> None:
    backbone, deployment = made(PARTS[label], active=None if "lora" in label else 2)
    write_code(tmp_path / "model", backbone, deployment)
    found = seen(loaded(tmp_path / "model"))
    with torch.no_grad():
        plain = backbone.model(torch.tensor(PROMPTS[:1])).logits
    expected = seen(attached(backbone, deployment))
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))
    assert torch.equal(found[2], expected[2])
    assert (plain - expected[1]).abs().max() > 1e-2


ORDINARY = ("mixtral", "gpt_oss", "minimax")
SOFTMAX = [
    *("aria_text", "deepseek_v2", "flex_olmo", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    *("hunyuan_v1_moe", "jamba", "mellum", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
]


@pytest.mark.parametrize("family", [*ORDINARY, *(pytest.param(name, marks=pytest.mark.long) for name in SOFTMAX)])
def test_every_family_whose_routing_can_be_modulated(family: str, tmp_path: Path) -> None:
    """MiniMax has a cache of its own, which forgets in transformers, too, that a row is padded."""
    if not is_released(family):
        pytest.skip(f"this transformers is too old for {family}")
    backbone, deployment = made(PARTS["modulated"], family)
    write_code(tmp_path / "model", backbone, deployment)
    found, expected = seen(loaded(tmp_path / "model")), seen(attached(backbone, deployment))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5 * float(expected[0].abs().max()))
    assert torch.equal(found[2][:1], expected[2][:1])


def test_the_folder_needs_no_fedguild_and_loses_no_precision(tmp_path: Path) -> None:
    backbone, deployment = made(PARTS["modulated"])
    write_code(tmp_path / "model", backbone, deployment)
    code = (tmp_path / "model" / "modeling_fedguild.py").read_text()
    assert "from transformers import OlmoeForCausalLM as Base" in code
    assert not re.search(r"^(import|from) fedguild", code, re.MULTILINE)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["num_experts_per_tok"] == 2
    assert config["auto_map"] == {"AutoModelForCausalLM": "modeling_fedguild.FedGuildOlmoeForCausalLM"}
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True, dtype=torch.bfloat16)
    phi = dict(half.named_buffers())
    ours = {f"fedguild.{name.replace('.', '/')}": value for name, value in deployment.tensors.items() if "phi" in name}
    assert ours
    assert all(torch.equal(phi[name], value) for name, value in ours.items())


def test_beams_are_refused_where_two_models_are_mixed(tmp_path: Path) -> None:
    backbone, deployment = made(PARTS["mixture of logits"])
    write_code(tmp_path / "model", backbone, deployment)
    with pytest.raises(ValueError, match="num_beams=1"):
        loaded(tmp_path / "model").generate(**padded(), num_beams=2, max_new_tokens=2, pad_token_id=0)


def test_a_part_without_code_has_none(tmp_path: Path) -> None:
    backbone, deployment = made((SoftPrompt(3),), active=None)
    assert standalone_of(backbone, deployment) is None
    with pytest.raises(ModelError, match="no stand-alone code"):
        write_code(tmp_path / "model", backbone, deployment)
