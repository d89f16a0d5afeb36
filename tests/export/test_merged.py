"""Merged checkpoints in the hands of plain transformers, against our own logits."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from fedguild.core.errors import ModelError
from fedguild.data.rendering import ends_of
from fedguild.export.adapter import obstacle
from fedguild.export.merged import _write_generation_config, merged_weights, write_merged
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import Deployment
from tests.backbones import DENSE_FAMILIES, MOE_FAMILIES, tiny_backbone, tiny_model
from tests.data.chat_templates import tokenizer_of
from tests.export.conftest import assert_same_logits, backbone_of, deployment_of, plain_logits, slot_logits

BaseFolder = Callable[..., Path]
EVERYTHING = ("attention", "router", "experts")


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("active", [4, 1])
def test_transformers_gives_our_logits_at_the_budgets_active_experts(family, active, base_folder, tmp_path):
    backbone = backbone_of(base_folder(family))
    before = backbone.fingerprint()
    plan = AdapterPlan((Lora(3, 0.7, EVERYTHING), OutputScale("per_layer")), active)
    deployment = deployment_of(backbone, plan)
    write_merged(tmp_path, backbone, deployment)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert merged.config.num_experts_per_tok == active
    assert_same_logits(plain_logits(merged), slot_logits(backbone, deployment))
    assert backbone.fingerprint() == before
    assert backbone.model.config.num_experts_per_tok == 4


@pytest.mark.parametrize("family", DENSE_FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_dense_models(family: str, tied: bool, base_folder: BaseFolder, tmp_path: Path) -> None:
    backbone = backbone_of(base_folder(family, tie_word_embeddings=tied))
    deployment = deployment_of(backbone, AdapterPlan((Lora(3, 0.7, ("attention", "mlp")),)))
    write_merged(tmp_path, backbone, deployment)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_logits(plain_logits(merged), slot_logits(backbone, deployment))
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "deepseek_v2 grouped"])
def test_experts_and_routers_trained_in_full(family: str, base_folder: BaseFolder, tmp_path: Path) -> None:
    backbone = backbone_of(base_folder(family))
    plan = AdapterPlan((Lora(3, 0.7, ("attention",)), OutputScale("per_layer"), FullExperts(), FullRouter()), 2)
    deployment = deployment_of(backbone, plan)
    write_merged(tmp_path, backbone, deployment)
    ours = slot_logits(backbone, deployment)
    assert_same_logits(plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path)), ours)
    without = {name: value * (not name.endswith("delta")) for name, value in deployment.tensors.items()}
    change = (slot_logits(backbone, Deployment(plan, without)) - ours).abs().max()
    assert change > 0.01 * ours.abs().max()


@dataclass(frozen=True)
class Beside(AdapterPart):
    """A part that changes what the model does, and no weight."""


def test_what_no_weight_can_hold_is_refused(tmp_path: Path) -> None:
    backbone = tiny_backbone("llama")
    deployment = deployment_of(backbone, AdapterPlan((Lora(2, 1.0, ("q_proj",)), Beside())))
    with pytest.raises(ModelError, match=r"cannot hold Beside, which acts beside the backbone's weights"):
        write_merged(tmp_path, backbone, deployment)
    assert obstacle(backbone.info, deployment) == "it trains more than LoRA, namely Beside"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["shared", "fixed"])
def test_every_kind_of_output_scale(kind: str, base_folder: BaseFolder, tmp_path: Path) -> None:
    backbone = backbone_of(base_folder("olmoe"))
    plan = AdapterPlan((Lora(2, 1.0, ("q_proj",)), OutputScale(kind, 2.5)))
    deployment = deployment_of(backbone, plan)
    write_merged(tmp_path, backbone, deployment)
    assert_same_logits(plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path)), slot_logits(backbone, deployment))


def test_bf16_is_merged_in_fp32_and_rounded_once(base_folder: BaseFolder) -> None:
    model = tiny_model("olmoe", dtype=torch.bfloat16)
    backbone = make_backbone(model, None, name="bf16")
    deployment = deployment_of(backbone, AdapterPlan((Lora(2, 0.7, ("router",)),)))
    router = backbone.info.moe[0].router
    weight = model.state_dict()[f"{router}.weight"]
    down, up = (deployment.tensors[f"{router}.lora_{part}"].double() for part in "AB")
    exact = weight.double() + 0.7 * up @ down
    found = dict(merged_weights(backbone, deployment))[f"{router}.weight"]
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= 2**-9 * exact.abs().max() * 1.001


def test_many_shards_load_as_one(base_folder: BaseFolder, tmp_path: Path) -> None:
    backbone = backbone_of(base_folder("olmoe"))
    deployment = deployment_of(backbone, AdapterPlan((Lora(2, 1.0, EVERYTHING),)))
    write_merged(tmp_path, backbone, deployment, shard_bytes=8_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert max(sum(t.nbytes for t in load_file(tmp_path / name).values()) for name in files) <= 8_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert not list(tmp_path.glob("*.part"))
    assert_same_logits(plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path)), slot_logits(backbone, deployment))


def test_four_bit_weights_are_refused(tmp_path: Path) -> None:
    backbone: Backbone = tiny_backbone("olmoe")
    backbone.model.hf_quantizer = SimpleNamespace()
    with pytest.raises(ModelError, match=r"tiny olmoe was loaded in 4 bit(.|\n)*model\.load_in_4bit=false"):
        write_merged(tmp_path, backbone, deployment_of(backbone, AdapterPlan((Lora(2, 1.0, ("q_proj",)),))))
    assert not list(tmp_path.iterdir())


def test_an_exported_model_stops_where_an_answer_ended_in_training(tmp_path: Path) -> None:
    """transformers loads a sampling setting without do_sample, but refuses to save it once anything has changed."""
    settings = {"eos_token_id": 7, "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model, tokenizer = copy.copy(tiny_backbone("llama").model), copy.deepcopy(tokenizer_of("chatml"))
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)

    def written() -> dict:
        _write_generation_config(tmp_path, model, tokenizer)
        content = json.loads((tmp_path / "generation_config.json").read_text())
        return {name: content[name] for name in settings}

    assert tokenizer.eos_token_id not in (None, 7)
    assert written() == {"eos_token_id": sorted({7, *ends_of(tokenizer)}), "temperature": 0.6}
    tokenizer.chat_template = None
    assert written() == {"eos_token_id": sorted({7, tokenizer.eos_token_id}), "temperature": 0.6}
    tokenizer.eos_token = None
    assert written() == settings
    assert model.generation_config.eos_token_id == 7
