"""The structure of the package: nothing imports from a later stage, and neither modules nor packages form a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from fedguild.methods import METHODS
from fedguild.server.method import Method
from tests.conftest import SPREAD, TOGETHER, UNTRACED

SOURCE = Path(__file__).parents[1] / "src" / "fedguild"
MODULES = sorted(SOURCE.rglob("*.py"))

STAGES = ("config", "data", "model", "client", "wire", "server", "evaluation", "costs", "report")
BELOW = (
    *(
        "errors",
        "plugins",
        "seeding",
        "text",
        "heap",
        "files",
        "layout",
        "payload",
        "packing",
        "sealed",
        "chained",
        "locking",
        "secure",
    ),
    *("progress", "environment", "privacy", "hub", "runs", "tail", "score_names"),
)
"""What every stage may use, and what uses no stage."""
LAST = (
    "guarantee",
    "setup",
    "report.table_figures",
    "recording",
    "scoring",
    "results",
    "callbacks",
    "tracking",
    "experiment",
    "export",
    "federation",
    "testing",
    "api",
    "watch",
    "cli",
    "__main__",
)
"""What uses every stage, in this order."""


def may_import(part: str) -> set[str]:
    """Returns the parts of the package, or modules of one, that a part may import from."""
    if part in (*BELOW, "__init__"):
        return {*BELOW, "__init__", *(["config.renamed"] if part == "runs" else [])}
    if part in STAGES:
        return {*BELOW, "__init__", *STAGES[: STAGES.index(part) + 1]}
    upstream = {*BELOW, "__init__", *STAGES[: STAGES.index("server") + 1], "methods"}
    if part == "methods":
        return upstream
    if part == "engines":
        return {*upstream, "engines", "costs.memory"}
    return {*upstream, *STAGES, "engines", *LAST[: LAST.index(part) + 1]}


def part_of(module: str) -> str:
    """Returns the part a module belongs to: `fedguild.model.moe.view` to `model`, `fedguild` to `__init__`."""
    inside = module.removeprefix("fedguild.")
    return inside if inside in LAST else [*module.split("."), "__init__"][1]


def name_of(path: Path) -> str:
    """Returns a file's module name."""
    parts = ("fedguild", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names_in(nodes: Iterator[ast.AST]) -> set[str]:
    """Returns the names of the package that some import statements name, modules and what is in them."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import: {ast.unparse(node)}"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" if is_package(module) else module for alias in node.names}
    return {name for name in found if name.split(".")[0] == "fedguild"}


@cache
def imported(path: Path) -> set[str]:
    """Returns the names of the package that a file imports, anywhere in it."""
    return names_in(ast.walk(parse(path)))


def graph_of(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Returns module -> the modules that it imports, anywhere in it; of a package, a name it defines is itself."""
    known = set(trees)
    return {
        module: {name if name in known else name.rpartition(".")[0] for name in names_in(ast.walk(tree))} - {module}
        for module, tree in trees.items()
    }


def is_package(module: str) -> bool:
    return (SOURCE.parent / module.replace(".", "/")).is_dir()


@cache
def parts() -> frozenset[str]:
    return frozenset(part_of(name_of(path)) for path in MODULES)


def allowed(module: str, name: str) -> bool:
    """Whether a module may import a name."""
    part = part_of(name) if part_of(name) in parts() else "__init__"
    inside = ".".join(name.split(".")[1:3])
    permitted = may_import(part_of(module))
    return part in permitted or inside in permitted


def test_no_module_imports_from_a_later_stage():
    later = [
        f"{name_of(path)} imports {name}"
        for path in MODULES
        for name in sorted(imported(path))
        if not allowed(name_of(path), name)
    ]
    assert not later, "; ".join(later)


def test_imports_form_no_circle():
    """Those for type checkers and those inside functions too: modules that need each other are one module."""
    TopologicalSorter(graph_of({name_of(path).removesuffix(".__init__"): parse(path) for path in MODULES})).prepare()


def test_packages_form_no_circle():
    """Nor do the folders and files right below `fedguild`, each as a whole."""
    needed: dict[str, set[str]] = {}
    for module, names in graph_of({name_of(path).removesuffix(".__init__"): parse(path) for path in MODULES}).items():
        place, *others = (name.split(".")[1] if "." in name else "__init__" for name in (module, *names))
        needed.setdefault(place, set()).update(set(others) - {place})
    TopologicalSorter(needed).prepare()


@pytest.mark.parametrize("closes", ["if TYPE_CHECKING:\n", "def late():\n", "def make():\n  class Late:\n"])
def test_a_circle_of_imports_is_found_where_only_types_or_a_function_close_it(closes):
    trees = {
        "fedguild.model.plan": f"{closes}    from fedguild.model import slots",
        "fedguild.model.slots": "from fedguild.model.plan import AdapterPlan",
    }
    with pytest.raises(CycleError, match="nodes are in a cycle"):
        TopologicalSorter(graph_of({name: ast.parse(text) for name, text in trees.items()})).prepare()
    alone = {**trees, "fedguild.model.plan": f"{closes}    from fedguild.model import moe"}
    TopologicalSorter(graph_of({name: ast.parse(text) for name, text in alone.items()})).prepare()


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("fedguild.data.split", "fedguild.data.partition", True),
        ("fedguild.model.slots", "fedguild.data.batches", True),
        ("fedguild.data.batches", "fedguild.model.slots", False),
        ("fedguild.client.cohort", "fedguild.server.rounds", False),
        ("fedguild.payload", "fedguild.model.plan", False),
        ("fedguild.environment", "fedguild.__version__", True),
        ("fedguild.methods.flame", "fedguild.server.aggregation", True),
        ("fedguild.methods.flame", "fedguild.evaluation.metrics", False),
        ("fedguild.engines.local", "fedguild.methods.flame", True),
        ("fedguild.engines.local", "fedguild.costs.memory", True),
        ("fedguild.engines.local", "fedguild.costs.published", False),
        ("fedguild.engines.local", "fedguild.evaluation.tasks", False),
        ("fedguild.evaluation.tasks", "fedguild.costs.flops", False),
        ("fedguild.costs.profile", "fedguild.setup", False),
        ("fedguild.setup.method_checks", "fedguild.model.shapes_only", True),
        ("fedguild.report.costs", "fedguild.api.profiling", False),
        ("fedguild.report.html", "fedguild.experiment", False),
        ("fedguild.experiment", "fedguild.engines.local", True),
        ("fedguild.experiment", "fedguild.cli.app", False),
        ("fedguild.cli.run", "fedguild.experiment", True),
    ],
)
def test_the_rule_tells_good_imports_from_bad(module, name, expected):
    assert allowed(module, name) is expected


def test_every_part_has_its_place():
    assert parts() <= {*BELOW, *STAGES, "__init__", "methods", "engines", *LAST}


def test_a_modules_docstring_says_what_the_module_is():
    """It opens with a noun phrase or a verb, never with a question."""
    asking = {"what", "which", "where", "when", "whether", "how", "why", "who", "whose"}
    root = SOURCE.parents[1]
    files = [*MODULES, *(path for name in ("tests", "benchmarks", "tools") for path in (root / name).rglob("*.py"))]
    opens = {path: (ast.get_docstring(parse(path)) or "-").split()[0].strip(":,.").lower() for path in files}
    wrong = [str(path.relative_to(root)) for path, word in opens.items() if word in asking]
    assert not wrong, f"Open with a noun phrase, for example 'Sub-model selection for FedMoE': {', '.join(wrong)}"


def test_a_stages_docstring_opens_with_its_place():
    opens = {stage: ast.get_docstring(parse(SOURCE / stage / "__init__.py")) or "" for stage in STAGES}
    wrong = [
        stage
        for number, (stage, text) in enumerate(opens.items(), start=1)
        if not text.startswith(f"Stage {number} of {len(STAGES)}: {stage}.")
    ]
    assert not wrong


SECTIONS = {f"fedguild.config.{name}" for name in ("data", "federation", "training", "privacy", "renamed")}
"""The parts of a config that a stage may take as they are, each declared once, and the table of names that changed."""


def test_modules_take_plain_arguments_or_a_section_never_the_config():
    whole = {
        name_of(path) for path in MODULES if any(part_of(n) == "config" and n not in SECTIONS for n in imported(path))
    }
    assert {part_of(name) for name in whole} <= {"config", *LAST}


def test_a_method_imports_nothing_from_another_one():
    """A method is read in its own file or folder; what two of them share lies in an earlier stage."""
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in (SOURCE / "methods").rglob("*.py")
        for name in sorted(imported(path))
        if name.startswith("fedguild.methods.") and name.split(".")[:3] != name_of(path).split(".")[:3]
    ]
    assert not wrong, "; ".join(wrong)


def test_a_methods_class_is_based_on_nothing_but_method():
    """No method is another one with some lines replaced, where a reader would need both."""
    every = [METHODS.load(name) for name in METHODS]
    assert len(every) > 20
    assert [method.__name__ for method in every if method.__bases__ != (Method,)] == []


def test_the_files_that_the_tests_are_dealt_by_are_there() -> None:
    root = SOURCE.parents[1]
    assert not [file for file in {*SPREAD, *TOGETHER, *UNTRACED} if not (root / file).is_file()]
