"""A method by `module:Class`: a class in the working folder or an installed package that no entry point names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedguild
from fedguild.config.trust import code_of_method, trust
from fedguild.core.errors import ConfigError
from fedguild.data.corpora.registry import CORPORA
from fedguild.federation.serving import serve
from fedguild.federation.site import ServerSettings
from fedguild.federation.testing import LoopbackTransport
from fedguild.methods import METHODS, build_method
from fedguild.methods.fedit import FedIT
from fedguild.runs.callbacks import CALLBACKS
from fedguild.server.method import Method
from tests.runs.runs import small_settings

HALVES = '''"""Halves: the server goes half of the way to the mean."""

from fedguild.core.payload import ADAPTER, Payload
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import Method
from fedguild.server.settings import LoraSettings

word = "text"


class Halves(Method):
    Settings = LoraSettings

    def plan(self, model, budget):
        return AdapterPlan((self.settings.lora,))

    def update(self, state, means):
        before = state.part(ADAPTER)
        moved = means.moved(ADAPTER, before)
        return Payload.of({ADAPTER: {name: (value + before[name]) / 2 for name, value in moved.items()}})


class Unfinished(Method):
    pass


def length(answer, reference):
    return len(reference)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with two modules; what this user trusts is recorded in it."""
    (tmp_path / "my_halves.py").write_text(HALVES)
    (tmp_path / "my_broken.py").write_text("\nimport a_missing_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_halves", "my_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_class_in_the_working_folder_is_a_method() -> None:
    method = build_method("my_halves:Halves", {"rank": 2})
    assert method.name == "my_halves:Halves"
    assert method.title == "Halves: the server goes half of the way to the mean"
    assert isinstance(method, sys.modules["my_halves"].Halves)
    assert METHODS.origin(method.name).startswith("my_halves, SHA-256 ")
    with pytest.raises(ConfigError, match=r"method\.rnak: my_halves:Halves has no such option\.\nDid you mean 'rank'"):
        build_method("my_halves:Halves", {"rnak": 2})
    assert method.name not in METHODS


def test_a_class_that_is_registered_as_well_keeps_its_name() -> None:
    method = build_method("fedguild.methods.fedit:FedIT")
    assert (method.name, type(build_method("fedit")), FedIT.name) == ("fedguild.methods.fedit:FedIT", FedIT, "fedit")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere:Own", r"ModuleNotFoundError: No module named 'nowhere'\n.*in the working folder"),
        ("my_broken:Own", r"No module named 'a_missing_package' \(my_broken, line 2\)"),
        ("my_halves:Quarters", "module 'my_halves' has no attribute 'Quarters'"),
        ("my_halves:word", "0 subclasses"),
        ("my_halves:Unfinished", "its class does not define `plan`"),
        ("my_halves:", r"it is not module:attribute\.\n"),
        (":Halves", r"it is not module:attribute\.\n"),
    ],
)
def test_what_is_no_method_says_why(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"The method {name} .*cannot be used: .*{problem}"):
        METHODS.load(name)


def test_a_method_without_settings_has_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Method):
        plan = FedIT.plan

    monkeypatch.setattr(sys.modules[__name__], "Plain", Plain, raising=False)
    assert build_method(f"{__name__}:Plain").settings.model_dump() == {}


def test_callbacks_and_corpora_have_registered_names_only() -> None:
    for kind in (CALLBACKS, CORPORA):
        with pytest.raises(ConfigError, match=r"There is no .* 'antigravity:fly'"):
            kind.load("antigravity:fly")
    assert "antigravity" not in sys.modules


def test_its_run_goes_on_in_another_process_which_tells_a_change(folder: Path, olmoe_folder: Path) -> None:
    small = [each for each in small_settings(olmoe_folder) if not each.startswith("method")]
    own = ["method=my_halves:Halves", "method.targets=[attention]", "method.rank=2"]
    brief = ["federation.rounds=1", "federation.clients=2", "training.steps=1", "evaluation.max_examples=6"]
    own += ["evaluation.metrics=[my_halves:length]"]
    run = fedguild.run("flame/tiny-tasks", *small, *own, *brief, output=folder / "run")
    record = json.loads((run.folder / "method.json").read_text())
    assert (record["name"], record["from"]) == ("my_halves:Halves", METHODS.origin("my_halves:Halves"))
    assert '"my_halves:length":' in (run.folder / "metrics.jsonl").read_text()
    (folder / "my_halves.py").write_text(f"{HALVES}\n\n# changed\n")
    command = [sys.executable, "-m", "fedguild", "resume", str(run.folder), "--round", "0"]
    resumed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert f"began with the method of {record['from']}, and continues with that of my_halves" in resumed.stderr
    assert fedguild.load_run(run.folder).scores == run.scores


def test_the_server_of_a_federation_imports_none(folder: Path) -> None:
    (folder / "run.yaml").write_text("extends: fedit/tiny-tasks\nmethod: my_halves:Halves\n")
    trust(folder / "run.yaml", [code_of_method("my_halves:Halves")])
    with pytest.raises(ConfigError, match=r"'my_halves:Halves' is a Python class.*\n.*plug-in at the server"):
        serve(LoopbackTransport(), ServerSettings(), folder)
    assert "my_halves" not in sys.modules
