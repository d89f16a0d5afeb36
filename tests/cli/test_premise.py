"""fedguild premise."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from fedguild.model.packaged import PACKAGED
from tests.cli.conftest import Invoke

TEXT = "\n".join(f"The sum of {a} and {b} is {a + b}." for a in range(20) for b in range(20))
SMALL = ("--context", 32, "--tokens", 128)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "sums.txt"
    file.write_text(TEXT)
    return file


def test_the_tables(invoke: Invoke, text: Path) -> None:
    result = invoke("premise", "embedded", "--text", text, *SMALL)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["8", "4", "2", "1"]
    assert "+0.000 ± 0.000" in lines[1]
    assert "Gini, k = 8" in result.stdout
    assert "idle, k = 1" in result.stdout
    assert "nats a token" in result.stderr


def test_json_and_gzipped_text(invoke: Invoke, text: Path, tmp_path: Path) -> None:
    packed = tmp_path / "sums.txt.gz"
    packed.write_bytes(gzip.compress(text.read_bytes()))
    plain, zipped = (
        json.loads(invoke("premise", "embedded", "--text", file, *SMALL, "--json").stdout) for file in (text, packed)
    )
    assert plain == zipped
    assert [level["active_experts"] for level in plain["levels"]] == [8, 4, 2, 1] * 2


def test_what_is_wrong_is_said(invoke: Invoke, text: Path, tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    tokenizer = PACKAGED["embedded"]
    LlamaForCausalLM(
        LlamaConfig(vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    ).save_pretrained(dense)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (dense / name).write_bytes((tokenizer / name).read_bytes())
    broken = tmp_path / "broken.txt.gz"
    broken.write_bytes(b"not gzip")
    for arguments, told in (
        ((dense, "--text", text), "is a dense model"),
        (("embedded",), "There is no text to measure the model on."),
        (("embedded", "--text", tmp_path / "none.txt"), "Cannot read the text of"),
        (("embedded", "--text", broken), "Cannot read the text of"),
        (("embedded", "--text", text, "--tokens", 20), "fewer than two rows"),
        (("nothing/here", "--text", text), "nothing/here"),
    ):
        result = invoke("premise", *arguments)
        assert result.exit_code == 2, result.stderr
        assert told in " ".join(result.stderr.split())
