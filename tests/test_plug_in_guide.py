"""The package of docs/guides/plug-ins.md, installed as it stands there into a fresh environment, runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[1] / "docs" / "guides" / "plug-ins.md").read_text("utf-8")
SMALL = (
    "federation.rounds=1",
    "federation.clients=2",
    "training.steps=2",
    "training.batch_size=2",
    "evaluation.max_examples=4",
    "evaluation.max_new_tokens=3",
)
RUNNER = """
import json, sys
from fedguild.cli.app import app
for arguments in json.loads(sys.argv[1]):
    print("$", *arguments, flush=True)
    app(arguments, standalone_mode=False)
"""


def file(name: str) -> str:
    match = re.search(rf"`{re.escape(name)}`.*?```\w+\n(.*?)```", GUIDE, re.DOTALL)
    assert match is not None, name
    return match[1]


def commands() -> list[list[str]]:
    (block,) = re.findall(r"```sh\n(pip install .*?)```", GUIDE, re.DOTALL)
    found = [line.split()[1:] for line in block.splitlines() if line.startswith("fedguild ")]
    return [[*words, *SMALL] if words[0] in ("run", "compare") else words for words in found]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the interpreter of a fresh environment with the package, beside what runs these tests."""
    folder = tmp_path_factory.mktemp("plug-in")
    environment, package = folder / "environment", folder / "guild-extras"
    (package / "guild_extras").mkdir(parents=True)
    (package / "guild_extras" / "__init__.py").touch()
    for name in ("pyproject.toml", "guild_extras/fedmedian.py", "guild_extras/sums.py", "guild_extras/closeness.py"):
        (package / name).write_text(file(name))
    (folder / "sums.yaml").write_text(file("sums.yaml"))
    venv.create(environment, with_pip=False, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    python = environment / "bin" / "python"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, package], check=True)
    return python


@pytest.mark.long
def test_the_package_is_found_and_runs(python: Path) -> None:
    folder = python.parents[2]
    ran = subprocess.run(
        [python, "-c", RUNNER, json.dumps([["methods", "--json"], *commands()])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert '"from": "guild-extras 1.0"' in ran.stdout
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [record["metrics"] for record in records if record["kind"] == "evaluation" and record["scope"] == "budget"]
    assert scores
    assert all("closeness" in metrics for metrics in scores)
    assert (folder / "comparison" / "comparison.html").is_file()
    assert (folder / "adapter" / "adapter_model.safetensors").is_file() or (
        folder / "adapter" / "config.json"
    ).is_file()


@pytest.mark.long
def test_its_method_keeps_its_promises(python: Path) -> None:
    """By the test that the page shows."""
    folder = python.parents[2]
    (folder / "test_fedmedian.py").write_text(file("tests/test_fedmedian.py"))
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fedmedian.py"]
    ran = subprocess.run([python, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout
    assert "1 passed" in ran.stdout
