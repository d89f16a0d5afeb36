"""The layout of the documentation's site; `make site` builds it, with warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedguild
from tools import website

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("site") / "pages"
    return folder, website.lay_out(folder)


def test_links_lead_to_pages(laid_out: tuple[Path, dict[str, str]]) -> None:
    folder, pages = laid_out
    for path, text in pages.items():
        for match in website.LINK.finditer(website.FENCE.sub("", text)):
            if not re.match(r"[a-z]+:", match["target"]):
                target = (folder / path).parent / match["target"]
                assert target.is_file(), f"{path}: {match['target']}"
                assert target.resolve().is_relative_to(folder), f"{path}: {match['target']}"
    source = "source/src/fedguild/methods/flame.py.md"
    assert f"../{source}" in pages["methods/flame.md"]
    assert (ROOT / "src/fedguild/methods/flame.py").read_text().rstrip() in pages[source]


def test_images_are_pictures(laid_out: tuple[Path, dict[str, str]]) -> None:
    """And not pages with a picture's source."""
    folder, pages = laid_out
    shown = 0
    for path, text in pages.items():
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", website.FENCE.sub("", text)):
            if not re.match(r"[a-z]+:", target):
                assert target.endswith(website.PICTURES), f"{path}: {target}"
                assert ((folder / path).parent / target).is_file(), f"{path}: {target}"
                shown += 1
    assert shown > 20


def test_every_page_is_in_the_navigation_once(laid_out: tuple[Path, dict[str, str]]) -> None:
    pages = laid_out[1]
    shown = list(website._leaves(website.config(pages)["nav"]))
    assert len(set(shown)) == len(shown)
    expected = {page for page in pages if not page.startswith("source/") and page != "methods/records/README.md"}
    assert set(shown) == expected


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    missing = [name for name, module in fedguild._MODULES.items() if f"::: fedguild.{module}.{name}\n" not in text]
    assert not missing


def test_every_name_in_the_reference_has_a_docstring() -> None:
    from pkgutil import resolve_name

    for page in (ROOT / "docs" / "reference").glob("*.md"):
        names = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
        for name in names:
            module, _, attribute = name.rpartition(".")
            assert resolve_name(f"{module}:{attribute}").__doc__, name


def test_every_method_is_in_the_decision_table() -> None:
    text = (ROOT / "docs/guides/choose-a-method.md").read_text()
    named = set(re.findall(r"\(\.\./methods/([\w-]+)\.md\)", text)) - {"index", "results"}
    methods = {page.stem for page in (ROOT / "docs/methods").glob("*.md")} - {"index", "results", "costs"}
    assert methods - named == {"fedptuning", "trivial"}, "as fedprompt; a yardstick"
