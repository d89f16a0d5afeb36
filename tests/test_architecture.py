"""Fifteen packages, each importing only from those before it, and no circle of modules."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fedguild
from fedguild.methods import METHODS
from fedguild.server.method import Method
from tests.conftest import SPREAD, TOGETHER, UNTRACED

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedguild"
MODULES = sorted(SOURCE.rglob("*.py"))

ORDER = (
    *("core", "config", "data", "model", "privacy", "client", "server", "methods"),
    *("measuring", "engines", "report", "export", "runs", "federation", "cli"),
)
"""A package imports from those before it; docs/decisions/0023-packages-in-one-order.md says why in this order."""


def name_of(path: Path) -> str:
    """Returns a file's module name; a package's is that of its folder."""
    return ".".join(("fedguild", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def package_of(module: str) -> str:
    """Returns the package a module belongs to: `fedguild.model.moe.view` to `model`; `fedguild` itself to none."""
    return [*module.split("."), ""][1]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.Module, modules: Iterable[str]) -> set[str]:
    """Returns those of some modules that code imports, anywhere in it; of a package, a name it defines is itself."""
    known, found = frozenset(modules), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import: {ast.unparse(node)}"
            module = node.module or ""
            found |= {name if (name := f"{module}.{alias.name}") in known else module for alias in node.names}
    return {name for name in found if name.split(".")[0] == "fedguild"}


@cache
def graph() -> dict[str, set[str]]:
    """Module -> the modules that it imports: for type checkers and inside functions too."""
    names = {name_of(path): path for path in MODULES}
    return {name: imported(parse(path), names) - {name} for name, path in names.items()}


def later(graph: dict[str, set[str]]) -> list[str]:
    """Returns the imports from a later package; `fedguild`, which everything may import, has only what is lazy."""
    places = {package: place for place, package in enumerate(ORDER)}
    return [
        f"{module} imports {name}"
        for module, names in graph.items()
        for name in sorted(names)
        if package_of(module) in places and places.get(package_of(name), -1) > places[package_of(module)]
    ]


def test_no_module_imports_from_a_later_package():
    assert not later(graph()), "; ".join(later(graph()))


def test_there_is_no_other_package_and_no_loose_module():
    """`testing` gives the federation's a short name."""
    assert {package_of(name) for name in graph()} == {"", "__main__", "testing", *ORDER}
    assert graph()["fedguild.testing"] == {"fedguild.federation.testing", "fedguild.runs.promises"}
    assert not graph()["fedguild"]


def test_the_package_tells_its_order():
    told = " ".join((fedguild.__doc__ or "").split())
    assert f"those before it: {', '.join(ORDER)}." in told


def test_the_packages_stand_on_a_dozen_floors_at_most():
    """A package's floor is one above the highest of those that it imports from."""
    floors = dict.fromkeys(ORDER, 1)
    for package in ORDER:
        needed = {
            package_of(name) for module, names in graph().items() if package_of(module) == package for name in names
        }
        floors[package] += max((floors[name] for name in needed & set(ORDER) - {package}), default=0)
    assert max(floors.values()) <= 12, floors


def test_imports_form_no_circle():
    """Modules that need each other are one module."""
    TopologicalSorter(graph()).prepare()


@pytest.mark.parametrize("closes", ["", "if True:\n  ", "def late():\n  ", "def make():\n  class Late:\n    "])
def test_an_import_from_a_later_package_and_a_circle_are_found_wherever_they_are(closes):
    trees = {
        "fedguild.model.plan": f"{closes}from fedguild.model import slots",
        "fedguild.model.slots": f"{closes}from fedguild.model.plan import AdapterPlan",
        "fedguild.model.info": f"{closes}from fedguild.server.method import Method",
        "fedguild.server.method": f"{closes}from fedguild.model.info import ModelInfo",
    }
    found = {name: imported(ast.parse(text), trees) for name, text in trees.items()}
    assert later(found) == ["fedguild.model.info imports fedguild.server.method"]
    with pytest.raises(CycleError, match="nodes are in a cycle"):
        TopologicalSorter(found).prepare()
    assert later(graph() | {"fedguild.core.errors": {"fedguild.config"}})


def test_a_modules_docstring_says_what_the_module_is():
    """It opens with a noun phrase or a verb, never with a question."""
    asking = {"what", "which", "where", "when", "whether", "how", "why", "who", "whose"}
    files = [*MODULES, *(path for name in ("tests", "benchmarks", "tools") for path in (ROOT / name).rglob("*.py"))]
    opens = {path: (ast.get_docstring(parse(path)) or "-").split()[0].strip(":,.").lower() for path in files}
    wrong = [str(path.relative_to(ROOT)) for path, word in opens.items() if word in asking]
    assert not wrong, f"Open with a noun phrase, for example 'Sub-model selection for FedMoE': {', '.join(wrong)}"


SECTIONS = {f"fedguild.config.{name}" for name in ("data", "federation", "privacy", "renamed", "table", "training")}
"""What other packages may take: the sections of a config, the papers' tables, and the names that changed."""


def test_modules_take_plain_arguments_or_a_section_never_the_config():
    whole = {
        name for name, names in graph().items() if any(package_of(n) == "config" and n not in SECTIONS for n in names)
    }
    assert {package_of(name) for name in whole} <= {"config", "runs", "federation", "cli"}


def test_a_method_imports_nothing_from_another_one():
    """A method is read in its own file or folder; what two of them share lies in an earlier package."""
    wrong = [
        f"{module} imports {name}"
        for module, names in graph().items()
        for name in sorted(names)
        if package_of(module) == "methods" and name.startswith("fedguild.methods.")
        if name.split(".")[:3] != module.split(".")[:3]
    ]
    assert not wrong, "; ".join(wrong)


def test_a_methods_class_is_based_on_nothing_but_method():
    """No method is another one with some lines replaced, where a reader would need both."""
    every = [METHODS.load(name) for name in METHODS]
    assert len(every) > 20
    assert [method.__name__ for method in every if method.__bases__ != (Method,)] == []


def test_the_files_that_the_tests_are_dealt_by_are_there() -> None:
    assert not [file for file in {*SPREAD, *TOGETHER, *UNTRACED} if not (ROOT / file).is_file()]
