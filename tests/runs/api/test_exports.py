"""`fedguild export` of runs: a form for everybody, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import fedguild
from fedguild.cli import app

pytestmark = pytest.mark.usefixtures("loaded_alone")
IDS = torch.tensor([[5, 9, 3, 7]])


def export(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.parametrize(
    ("method", "chosen", "part"),
    [
        ("ub-smoe", {"budget": "small"}, "ModulatedRouting"),
        ("fedamole", {"client": "client-001"}, "MixtureOfLora"),
        ("pfl-moe", {"client": "client-002"}, "LogitMixture"),
    ],
)
def test_what_cannot_be_merged_has_its_own_code(method, chosen, part, routed_runs, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    ((option, value),) = chosen.items()
    result = export(routed_runs[method], f"--{option}", value, "--output", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "model")
    assert f"a checkpoint with modelling code, as {part} acts beside the backbone's weights" in result.stderr
    assert "trust_remote_code=True" in result.stderr
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True).eval()
    ours = fedguild.load_model(routed_runs[method], **chosen)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(loaded.generate(IDS, **options), ours.generate(IDS, **options))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert f"| beside the weights | {part}, in `modeling_fedguild.py` |" in card


def test_two_forms_at_once_are_refused(fedit: Path, tmp_path: Path) -> None:
    result = export(fedit, "--merged", "--format", "per-expert", "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "--merged and --format per-expert contradict each other" in result.stderr


@pytest.mark.parametrize(
    ("form", "told", "load"),
    [
        ("peft", "peft warns that it ignored keys of rank_pattern", "PeftModel.from_pretrained(base, folder)"),
        ("per-expert", "For vLLM and SGLang", "LoRARequest("),
        ("merged", "For anything that loads a Hugging Face checkpoint", "AutoModelForCausalLM.from_pretrained(folder)"),
    ],
)
def test_the_command_and_the_card_say_for_whom_a_form_is(form, told, load, fedit, tmp_path):
    result = export(fedit, "--budget", "large", "--format", form, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    card = (tmp_path / "out" / "README.md").read_text()
    assert told in result.stderr
    assert told in card
    assert load in card
    if form == "per-expert":
        assert "--max-lora-rank 2" in card
        assert "also changes the routers" in card


def test_code_is_not_written_where_nothing_needs_it(fedit: Path, tmp_path: Path) -> None:
    result = export(fedit, "--budget", "large", "--format", "code", "--output", tmp_path / "out")
    assert "the merged form, as nothing acts beside" in result.stderr
    assert not (tmp_path / "out" / "modeling_fedguild.py").exists()
