"""Model folders of every kind: each trains, or is refused before training with what to do."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedguild.core.errors import ModelError
from fedguild.data.batches import collate
from fedguild.data.example import Example
from fedguild.data.rendering import encode
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone, inspect_model, load_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import random_adapter
from tests.model.gguf_files import write_llama
from tests.runs.runs import save_model

EXAMPLE = Example("Say it.", " The quick fox.", "", "")
ADDED = "<image>"


def train(path: Path, example: Example = EXAMPLE, **options: Any) -> Backbone:
    """Looks at a model, loads it, and takes the gradient of one example beside a longer one; returns it."""
    inspect_model(str(path), trust_remote_code=options.get("trust_remote_code", False))
    backbone = load_backbone(str(path), device="cpu", **options)
    rows = [
        encode(each, backbone.tokenizer, 64)
        for each in (example, Example("Say more.", " The quick brown fox.", "", ""))
    ]
    plan = AdapterPlan((Lora(2, 1.0, ("attention",)),))
    with SlotModel(backbone, [plan]) as model:
        model.load(0, random_adapter(backbone.info, plan, 0))
        loss = model.token_losses(collate([rows], backbone.tokenizer.pad_token_id)).mean()
        loss.backward()
        assert torch.isfinite(loss)
        assert any(tensor.stored.grad.any() for tensor in model.trainables.values())
        prompts = [[list(row.input_ids) for row in rows]]
        for ids in model.generate(prompts, 3)[0]:
            assert isinstance(backbone.tokenizer.decode(ids), str)
    return backbone


def plain(folder: Path, **changes: Any) -> Path:
    return save_model(folder, "llama", **changes)


def with_tokenizer(folder: Path, change: Callable[[Any], object], **changes: Any) -> Path:
    """A model whose tokenizer is changed after it was made."""
    plain(folder, **changes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    change(tokenizer)
    tokenizer.save_pretrained(folder)
    return folder


def without(folder: Path, *tokens: str, **changes: Any) -> Path:
    """A model whose tokenizer does not name these tokens."""
    plain(folder, **changes)
    file = folder / "tokenizer_config.json"
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key not in tokens})
    )
    return folder


def sharded(folder: Path) -> Path:
    plain(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def with_code(folder: Path) -> Path:
    """A Llama under another name, with its own modelling code."""
    plain(folder)
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_adapter(folder: Path) -> Path:
    """A model with an adapter in its folder, which transformers applies if peft is installed."""
    peft = pytest.importorskip("peft")
    plain(folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(folder)
    return folder


def as_gguf(folder: Path) -> Path:
    pytest.importorskip("gguf")
    plain(folder, num_key_value_heads=2)
    write_llama(folder, folder / "tiny.gguf")
    return folder / "tiny.gguf"


Make = Callable[[Path], Path]
TRAINS: dict[str, tuple[Make, dict[str, Any]]] = {
    "fewer tokens than rows": (lambda folder: plain(folder, vocab_size=300), {}),
    "an added token with a row": (
        lambda folder: with_tokenizer(folder, lambda own: own.add_tokens([ADDED], special_tokens=True), vocab_size=300),
        {},
    ),
    "an added token without a row": (
        lambda folder: with_tokenizer(folder, lambda own: own.add_tokens([ADDED], special_tokens=True)),
        {},
    ),
    "a padding token without a row": (
        lambda folder: with_tokenizer(folder, lambda own: own.add_special_tokens({"pad_token": "[PAD]"})),
        {},
    ),
    "no padding token": (lambda folder: without(folder, "pad_token"), {}),
    "an end token in the config alone": (lambda folder: without(folder, "pad_token", "eos_token"), {}),
    "sharded": (sharded, {}),
    "tied embeddings": (lambda folder: plain(folder, tie_word_embeddings=True), {}),
    "bf16": (plain, {"dtype": "bfloat16"}),
    "code of its own": (with_code, {"trust_remote_code": True}),
    "GGUF": (as_gguf, {}),
}


@pytest.mark.parametrize("kind", TRAINS)
def test_a_folder_that_trains(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    make, options = TRAINS[kind]
    backbone = train(make(tmp_path / "model"), **options)
    tokenizer = backbone.tokenizer
    assert tokenizer.eos_token == "<|endoftext|>"
    assert kind == "GGUF" or tokenizer.pad_token == (
        "<|endoftext|>" if "padding token" in kind or "end token" in kind else "<|padding|>"
    )
    assert backbone.dtype is (torch.bfloat16 if kind == "bf16" else torch.float32)


REFUSED: dict[str, tuple[Make, str]] = {
    "more tokens than rows": (
        lambda folder: plain(folder, vocab_size=200),
        "has 273 tokens, but the model's embedding has 200 rows: .*resize_token_embeddings",
    ),
    "an end token without a row": (
        lambda folder: with_tokenizer(folder, lambda own: own.add_special_tokens({"eos_token": "<END>"})),
        "has 274 tokens, but the model's embedding has 273 rows: its end token is 273",
    ),
    "no end token": (
        lambda folder: without(folder, "pad_token", "eos_token", eos_token_id=None, pad_token_id=None),
        "has no end token.*eos_token in tokenizer_config.json",
    ),
    "code of its own": (with_code, "model.trust_remote_code=true: read it first"),
    "an adapter in its folder": (with_adapter, r"an adapter beside it \(adapter_config.json\).*Merge it"),
    "not there yet": (lambda _: Path("models/smollm2-135m"), "no folder models/smollm2-135m.*make smollm2"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_that_is_refused_before_training(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, told = REFUSED[kind]
    monkeypatch.chdir(tmp_path)
    path = str(make(tmp_path / "model"))
    for look in (inspect_model, load_backbone):
        with pytest.raises(ModelError, match=f"(?s){told}"):
            look(path)


def test_an_adapter_in_a_models_repository_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub/models--owner--name/snapshots" / ("0" * 40)
    plain(snapshot)
    (snapshot / "adapter_config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match="there is an adapter"):
        load_backbone("owner/name")


def test_a_text_with_a_token_that_has_no_row_is_refused(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model", lambda own: own.add_tokens([ADDED], special_tokens=True))
    with pytest.raises(ModelError, match=f"273 .*{ADDED}.* has no row in the model's embedding"):
        train(folder, Example(f"Say {ADDED}.", " No.", "", "", special_tokens="token"))


def test_a_gguf_file_has_the_models_weights(tmp_path: Path) -> None:
    file, ids = as_gguf(tmp_path / "model"), torch.tensor([[5, 9, 3]])
    ours, theirs = load_backbone(str(file)), AutoModelForCausalLM.from_pretrained(file.parent)
    with torch.no_grad():
        torch.testing.assert_close(ours.model(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-6)
    ours.model.save_pretrained(tmp_path / "again")  # no longer as a quantised model


def test_a_gguf_file_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "gguf" else found(name, *more))
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ModelError, match=r"(?s)needs the package gguf.*fedguild\[gguf\]"):
        inspect_model(str(tmp_path / "tiny.gguf"))
