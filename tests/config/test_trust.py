"""Files from somebody else do not run the code of a model, nor functions: this user has to say so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import fedguild
from fedguild.cli.app import app
from fedguild.config import load_config
from fedguild.config.trust import code_of_metric, require_trusted, trust
from fedguild.core.errors import ConfigError
from fedguild.federation.site import load_site

ASKS = "asks to run the Python code that comes with the model"


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    return folder


@pytest.fixture
def hostile(olmoe_folder, tmp_path):
    """A model's folder whose tokenizer leaves a file when it runs."""
    folder = Path(shutil.copytree(olmoe_folder, tmp_path / "model"))
    code = f'from pathlib import Path\nPath(r"{tmp_path}/ran").touch()\n'
    code += (
        "from transformers import AutoConfig, PreTrainedConfig\nclass Own(PreTrainedConfig):\n    model_type = 'own'\n"
    )
    (folder / "configuration_own.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def file(path, model, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**more, "model": {"path": str(model), "trust_remote_code": True}}))
    return path


def test_a_run_folder_from_somebody_else_runs_no_code(hostile, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = load_config("fedit/tiny-tasks")
    written = yaml.safe_load(config.resolved_yaml())
    written["model"] |= {"path": str(hostile), "trust_remote_code": True}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(written))
    for command in (("resume",), ("evaluate",), ("generate", "a prompt"), ("export", "--output", tmp_path / "out")):
        result = invoke(command[0], run, *command[1:])
        assert not (tmp_path / "ran").exists()
        assert (result.exit_code, ASKS in " ".join(result.output.split())) == (2, True), result.output
    said = invoke("trust", run)
    assert said.exit_code == 0, said.output
    assert ASKS not in invoke("resume", run).output
    assert (tmp_path / "ran").exists(), "the model has no code to run"


def test_a_config_from_somebody_else(hostile, tmp_path):
    path = file(tmp_path / "config.yaml", hostile, method="fedit")
    extending = tmp_path / "mine.yaml"
    extending.write_text("extends: config.yaml\nseed: 3\n")
    for given in (path, extending):
        with pytest.raises(ConfigError, match=ASKS):
            load_config(str(given))
        assert load_config(str(given), ["model.trust_remote_code=true"]).model.trust_remote_code
        assert not load_config(str(given), ["model.trust_remote_code=false"]).model.trust_remote_code
    assert load_config({"method": "fedit", "model": {"path": str(hostile), "trust_remote_code": True}})
    assert invoke("trust", extending).exit_code == 0
    assert load_config(str(extending)).model.trust_remote_code
    with pytest.raises(ConfigError, match=ASKS):
        load_config(str(extending), [f"model.path={tmp_path / 'another'}"])


def test_a_relative_path_is_trusted_where_it_led_and_at_its_revision(tmp_path, monkeypatch):
    for folder in ("mine", "strangers"):
        (tmp_path / folder / "m").mkdir(parents=True)
    path = file(tmp_path / "config.yaml", "m", extends="fedit/tiny-tasks")
    monkeypatch.chdir(tmp_path / "mine")
    assert str(tmp_path / "mine/m") in "".join(invoke("trust", path).output.split("\n"))
    assert load_config(path).model.trust_remote_code
    with pytest.raises(ConfigError, match=ASKS):
        load_config(path, ["model.revision=refs/pr/7"])
    monkeypatch.chdir(tmp_path / "strangers")
    with pytest.raises(ConfigError, match=ASKS):
        load_config(path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=ASKS):
        load_config(path)
    hub = file(tmp_path / "hub.yaml", "owner/name", extends="fedit/tiny-tasks")
    assert "model owner/name." in invoke("trust", hub).output
    assert load_config(hub).model.trust_remote_code
    (tmp_path / "owner/name").mkdir(parents=True)
    with pytest.raises(ConfigError, match=ASKS):
        load_config(hub)


def run_once_trusted(code, settings):
    """Runs `config.yaml`, which is refused and runs no code before it is trusted; returns what the refusal says."""
    asks = f"asks to run {code}"
    refused = invoke("run", "config.yaml", *settings, "-o", "run")
    assert (refused.exit_code, asks in " ".join(refused.output.split())) == (2, True), refused.output
    assert not Path("ran").exists()
    assert f"may run {code}" in invoke("trust", "config.yaml").output
    ran = invoke("run", "config.yaml", *settings, "-o", "run")
    assert ran.exit_code == 0, ran.output
    return asks


def test_a_function_that_a_config_from_somebody_else_names(olmoe_folder, tmp_path, monkeypatch):
    """The function is a metric; of a config and of a run's folder that came from elsewhere, it is not imported."""
    from tests.runs.runs import small_settings

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs.py").write_text("open('ran', 'a').close()\n\ndef words(said, wanted):\n    return len(said)\n")
    (tmp_path / "config.yaml").write_text(
        "extends: fedit/tiny-tasks\nevaluation: {metrics: [rouge_l, theirs:words], max_examples: 2}\n"
    )
    settings = [*small_settings(olmoe_folder, "federation.clients=2", "training.steps=1"), "federation.rounds=1"]
    asks = run_once_trusted("the Python function theirs:words", settings)
    assert fedguild.load_run("run").frame()["theirs:words"].notna().any()
    assert invoke("evaluate", "run").exit_code == 0, "a run of this user is trusted"
    Path("run").rename("received")
    (tmp_path / "ran").unlink()
    monkeypatch.delitem(sys.modules, "theirs")
    assert asks in " ".join(invoke("evaluate", "received").output.split())
    assert not (tmp_path / "ran").exists()
    assert load_config("config.yaml", ["evaluation.metrics=[another:one]"]), "an override is this user's word"


METHOD = """
open("ran", "a").close()
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import Method
from fedguild.server.settings import LoraSettings


class Own(Method):
    Settings = LoraSettings

    def plan(self, model, budget):
        return AdapterPlan((self.settings.lora,))
"""


def test_a_method_that_a_config_from_somebody_else_names(olmoe_folder, tmp_path, monkeypatch):
    """Its class is not imported from a config or a run's folder that came from elsewhere."""
    from tests.runs.runs import small_settings

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "their_method.py").write_text(METHOD)
    options = "{name: their_method:Own, rank: 2, targets: [attention]}"
    (tmp_path / "config.yaml").write_text(f"extends: flame/tiny-tasks\nmethod: {options}\n")
    model = [each for each in small_settings(olmoe_folder) if not each.startswith("method")]
    settings = [*model, "federation.clients=2", "training.steps=1", "federation.rounds=1"]
    asks = run_once_trusted("the Python class their_method:Own", settings)
    assert invoke("evaluate", "run").exit_code == 0, "a run of this user is trusted"
    Path("run").rename("received")
    (tmp_path / "ran").unlink()
    monkeypatch.delitem(sys.modules, "their_method")
    for command in (("resume",), ("evaluate",), ("export", "--output", "out")):
        assert asks in " ".join(invoke(command[0], "received", *command[1:]).output.split())
    assert not (tmp_path / "ran").exists()
    assert load_config("config.yaml", ["method=their_method:Own"]).method.options == {
        "rank": 2,
        "targets": ["attention"],
    }


def test_the_address_of_a_ray_cluster_in_a_config_from_somebody_else(tmp_path):
    """A Ray cluster gets the training data, and answers with pickles."""
    asks, address = "asks to run Python code from the Ray cluster", "ray://127.0.0.1:9"
    path, extending = tmp_path / "config.yaml", tmp_path / "mine.yaml"
    engine = {"name": "ray", "ray": {"address": address, "actors": 1}}
    path.write_text(yaml.safe_dump({"extends": "fedit/tiny-tasks", "federation": {"engine": engine}}))
    extending.write_text("extends: config.yaml\nfederation: {engine: {ray: {actors: 2}}}\n")
    for given in (path, extending):
        with pytest.raises(ConfigError, match=asks):
            load_config(given)
        for setting in (f"ray.address={address}", "ray.address=auto", "ray.address=null", "name=local"):
            assert load_config(given, [f"federation.engine.{setting}"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(load_config(path, ["federation.engine.ray.address=10.0.0.9:1"]).resolved_yaml())
    for command in (("run", path), ("resume", run)):
        refused = invoke(*command)
        assert (refused.exit_code, asks in " ".join(refused.output.split())) == (2, True), refused.output
    said = invoke("trust", path)
    assert f"may run Python code from the Ray cluster {address}" in " ".join(said.output.split()), said.output
    assert load_config(extending).federation.engine.ray.address == address
    path.write_text(path.read_text().replace(address, "ray://127.0.0.1:10"))
    with pytest.raises(ConfigError, match=asks):
        load_config(extending)


def test_what_several_say_at_once_is_all_kept(tmp_path, monkeypatch):
    files = [tmp_path / f"{number}.yaml" for number in range(16)]
    for file in files:
        file.touch()
    code = code_of_metric("mine:score")
    with ThreadPoolExecutor(8) as several:
        list(several.map(lambda file: trust(file, [code]), files))
    for file in files:
        require_trusted(file, code)


def test_runs_in_other_processes_may_do_what_their_config_may(hostile, tmp_path, monkeypatch):
    """`fedguild compare --jobs 2` writes a config for each run, which is this user's as well."""
    from fedguild.runs.api.launch import command_of
    from fedguild.runs.api.run_grid import Cell, Row

    config = load_config("fedit/tiny-tasks", [f"model.path={hostile}", "model.trust_remote_code=true"])
    cell = Cell(config, tmp_path / "grid/row/seed-0", Row("row"))
    *_, written, _, _ = command_of(cell)
    assert load_config(written).model.trust_remote_code


def test_no_program_imports_modules_of_the_folder_that_it_starts_in(tmp_path, monkeypatch):
    """Neither the runs of a comparison, from a checkout of somebody else, nor a site's programs, from the site."""
    from fedguild.federation import commands
    from fedguild.federation.site import SiteSettings
    from fedguild.runs.api.launch import command_of
    from fedguild.runs.api.run_grid import Cell, Row

    (tmp_path / "typer.py").write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    *python, _, _, _, _ = command_of(Cell(load_config("fedit/tiny-tasks"), tmp_path / "grid/seed-0", Row("row")))
    site = SiteSettings.model_validate({"client": 0, "server": "127.0.0.1:9"})
    safe = commands.site_environment(tmp_path, site)
    trainer = commands.trainer(tmp_path)[:3]
    for command, environment in ((python, None), (trainer, safe)):
        ran = subprocess.run([*command, "--version"], env=environment, capture_output=True, text=True)
        assert ran.stdout.startswith("fedguild 0."), ran.stderr


def test_a_site_from_somebody_else(hostile, tmp_path):
    path = file(tmp_path / "site/site.yaml", hostile, client=0, server="127.0.0.1:9")
    with pytest.raises(ConfigError, match=ASKS):
        load_site(path.parent)
    assert invoke("trust", path.parent).exit_code == 0
    assert load_site(path.parent).model.trust_remote_code


def test_a_sites_relative_path_starts_in_its_folder(tmp_path, monkeypatch):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    for folder in (site / "model/m", elsewhere / "model/m"):
        folder.mkdir(parents=True)
    file(site / "site.yaml", "model/m", client=0, server="127.0.0.1:9")
    monkeypatch.chdir(elsewhere)
    assert invoke("trust", site).exit_code == 0
    monkeypatch.chdir(site)
    assert load_site(Path()).model.trust_remote_code
    shutil.move(site / "model/m", site / "model/old")
    (site / "model/m").symlink_to(elsewhere / "model/m")
    with pytest.raises(ConfigError, match=ASKS):
        load_site(site)


def test_a_run_of_this_user_is_trusted_where_it_was_written_and_nowhere_else(olmoe_folder, tmp_path):
    from tests.runs.runs import small_settings

    settings = [*small_settings(olmoe_folder, "federation.clients=2", "training.steps=1"), "federation.rounds=1"]
    run = fedguild.run("fedit/tiny-tasks", *settings, "model.trust_remote_code=true", output=tmp_path / "run").folder
    assert torch.is_tensor(next(fedguild.load_model(run).parameters()))
    moved = Path(shutil.move(run, tmp_path / "moved"))
    with pytest.raises(ConfigError, match=ASKS):
        fedguild.load_model(moved)
    assert "nothing to say" in invoke("trust", file_without(tmp_path)).output


def file_without(folder):
    path = folder / "plain.yaml"
    path.write_text("extends: fedit/tiny-tasks\n")
    return path
