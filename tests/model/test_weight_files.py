"""Faults of a model's folder, told before a weight is read: every family's own files agree, spoilt ones do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedguild.core.errors import ModelError
from fedguild.model import pretrained, weight_files
from fedguild.model.backbone import inspect_model
from fedguild.model.weight_files import INDEX, WEIGHTS, LoadingReport
from tests.backbones import FAMILIES
from tests.runs.runs import save_model

Spoil = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a random OLMoE."""
    return save_model(tmp_path / "model")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The same, its weights in several files."""
    folder = save_model(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.fixture(autouse=True)
def _no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (pretrained.AutoModelForCausalLM, pretrained.AutoModelForSeq2SeqLM):
        monkeypatch.setattr(kind, "from_pretrained", lambda *_, **__: pytest.fail("the weights were read"))


def told(folder: Path) -> str:
    """Returns what is said of a folder that cannot be loaded."""
    with pytest.raises(ModelError) as caught:
        inspect_model(str(folder))
    return str(caught.value)


def with_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "switch", "t5"])
def test_the_files_of_every_family_agree_with_their_config(tmp_path: Path, family: str, tied: bool) -> None:
    folder = save_model(tmp_path, family, tie_word_embeddings=tied)
    info = inspect_model(str(folder))
    assert info.name == str(folder)
    assert info.layers >= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, r"of another shape: lm_head.weight is \[\d+, 16\], not \[\d+, 32\], model.embed"),
        ({"num_hidden_layers": 3}, r"11 missing: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, r"beyond the config's layers or experts: model.layers.1.input_layernorm.weight"),
        ({"num_experts": 16}, r"mlp.experts.down_proj is \[8, 16, 8\], not \[16, 16, 8\]"),
        ({"num_experts": 4}, r"mlp.experts.down_proj is \[8, 16, 8\], not \[4, 16, 8\]"),
        ({"vocab_size": 9}, r"2 of another shape: lm_head.weight is \[\d+, 16\], not \[9, 16\]"),
    ],
)
def test_weights_that_are_not_those_of_the_config(folder: Path, changes: dict[str, object], message: str) -> None:
    with_config(folder, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        inspect_model(str(folder))
    assert f"The weights in {folder / WEIGHTS} are not those that its config.json describes" in str(caught.value)
    assert "Put back the config.json that belongs to these weights" in caught.value.hint


def test_another_version_of_transformers_is_left_to_its_own_checks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_config(folder, num_hidden_layers=3)
    monkeypatch.delattr("transformers.core_model_loading.convert_and_load_state_dict_in_model")
    assert inspect_model(str(folder)).layers == 3


def test_weights_of_another_head_do_not_matter(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "score.weight": torch.zeros(2, 16)}, folder / WEIGHTS, {"format": "pt"})
    assert inspect_model(str(folder)).top_k == 4


def test_a_quantised_checkpoint_has_names_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_loaded_without_values", lambda *_: pytest.fail("its names were compared"))
    with_config(folder, quantization_config={"quant_method": "fp8"})
    assert inspect_model(str(folder)).top_k == 4


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: truncate(path), r"has \d\d,\d\d\d bytes, but its header says \d\d,\d\d\d: it is truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), "it is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "header cannot be read: it is truncated"),
        (lambda path: path.write_bytes(b""), "has 0 bytes, and its header cannot be read"),
        (lambda path: path.write_bytes(b"PK\x03\x04" * 50), "or not a safetensors file"),
        (lambda path: path.write_bytes((5).to_bytes(8, "little") + b"[[[]]"), "header cannot be read"),
    ],
)
def test_a_weight_file_that_is_not_whole(folder: Path, spoil: Spoil, message: str) -> None:
    spoil(folder / WEIGHTS)
    with pytest.raises(ModelError, match=message) as caught:
        inspect_model(str(folder))
    assert str(caught.value).startswith(str(folder / WEIGHTS))
    assert "download it again" in caught.value.hint


def test_weights_in_several_files(shards: Path) -> None:
    files = sorted(shards.glob("*.safetensors"))
    assert len(files) == 3
    assert inspect_model(str(shards)).top_k == 4
    with_config(shards, num_hidden_layers=3)
    assert f"The weights in {shards / INDEX} are not those" in told(shards)
    truncate(files[1])
    assert told(shards).startswith(str(files[1]))
    files[1].unlink()
    files[2].unlink()
    says = told(shards)
    assert f"lacks 2 of the {len(files)} weight files that {INDEX} names: {files[1].name}, {files[2].name}" in says


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_cannot_be_read(shards: Path, text: str) -> None:
    (shards / INDEX).write_text(text)
    assert f"{shards / INDEX} is not an index of weight files" in told(shards)


def test_a_folder_without_weights_and_one_with_pickled_ones(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there" in told(folder)
    (folder / "pytorch_model.bin").touch()
    assert inspect_model(str(folder)).top_k == 4


@pytest.mark.parametrize("kept", [[], ["tokenizer_config.json"]])
def test_a_folder_without_a_tokenizer(folder: Path, kept: list[str]) -> None:
    for name in {"tokenizer.json", "tokenizer_config.json"} - set(kept):
        (folder / name).unlink()
    says = told(folder)
    assert "tokenizer" in says.splitlines()[0]
    assert str(folder) in says


def test_a_folder_without_a_config_no_folder_and_a_file(folder: Path, tmp_path: Path) -> None:
    assert "it is a file, not a model's folder" in told(folder / "config.json")
    (folder / "config.json").unlink()
    assert "the folder has no config.json" in told(folder)
    assert "there is no such folder" in told(tmp_path / "nowhere")


def test_a_gguf_file_that_is_read_in_part_is_said_to_be_one():
    report = LoadingReport(missing=["mlp.experts.w"], unexpected=[], mismatched=[], expected=["mlp.experts.w"])
    with pytest.raises(ModelError, match=r"expects in a GGUF file.* 1 missing: mlp.experts.w.*\n.*safetensors"):
        report.require_agreement("out/model.gguf")
