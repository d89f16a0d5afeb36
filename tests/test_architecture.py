"""The cut of the package: no module imports from a later stage, and no file outgrows its room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedguild"
MODULES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 400

STAGES = ("config", "data", "model", "client", "wire", "server", "evaluation", "costs", "report")
BELOW = ("errors", "plugins", "seeding", "heap", "files", "payload", "packing", "sealed", "progress", "environment")
"""What every stage may use, and what uses no stage."""
LAST = ("setup", "costs.from_config", "recording", "scoring", "experiment", "export", "federation", "cli", "__main__")
"""What uses every stage, in this order."""


def may_import(part: str) -> set[str]:
    """Returns the parts of the package, or modules of one, that a part may import from."""
    if part in (*BELOW, "__init__"):
        return {*BELOW, "__init__"}
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


def imported(path: Path) -> set[str]:
    """Returns the names of the package's modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" if is_package(module) else module for alias in node.names}
    return {name for name in found if name.split(".")[0] == "fedguild"}


def is_package(module: str) -> bool:
    return (SOURCE.parent / module.replace(".", "/")).is_dir()


def allowed(module: str, name: str) -> bool:
    """Whether a module may import a name."""
    known = {part_of(name_of(path)) for path in MODULES}
    part = part_of(name) if part_of(name) in known else "__init__"
    inside = ".".join(name.split(".")[1:3])
    permitted = may_import(part_of(module))
    return part in permitted or inside in permitted


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_imports_from_a_later_stage(path):
    later = sorted(name for name in imported(path) if not allowed(name_of(path), name))
    assert not later, f"{name_of(path)} imports {', '.join(later)}"


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
        ("fedguild.costs.profile", "fedguild.costs.from_config", False),
        ("fedguild.costs.from_config", "fedguild.setup", True),
        ("fedguild.report.costs", "fedguild.costs.from_config", False),
        ("fedguild.report.html", "fedguild.experiment", False),
        ("fedguild.experiment", "fedguild.engines.local", True),
        ("fedguild.experiment", "fedguild.cli.app", False),
        ("fedguild.cli.run", "fedguild.experiment", True),
    ],
)
def test_the_rule_tells_good_imports_from_bad(module, name, expected):
    assert allowed(module, name) is expected


def test_every_part_has_its_place():
    parts = {part_of(name_of(path)) for path in MODULES}
    assert parts <= {*BELOW, *STAGES, "__init__", "methods", "engines", *LAST}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stages_docstring_opens_with_its_place(stage):
    text = ast.get_docstring(ast.parse((SOURCE / stage / "__init__.py").read_text())) or ""
    assert text.startswith(f"Stage {STAGES.index(stage) + 1} of {len(STAGES)}: {stage}.")


SECTIONS = {"fedguild.config.data", "fedguild.config.federation", "fedguild.config.training"}
"""The parts of a config that a stage may take as they are, so that each of their settings is declared once."""


def test_modules_take_plain_arguments_or_a_section_never_the_config():
    whole = {
        name_of(path) for path in MODULES if any(part_of(n) == "config" and n not in SECTIONS for n in imported(path))
    }
    assert {part_of(name) for name in whole} <= {"config", *LAST}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_file_outgrows_its_room(path):
    lines = path.read_text().count("\n")
    assert lines <= MOST_LINES
