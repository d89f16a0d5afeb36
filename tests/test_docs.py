"""The generated parts of the documentation are up to date."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from fedguild.api.cells import Cell
from fedguild.config import load_config, tables
from tests.report.runs import write_run

ROOT = Path(__file__).parents[1]


def loaded(name: str) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py."""
    return loaded("generate")


def test_tables_and_indexes_are_up_to_date(generate: ModuleType) -> None:
    pages = sorted(str(page.relative_to(ROOT)) for page in generate.outdated())
    assert not pages, f"{', '.join(pages)}: not up to date. Run `make docs`."


def test_a_page_without_a_fact_is_named(generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "METHOD_PAGES", tmp_path)
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"fedavgm\.md is missing: write it with the sections of fedprox\.md"):
        generate.in_short("fedavgm")
    (tmp_path / "fedavgm.md").write_text("- **Trains:** LoRA\n  of rank r\n")
    with pytest.raises(ValueError, match=r"lacks '- \*\*Sent up:\*\* …'"):
        generate.in_short("fedavgm")


def test_a_mark_that_nothing_generates_is_named(generate: ModuleType) -> None:
    with pytest.raises(ValueError, match="marks 'costs', but known are options"):
        generate._generated(Path("page.md"), "<!-- generated: costs -->\n<!-- end -->")


@pytest.fixture(scope="module")
def recording() -> ModuleType:
    """docs/tables.py."""
    return loaded("tables")


def test_the_plan_names_tables_that_ship(recording: ModuleType) -> None:
    plan = yaml.safe_load((recording.RECORDS / "plan.yaml").read_text())
    assert plan.keys() <= {table.name for table in tables()}
    for settings in plan.values():
        assert settings.keys() <= {"seeds", "settings"}
        assert all("=" in override for override in settings.get("settings", ()))


def test_a_table_that_is_not_planned_is_named(recording: ModuleType) -> None:
    with pytest.raises(SystemExit, match="flame/table-2 is not in"):
        recording.planned(["flame/table-2"])


def test_a_cell_is_recorded_once_and_again_when_its_settings_change(
    recording: ModuleType, generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run is written by hand; the page then has it, from the record alone."""
    monkeypatch.setattr(recording, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(generate, "RECORDS", tmp_path / "records")
    write_run(tmp_path / "run", name="flame", seed=0)
    config = load_config("flame/tiny-tasks", ["seed=0", "name=flame"])
    cell = Cell("flame/tiny-tasks", config, tmp_path / "run")
    one = recording.Planned("flame/table-2-tiny", "dirichlet-5", ("evaluation.every=4",), cell)
    assert not one.is_recorded()
    one.record()
    assert one.is_recorded()
    other = Cell(
        "flame/tiny-tasks", load_config("flame/tiny-tasks", ["name=flame", "federation.rounds=9"]), cell.folder
    )
    assert not recording.Planned("flame/table-2-tiny", "dirichlet-5", (), other).is_recorded()
    shutil.rmtree(tmp_path / "run")
    page = generate._recorded(Path("results.md"))
    assert "`fedguild compare flame/table-2-tiny evaluation.every=4 --seeds 0`" in page
    assert "| flame |" in page
    assert "**not recorded**" in generate._recorded(Path("flame.md"))
    assert generate._recorded(Path("ub-smoe.md")).startswith("No table has been recorded yet")
