"""gpt-oss as it is published: its experts packed in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from fedguild.core.errors import ConfigError
from fedguild.model.backbone import inspect_model, load_backbone
from tests.backbones import random_rows
from tests.families import tiny_model
from tests.runs.runs import save_model

SIZES = {"hidden_size": 64, "intermediate_size": 32}
LAYERS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random packed experts: 32 values of four bits, each block with a power of two as its scale."""
    folder = save_model(tmp_path_factory.mktemp("models") / "gpt-oss", "gpt_oss", make=tiny_model, **SIZES)
    rng, packed = torch.Generator().manual_seed(0), {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.dim() < 3:
            packed[name] = weight.bfloat16()
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        packed[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=rng)
        packed[f"{name}_scales"] = torch.randint(120, 125, shape, dtype=torch.uint8, generator=rng)
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_experts_are_unpacked(folder: Path) -> None:
    assert inspect_model(str(folder)).moe[0].num_experts == 8
    backbone = load_backbone(str(folder), device="cpu", dtype="float32")
    unpacked = {"quantization_config": Mxfp4Config(dequantize=True), "attn_implementation": "eager"}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **unpacked).float()
    plain.set_experts_implementation("eager")
    ids = torch.tensor(random_rows([9, 9], seed=1))
    with torch.no_grad():
        expected, found = (model(ids, use_cache=False).logits for model in (plain, backbone.model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-5)
    assert not hasattr(backbone.model.config, "quantization_config")  # what a merged export writes


def test_they_are_not_packed_again(folder: Path) -> None:
    with pytest.raises(ConfigError, match="in MXFP4 already"):
        load_backbone(str(folder), device="cpu", load_in_4bit=True)
