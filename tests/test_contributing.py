"""The method in CONTRIBUTING.md runs as it stands there."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from fedguild import experiment, methods
from fedguild.config import load_config
from fedguild.server import checkpoint

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
SMALL = [
    "federation.rounds=1",
    "federation.clients=2",
    "training.steps=3",
    "training.accumulation=2",
    "data.options={train_examples: 120, test_examples: 8}",
]


def block(language: str, containing: str) -> str:
    """Returns the one fenced block of a language that contains a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    (found,) = [body for body in blocks if containing in body]
    return str(found)


@pytest.fixture
def preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Registers the method and writes the preset of the guide; returns the preset's path."""
    module = ModuleType("fedguild.methods.fedprox")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block("python", "class FedProx:"), "CONTRIBUTING.md", "exec"), module.__dict__)
    monkeypatch.setitem(methods.METHODS, "fedprox", module.FedProx)
    path = tmp_path / "fedprox.yaml"
    path.write_text(block("yaml", "fedprox"))
    return str(path)


def drift(preset: str, folder: Path, mu: float) -> float:
    """Returns how far a round moved B, which starts at zero."""
    config = load_config(preset, [*SMALL, f"method.mu={mu}"])
    experiment.run(config, folder)
    state = checkpoint.load(folder / "checkpoints", 1, fingerprint=config.fingerprint()).state
    return sum(float(tensor.square().sum()) for name, tensor in state.tensors.items() if name.endswith("lora_B"))


def test_the_penalty_holds_clients_near_what_they_received(preset: str, tmp_path: Path) -> None:
    assert yaml.safe_load(Path(preset).read_text())["method"]["name"] == "fedprox"
    free, held = drift(preset, tmp_path / "free", 0.0), drift(preset, tmp_path / "held", 1e3)
    assert 0 < held < 0.5 * free
