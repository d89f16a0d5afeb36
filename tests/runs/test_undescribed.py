"""A whole run on a mixture of experts whose family has no description, and what is refused before one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fedguild.core.errors import ModelError
from fedguild.model import backbone
from fedguild.runs import experiment
from fedguild.runs.exporting import export
from tests.runs.runs import ended, save_model, small_config
from tests.undescribed import plain

BUDGETS = "federation.budgets=[{name: all, rank: 3}]"
ACTIVE = "federation.budgets=[{name: all, active_experts: 1, rank: 3}]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "gpt-oss", "gpt_oss", make=plain, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _without_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone, "_family_of", lambda _: None)


def test_fedit_trains_attention_and_its_export_is_the_model(folder: Path, tmp_path: Path) -> None:
    """gpt-oss, whose attention sdpa cannot run, though that is the default."""
    options = (BUDGETS, "federation.rounds=1", "training.learning_rate=0.02", "method.targets=[attention]")
    config = small_config(folder, *options, base="fedit/tiny-tasks")
    experiment.run(config, tmp_path)
    done = ended(tmp_path)
    assert {name.split(".")[3] for name in done.state.tensors if name.endswith("lora_B")} == {"self_attn"}
    assert all(tensor.any() for name, tensor in done.state.tensors.items() if name.endswith("lora_B"))
    export(tmp_path, None, tmp_path / "merged", "merged")
    found, base = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "merged", folder))
    changed = {name for name, weight in found.items() if not torch.equal(weight, base[name])}
    assert changed == {f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qkvo"}


@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("flame/tiny-tasks", (BUDGETS,)),
        ("fedit/tiny-tasks", (BUDGETS, "method.targets=[attention, experts]")),
        ("fedit/tiny-tasks", (ACTIVE,)),
    ],
    ids=["method", "target", "budget"],
)
def test_what_needs_experts_is_refused_before_training(
    folder: Path, tmp_path: Path, base: str, options: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError, match=r"'gpt_oss'[\s\S]*has no description[\s\S]*olmoe"):
        experiment.run(small_config(folder, *options, base=base), tmp_path / "run")
    assert not (tmp_path / "run").exists()
