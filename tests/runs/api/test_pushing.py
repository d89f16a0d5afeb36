"""`fedguild.push`: what is sent to the hub, and that nothing becomes public by accident."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedguild
from fedguild.cli import app
from fedguild.core.errors import ConfigError, FedGuildError
from tests.runs.api.hub import Hub

pytestmark = pytest.mark.usefixtures("loaded_alone")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def stand_in(**behaviour: Any) -> Hub:
        made = Hub(**behaviour)
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: made)
        return made

    return stand_in


def test_it_is_private_and_has_its_card(routed_runs: dict[str, Path], hub: Any) -> None:
    made = hub()
    address = fedguild.push(routed_runs["ub-smoe"], "me/model", budget="small")
    assert address == "https://hub.test/me/model"
    assert made.created == [("me/model", True)]
    assert {"README.md", "config.json", "model.safetensors", "modeling_fedguild.py"} <= made.files.keys()
    assert '`folder` is `"me/model"`, this repository.' in made.files["README.md"]
    here = {str(Path.cwd()), str(Path.home()), str(routed_runs["ub-smoe"].parent), tempfile.gettempdir()}
    assert not [(name, path) for name, content in made.files.items() for path in here if path in str(content)]


def test_it_replaces_the_model_that_was_pushed_before(routed_runs: dict[str, Path], hub: Any) -> None:
    """A program would load the old files: an adapter, or one file of weights beside shards."""
    made = hub()
    made.files = {"adapter_config.json": "{}", "model-00001-of-00002.safetensors": ""}
    fedguild.push(routed_runs["ub-smoe"], "me/model", budget="small")
    assert "model.safetensors" in made.files
    assert not {"adapter_config.json", "model-00001-of-00002.safetensors"} & made.files.keys()


def test_by_default_it_is_the_largest_budgets(routed_runs: dict[str, Path], hub: Any, tmp_path: Path) -> None:
    """As for `load_model`, `generate` and `export`."""
    made = hub()
    result = CliRunner().invoke(app, ["push", str(routed_runs["ub-smoe"]), "--to", "me/model"])
    assert (result.exit_code, result.stdout) == (0, "https://hub.test/me/model\n")
    by_name = hub()
    fedguild.push(routed_runs["ub-smoe"], "me/model", budget="large")
    assert made.files == by_name.files
    exported = CliRunner().invoke(app, ["export", str(routed_runs["ub-smoe"]), "--output", str(tmp_path / "model")])
    assert exported.exit_code == 0, exported.output
    assert (tmp_path / "model" / "config.json").read_text() == made.files["config.json"]


def test_the_command_makes_it_public_only_if_told(routed_runs: dict[str, Path], hub: Any) -> None:
    made = hub(private=False)
    arguments = ["push", str(routed_runs["ub-smoe"]), "--to", "me/model", "--budget", "small"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "me/model is public: everybody could read the model." in refused.stderr
    assert (made.created, made.files) == ([], {})
    done = CliRunner().invoke(app, [*arguments, "--public"])
    assert done.stdout == "https://hub.test/me/model\n"
    assert made.created == [("me/model", False)]


def test_an_adapter_of_a_model_that_is_not_on_the_hub_is_merged(routed_runs, monkeypatch):
    from fedguild.runs.api import pushing

    folder = routed_runs["ub-smoe"]
    assert [pushing._pushable(folder, form) for form in ("peft", "per-expert", "code")] == ["merged", "merged", "code"]
    monkeypatch.setattr(pushing, "is_on_hub", lambda path: True)
    assert pushing._pushable(folder, "peft") == "peft"


def test_an_exported_adapter_of_a_model_that_is_not_on_the_hub_is_merged(fedit: Path, hub: Any, tmp_path: Path) -> None:
    """Its base model is a link in the exported folder, which no repository can have."""
    made, exported = hub(), fedguild.export_model(fedit, tmp_path / "model")
    assert exported.format == "peft"
    fedguild.push(exported.folder, "me/model")
    assert "model.safetensors" in made.files
    assert "adapter_config.json" not in made.files


def test_what_cannot_be_pushed(routed_runs: dict[str, Path], hub: Any) -> None:
    made = hub(refuses="403 Forbidden: no right to write\nDetails.")
    folder = routed_runs["ub-smoe"]
    with pytest.raises(ConfigError, match="'model' is not a repository of the hub"):
        fedguild.push(folder, "model", budget="small")
    with pytest.raises(ConfigError, match="Give either --budget or --client"):
        fedguild.push(folder, "me/model", budget="small", client="client-000")
    with pytest.raises(ConfigError, match="there is no global one"):
        fedguild.push(routed_runs["fedamole"], "me/model")
    with pytest.raises(FedGuildError, match=r"The hub did not take me/model: 403 Forbidden: no right to write\n"):
        fedguild.push(folder, "me/model", budget="small")
    assert json.dumps(made.files) == "{}"
