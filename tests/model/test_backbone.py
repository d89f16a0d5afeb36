"""Loading, describing and fingerprinting a backbone, and what is refused with which words."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from fedguild.core.errors import ConfigError, ModelError
from fedguild.model.backbone import describe_config, load_backbone, pick_device, pick_dtype
from tests.backbones import FAMILIES, VOCABULARY, random_rows, tiny_backbone, tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a tiny OLMoE and a tokenizer without a padding token."""
    folder = tmp_path_factory.mktemp("model") / "olmoe"
    tiny_model("olmoe").save_pretrained(folder)
    words = {"<end>": 2, **{f"w{index}": index for index in range(VOCABULARY) if index != 2}}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3")), eos_token="<end>", unk_token="w3"
    ).save_pretrained(folder)
    return folder


def test_on_a_cpu_freed_pages_are_kept_before_anything_is_loaded(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("fedguild.model.backbone.keep_freed_pages", lambda: calls.append(1))
    with pytest.raises(ModelError):
        load_backbone(str(tmp_path), device="cpu")
    assert calls == [1]


def test_a_saved_model_loads_frozen_with_equal_logits(saved):
    backbone = load_backbone(str(saved), device="cpu")
    ids = torch.tensor(random_rows([7], 1))
    with torch.no_grad():
        assert torch.allclose(backbone.model(ids).logits, tiny_model("olmoe")(ids).logits, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    assert backbone.tokenizer.pad_token_id == backbone.tokenizer.eos_token_id == 2
    assert (backbone.dtype, backbone.device.type, backbone.info.family) == (torch.float32, "cpu", "olmoe")


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float64", torch.float64)])
def test_the_dtype_is_the_users(saved, dtype, expected):
    backbone = load_backbone(str(saved), dtype=dtype, device="cpu")
    assert backbone.dtype is expected
    assert {parameter.dtype for parameter in backbone.model.parameters()} == {expected}


def test_weights_are_read_straight_to_their_device(saved, monkeypatch):
    """On `meta` no weight passes through the host, and the model as a whole is never moved."""
    monkeypatch.setattr(torch.nn.Module, "to", lambda *_: pytest.fail("the model was moved"))
    backbone = load_backbone(str(saved), device="meta")
    assert {parameter.device.type for parameter in backbone.model.parameters()} == {"meta"}
    assert backbone.device == torch.device("meta")


def test_without_accelerate_a_model_passes_through_the_host(saved, monkeypatch):
    moved = []
    monkeypatch.setattr("fedguild.model.backbone.is_accelerate_available", lambda: False)
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, *to: moved.append(to) or model)
    load_backbone(str(saved), device="meta")
    assert [to for to in moved if len(to) == 1] == [
        (torch.device("meta"),)
    ]  # a copied layer's router gets a dtype, too


def test_a_config_alone_describes_the_same_model(saved):
    assert describe_config(str(saved)) == load_backbone(str(saved), device="cpu").info


@pytest.mark.parametrize("family", FAMILIES)
def test_the_description_counts_what_is_there(family):
    backbone = tiny_backbone(family)
    info = backbone.info
    assert info.parameters == sum(parameter.numel() for parameter in backbone.model.parameters())
    assert (info.hidden, info.layers, info.vocabulary) == (16, 2, VOCABULARY)
    for linear in info.linears:
        assert backbone.model.get_submodule(linear.name).weight.shape == (linear.outputs, linear.inputs)
        assert linear.group == ("attention" if ".self_attn." in linear.name else "mlp")
    sparse = {"deepseek_v2 greedy": 1, "deepseek_v2 grouped": 1, "deepseek_v3": 1, "llama": 0, "qwen2": 0, "olmo": 0}
    assert len(info.moe) == sparse.get(family, 2)
    for layer in info.moe:
        assert (layer.num_experts, layer.top_k, layer.hidden, layer.width) == (8, 4, 16, 8)
        assert backbone.model.get_submodule(layer.experts).down_proj.shape == (8, 16, 8)
        assert backbone.model.get_submodule(layer.router).weight.shape == (8, 16)


def test_the_fingerprint_notices_one_changed_bit():
    backbone = tiny_backbone("olmoe", dtype=torch.bfloat16)
    before = backbone.fingerprint()
    assert before == tiny_backbone("olmoe", dtype=torch.bfloat16).fingerprint()
    weight = backbone.model.model.layers[1].mlp.experts.down_proj
    with torch.no_grad():
        weight.view(torch.int16)[3, 2, 1] ^= 1
    assert backbone.fingerprint() != before


def test_a_missing_model_names_its_path(tmp_path):
    with pytest.raises(ModelError, match=r"Cannot load the model '.*nowhere'[\s\S]*hub id, a folder"):
        load_backbone(str(tmp_path / "nowhere"), device="cpu")
    with pytest.raises(ModelError, match=r"Cannot read the config of '.*nowhere'"):
        describe_config(str(tmp_path / "nowhere"))
    with pytest.raises(
        ModelError, match=r"config of '\./nowhere': there is no such folder or file[\s\S]*hub id, a folder"
    ):
        describe_config("./nowhere")
    with pytest.raises(ModelError, match=r"the folder has no config.json[\s\S]*hub id, a folder"):
        describe_config(str(tmp_path))


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 3}, {"num_hidden_layers": 1}, {"num_experts": 16}])
def test_weights_that_are_not_those_of_the_config_are_refused_at_loading_too(saved, tmp_path, changes):
    """So also where they come from the hub: transformers alone would fill in random numbers, or leave out layers."""
    folder = shutil.copytree(saved, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match="are not those that its config"):
        load_backbone(str(folder), device="cpu")


def test_an_unknown_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(ModelError, match="Cannot read the config"):
        describe_config(str(tmp_path))
    with pytest.raises(ModelError, match="Cannot load the model"):
        load_backbone(str(tmp_path), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(saved):
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=r"model.device[\s\S]*no GPU[\s\S]*cpu or auto"):
            load_backbone(str(saved), device=device)
    assert pick_device("auto") == torch.device("cpu")


def test_unknown_devices_and_dtypes_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown device 'gpu'[\s\S]*auto, cpu, cuda"):
        pick_device("gpu")
    with pytest.raises(ConfigError, match=r"unknown dtype 'half'[\s\S]*float32, bfloat16"):
        pick_dtype("half", torch.device("cpu"))


def test_auto_picks_fp32_on_a_cpu_and_bf16_on_a_gpu():
    assert pick_dtype("auto", torch.device("cpu")) is torch.float32
    assert pick_dtype("auto", torch.device("cuda")) is torch.bfloat16
