"""SwitchTransformers, stacked here and one expert at a time there: exports in the hands of transformers and peft."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from fedguild.export.adapter import obstacle, peft_config, write_adapter
from fedguild.export.merged import write_merged
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import make_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import random_rows, tiny_model
from tests.export.conftest import assert_same_logits, deployment_of

PLAN = AdapterPlan((Lora(3, 0.7, ("attention", "mlp", "router", "experts")), OutputScale("per_layer")))
INPUTS = {"input_ids": torch.tensor(random_rows([9, 9], 1)), "decoder_input_ids": torch.tensor(random_rows([5, 5], 2))}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switch")
    tiny_model("switch").save_pretrained(folder)
    return folder


def plain(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


@torch.no_grad()
def logits_of(model):
    return model(**INPUTS, use_cache=False).logits


def our_logits(backbone, deployment):
    with SlotModel(backbone, [deployment.plan]) as model:
        model.load(0, deployment.tensors)
        backbone.runtime.current = model._pass((2,), None)
        return logits_of(backbone.model)


@pytest.mark.parametrize("parts", [(), (FullExperts(), FullRouter())], ids=["LoRA", "LoRA and dense changes"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_merged_checkpoint_with_our_logits(parts, tied, tmp_path):
    """In fp64: in fp32 the rounding of a low-rank product and of its merge differ by about what the bound allows."""
    model = tiny_model("switch", tie_word_embeddings=tied, dtype=torch.float64)
    backbone = make_backbone(model, None, name="tiny switch")
    before = backbone.fingerprint()
    plan = AdapterPlan((Lora(3, 0.7, PLAN.lora.targets), OutputScale("per_layer"), *parts), 1)
    deployment = deployment_of(backbone, plan)
    write_merged(tmp_path, backbone, deployment, shard_bytes=2000)
    merged = plain(tmp_path)
    assert_same_logits(logits_of(merged), our_logits(backbone, deployment))
    assert merged.state_dict().keys() == tiny_model("switch").state_dict().keys()
    assert not hasattr(merged.config, "num_experts_per_tok")
    assert backbone.fingerprint() == before


def test_an_unchanged_merge_is_the_checkpoint_that_was_loaded(base, tmp_path):
    backbone = load_backbone_without_tokenizer(base)
    deployment = deployment_of(backbone, AdapterPlan((Lora(1, 0.0, ("attention",)),)))
    write_merged(tmp_path, backbone, deployment)
    found, expected = load_file(tmp_path / "model.safetensors"), load_file(base / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def load_backbone_without_tokenizer(folder):
    return make_backbone(plain(folder), None, name="tiny switch")


def test_peft_loads_the_adapter_with_our_logits(base, tmp_path):
    backbone = load_backbone_without_tokenizer(base)
    deployment = deployment_of(backbone, AdapterPlan((Lora(3, 0.7, ("attention", "mlp", "router", "experts")),)))
    assert obstacle(backbone.info, deployment) == ""
    write_adapter(tmp_path, backbone.info, deployment, base=str(base))
    adapted = PeftModel.from_pretrained(plain(base), tmp_path).eval()
    assert_same_logits(logits_of(adapted), our_logits(backbone, deployment))
    config = peft_config(backbone.info, deployment.plan, base="base")
    assert (config["task_type"], config["target_parameters"]) == ("SEQ_2_SEQ_LM", None)
