"""Options that are left to their defaults, in runs on models and with numbers of clients that these do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedguild.config import load_config
from fedguild.methods import build_method
from fedguild.runs import experiment
from tests.backbones import tiny_model
from tests.runs.conftest import Command
from tests.runs.runs import small_settings

ONE_ROUND = ("federation.rounds=1", "training.steps=1", "evaluation.max_examples=2")


def recorded(folder: Path) -> dict[str, object]:
    record: dict[str, object] = json.loads((folder / "method.json").read_text())
    return record


@pytest.mark.parametrize(
    ("base", "method", "clients", "fitted"),
    [
        ("flame/tiny-tasks", "fedit", 4, {"targets": (["attention"], ["attention", "experts"])}),
        ("fedit/tiny-tasks", "fedamole", 6, {"experts": (24, 30)}),
        ("fedit/tiny-tasks", "fedavg", 4, {"gate": ("none", "full"), "experts": ("none", "lora")}),
    ],
)
def test_a_method_without_options_runs_on_a_dense_model(command, llama_folder, base, method, clients, fitted):
    """What was fitted is told and written down, beside every other option; evaluating and resuming fit it again."""
    settings = small_settings(llama_folder, f"method={{name: {method}}}", f"federation.clients={clients}", *ONE_ROUND)
    result = command("run", base, *settings, "--output", "out")
    assert result.exit_code == 0, result.output
    record = recorded(Path("out"))
    assert (record["name"], record["from"]) == (method, "fedguild")
    defaults = build_method(method).settings.model_dump(mode="json")
    assert record["options"].keys() == defaults.keys()
    for option, (used, default) in fitted.items():
        told = f"method.{option} is {json.dumps(used)} here, not {json.dumps(default)}, to fit the model"
        assert told in " ".join(result.stderr.split())
        assert record["options"][option] == used
        assert record["fitted"][option] == default == defaults[option]
    assert load_config("out/config.yaml").method.options == {}
    restored, _, _ = experiment.restore(Path("out"))
    assert restored.method.settings.model_dump(mode="json") == record["options"]


def test_fedamole_without_options_fits_deepseek_v2(command: Command, tmp_path: Path) -> None:
    """Its attention has no v_proj, and six clients have no room for 30 experts; from the shapes alone."""
    tiny_model("deepseek_v2 greedy").config.save_pretrained(tmp_path / "deepseek")
    settings = (f"model.path={tmp_path / 'deepseek'}", "federation.clients=6", "federation.budgets=[{name: all}]")
    result = command("profile", "fedit/tiny-tasks", *settings, "method=fedamole", "--examples", 10, "--json")
    assert result.exit_code == 0, result.output
    told = " ".join(result.stderr.split())
    assert 'method.targets is ["attention"] here, not ["q_proj", "v_proj"], to fit the model' in told
    assert "method.experts is 24 here, not 30, to fit the model" in told
    assert json.loads(result.stdout)[0]["trainable_total"] > 0


def test_a_comparison_is_checked_before_its_first_run(command: Command, llama_folder: Path) -> None:
    rows = ("fedamole/tiny-tasks", "flame/tiny-tasks", f"model.path={llama_folder}")
    result = command("compare", *rows, "--output", "out")
    assert result.exit_code == 2
    assert "needs a mixture-of-experts model" in result.stderr
    assert not Path("out").exists()
