"""The generated parts of the documentation are up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py, which is no package."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
