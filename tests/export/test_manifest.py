"""The hash of a base model: of its config and of the weights that are loaded, nothing else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from fedguild.export.manifest import digest_of_base


def expected(folder: Path, *names: str) -> str:
    lines = [f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n" for name in sorted(names)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_files_that_are_not_loaded_do_not_count(tmp_path: Path) -> None:
    config, one, two = "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    for name in (config, "pytorch_model.bin", one, two, "model.safetensors"):
        (tmp_path / name).write_text(name)
    index = {"weight_map": {"a": one, "b": two, "c": one}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert digest_of_base(str(tmp_path)) == expected(tmp_path, config, "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    assert digest_of_base(str(tmp_path)) == expected(tmp_path, config, one, two)
    (tmp_path / two).unlink()
    assert digest_of_base(str(tmp_path)) == ""
    (tmp_path / "model.safetensors.index.json").unlink()
    assert digest_of_base(str(tmp_path)) == expected(tmp_path, config, "pytorch_model.bin")


def test_a_part_of_a_model_in_the_hubs_cache_has_no_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--me--base"
    snapshot = kept / "snapshots" / "abc"
    for folder in (snapshot, kept / "refs"):
        folder.mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    assert digest_of_base("me/base") == ""
    (snapshot / "model.safetensors").write_text("weights")
    whole = digest_of_base("me/base")
    assert whole == expected(snapshot, "config.json", "model.safetensors")
    (snapshot / "consolidated.safetensors").write_text("the same, once more")
    assert digest_of_base("me/base") == whole
