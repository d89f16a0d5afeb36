"""The method in CONTRIBUTING.md runs as it stands there."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from fedguild import methods
from fedguild.config import load_config
from fedguild.runs import experiment
from fedguild.server import checkpoint
from fedguild.server.method import Method
from tests.methods import test_matrix, test_private_methods
from tests.runs.runs import save_model

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
SMALL = [
    "federation.rounds=2",
    "federation.clients=2",
    "federation.save_total_limit=3",
    "training.steps=2",
    "evaluation.every=2",
    "evaluation.eval_on_start=false",
    "evaluation.max_examples=1",
    "data.options={train_examples: 120, test_examples: 8}",
]


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    (found,) = [body for body in blocks if containing in body]
    return str(found)


@pytest.fixture
def preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Installs the method as a package of its own and writes a config with the guide's options; returns its path."""
    if "fedavgm" in methods.METHODS:
        pytest.skip("the example was typed in, and is tested like any method that ships")
    site = tmp_path / "site"
    package = site / "example-1.0.dist-info"
    package.mkdir(parents=True)
    (site / "fedavgm.py").write_text(block("python", "class FedAvgM(Method):"))
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[fedguild.methods]\nfedavgm = fedavgm\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "fedavgm", raising=False)
    path = tmp_path / "fedavgm.yaml"
    part = yaml.safe_load(block("yaml", "setup: flame"))
    path.write_text(yaml.safe_dump({"extends": "fedavgm/tiny-tasks", "method": part["method"]}))
    return str(path)


def test_the_case_of_the_guide_is_one_line() -> None:
    assert re.fullmatch(r'    "fedavgm": Case\(\{.*\}\),\n', block("python", '"fedavgm": Case'))


@pytest.fixture
def case(preset: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Enters the guide's case in the matrix; returns its label."""
    assert preset
    names = {"Case": test_matrix.Case, "_EVERYTHING": ["attention", "router", "experts"]}
    for label, entered in eval("{" + block("python", '"fedavgm": Case') + "}", names).items():
        monkeypatch.setitem(test_matrix.CASES, label, entered)
    assert "fedavgm" in test_matrix.cases()
    return "fedavgm"


PROOFS = [name for name in vars(test_matrix) if name.startswith("test_")]
RUNS = "test_a_run_stopped_after_a_round_ends_like_one_that_was_not"


@pytest.mark.parametrize("proof", [pytest.param(one, marks=pytest.mark.long if one == RUNS else ()) for one in PROOFS])
def test_the_example_passes_every_proof_of_the_matrix(proof, case, tmp_path, monkeypatch):
    family = test_matrix.CASES[case].family
    folders = {family: save_model(tmp_path / "model", family)}
    given = {"label": case, "tmp_path": tmp_path, "folders": folders, "monkeypatch": monkeypatch}
    function = getattr(test_matrix, proof)
    function(**{name: given[name] for name in inspect.signature(function).parameters})


def test_the_example_says_whether_it_can_be_private_and_then_runs_privately(case: str, tmp_path: Path) -> None:
    method = test_matrix.method_of(case)
    assert method.facts.not_private != Method.facts.not_private
    able = [unit for unit in test_private_methods.UNITS if not method.privacy_refusal(unit)]
    assert able
    for unit in able:
        test_private_methods.test_a_method_that_says_it_can_trains_privately(unit, case, tmp_path / unit)


def states(preset: str, folder: Path, *overrides: str) -> list[dict[str, Tensor]]:
    config = load_config(preset, [*SMALL, *overrides])
    experiment.run(config, folder)
    saved = [
        checkpoint.load(folder / "checkpoints", number, fingerprint=config.fingerprint()).state for number in range(3)
    ]
    return [state.part("adapter") for state in saved]


def test_the_server_goes_on_in_the_direction_of_the_last_round(preset: str, tmp_path: Path) -> None:
    """Both meet round 2 at the same theta_1, and differ after it by beta (theta_1 - theta_0)."""
    momentum = yaml.safe_load(Path(preset).read_text())["method"]["momentum"]
    plain, moving = states(preset, tmp_path / "plain", "method.momentum=0"), states(preset, tmp_path / "moving")
    for name, start in plain[0].items():
        assert torch.equal(moving[0][name], start)
        assert torch.equal(moving[1][name], plain[1][name])
        expected = plain[2][name] + momentum * (plain[1][name] - start)
        torch.testing.assert_close(moving[2][name], expected, rtol=1e-5, atol=1e-7)
        assert not torch.equal(moving[2][name], plain[2][name])
