"""The sdist builds the wheel, and the wheel works outside the repository in an empty environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import fedguild

ROOT = Path(__file__).parents[1]


def test_the_citation_and_the_changelog_have_the_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == fedguild.__version__
    assert f"\n## [{fedguild.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_oldest_versions_are_the_floors() -> None:
    """What is tested as the lowest version is what pyproject.toml allows, for every dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (ROOT / "constraints-oldest.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for requirement in map(Requirement, project["dependencies"]):
        (floor,) = (one.version for one in requirement.specifier if one.operator == ">=")
        if requirement.name != "tokenizers":  # transformers says which
            assert f"{pins[requirement.name]}.".startswith(f"{floor}."), requirement


def test_the_hooks_run_what_ci_runs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    entries = [hook["entry"].replace(".venv/bin", "$(BIN)") for hook in local["hooks"]]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert [entry for entry in entries if f"\t{entry}\n" not in makefile] == []
    assert "make --jobs 2 --output-sync lint types" in (ROOT / ".ci" / "run").read_text("utf-8")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_wheel_runs_in_an_empty_environment(tmp_path: Path) -> None:
    """Installs torch and the other dependencies from the package index that pip is configured with."""
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: object, cwd: Path = tmp_path) -> str:
        done = subprocess.run([*map(str, command)], cwd=cwd, env=elsewhere, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path / "dist", cwd=ROOT)
    (sdist,) = (tmp_path / "dist").glob("fedguild-*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", sdist)
    (wheel,) = (tmp_path / "dist").glob("fedguild-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    scripts, constraints = tmp_path / "venv" / "bin", ROOT / "constraints.txt"
    run(scripts / "pip", "install", "-q", "-c", constraints, "torch")
    run(scripts / "pip", "install", "-q", "-c", constraints, wheel)
    installed = run(scripts / "python", "-c", "import fedguild; print(fedguild.__file__)")
    assert Path(installed.strip()).is_relative_to(tmp_path / "venv")

    small = ("federation.rounds=1", "federation.clients=4", "training.steps=1", "evaluation.max_examples=4")
    run(scripts / "fedguild", "compare", "flame/tiny-tasks", "fedit/tiny-tasks-ranks", "--seeds", "0", *small)
    rows = [{"question": f"Which digit ends {n}?", "reply": str(n % 10), "origin": "abcd"[n % 4]} for n in range(80)]
    (tmp_path / "ours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = "instruction=question,response=reply"
    run(scripts / "fedguild", "init", "ours.yaml", "--yes", "--data", "ours.jsonl", "--columns", columns)
    run(scripts / "fedguild", "run", "ours.yaml", *small, "--output", "run")
    run(scripts / "fedguild", "export", "run", "--budget", "b4", "--output", "model", "--format", "merged")
    loaded = "from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('model').config.model_type)"
    assert run(scripts / "python", "-c", loaded).strip() == "olmoe"
