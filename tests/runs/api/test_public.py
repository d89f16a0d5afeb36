"""The documented names: what they are, that they cost nothing until used, and that their examples run."""

from __future__ import annotations

import ast
import doctest
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas
import pytest

import fedguild
from tests.runs.api.conftest import loaded_anew
from tests.runs.api.hub import Hub

ROOT = Path(__file__).parents[3]
STUB = ROOT / "src" / "fedguild" / "__init__.pyi"
GUIDE = ROOT / "docs" / "guides" / "python.md"


def test_the_types_are_those_of_the_names() -> None:
    tree = ast.parse(STUB.read_text())
    stubbed = {
        alias.asname: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert stubbed == {name: f"fedguild.{module}" for name, module in fedguild._MODULES.items()}
    assert sorted(stubbed) == sorted(fedguild.__all__)


@pytest.mark.parametrize("name", sorted(fedguild.__all__))
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    assert (getattr(fedguild, name).__doc__ or "").strip()
    assert name in dir(fedguild)


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        fedguild.runn  # type: ignore[attr-defined]  # noqa: B018


def test_what_lists_needs_no_torch() -> None:
    """Nor does `import fedguild`, nor its names that are data: each command in turn, in one process."""
    heavy = "sorted({'torch', 'transformers', 'datasets', 'pandas', 'matplotlib'} & set(sys.modules))"
    lines = ["import sys, fedguild", "fedguild.EarlyStopping, fedguild.load_run", "from fedguild.cli import app"]
    lines += ["import fedguild.data", "list(fedguild.data.CORPORA)"]
    for arguments in (["--help"], ["methods"], ["presets", "--json"], ["presets", "flame/tiny-tasks"]):
        lines += [f"sys.argv = ['fedguild', *{arguments!r}]", "try: app()", "except SystemExit: pass"]
        lines += [f"print({heavy}, file=sys.stderr)"]
    script = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [line for line in done.stderr.splitlines() if line.startswith("[")] == ["[]"] * 4
    assert "flame" in done.stdout


EXAMPLES = (
    ("run",),
    ("sweep", "Sweep"),
    (
        *("compare", "Comparison", "load_comparison", "load_run", "RunResult"),
        *("resume", "evaluate", "load_model", "export_model", "push"),
    ),
    ("inspect_data", "partition", "premise", "profile", "EarlyStopping", "Event", "FedGuildError"),
)
"""Public names whose examples share a folder, and so what was run there before."""


def test_every_name_has_its_place_among_the_examples() -> None:
    assert sorted(name for names in EXAMPLES for name in names) == sorted(fedguild.__all__)


@pytest.mark.parametrize("names", EXAMPLES, ids=lambda names: names[0])
def test_the_examples_of_the_docstrings(names: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name has one. Runs are trained once: `runs/first` is a part of the comparison, which writes no page here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub(endpoint="https://huggingface.co"))
    monkeypatch.setattr("fedguild.report.html.write_comparison", lambda _, folder, **__: folder / "comparison.html")
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name in names:
        if name in ("load_model", "export_model", "push"):
            monkeypatch.setattr("fedguild.runs.setup.preparation.load_model", loaded_anew)
        found = finder.find(getattr(fedguild, name), name)
        assert [bool(one.examples) for one in found] == [True], f"{name} has no example"
        assert runner.run(found[0]).attempted == len(found[0].examples) > 0
        if name == "compare":
            shutil.copytree("runs/compared/flame-tiny-tasks/seed-0", "runs/first")
    assert runner.failures == 0


def test_the_guide_names_exactly_these() -> None:
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    named = [line.split("`")[1].partition("(")[0] for line in rows]
    assert sorted(named) == sorted(fedguild.__all__)
    assert 11 <= len(named) <= 20


def test_the_guides_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it calls is there and takes these arguments; the runs themselves are in test_runs.py."""
    calls = []
    monkeypatch.setattr(
        "fedguild.runs.experiment.run", lambda *arguments, **named: calls.append(arguments) or _Nothing()
    )
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in GUIDE.read_text().split("```python\n")[1:]:
        exec(block.partition("```")[0], scope)
    assert [str(folder) for _, folder in calls] == ["runs/first", "runs/good"]


class _Nothing(fedguild.RunResult):
    """A result without a run."""

    def __init__(self) -> None:
        super().__init__(Path(), 0, {}, 0.0, Path())

    def frame(self, of: str = "scores") -> pandas.DataFrame:  # type: ignore[override]
        return pandas.DataFrame()
