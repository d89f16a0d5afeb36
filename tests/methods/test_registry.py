"""The registry, and what ties a method to its file, presets, page and tests."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from fedguild import methods
from fedguild.config import load_config
from fedguild.config.reference import as_markdown, settings_of
from fedguild.errors import ConfigError
from fedguild.methods import METHODS, build_method

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "methods"
PRESETS = Path(str(resources.files("fedguild.config"))) / "presets"
HELPERS = {"__init__", "common"}


def names(folder: Path, pattern: str) -> set[str]:
    return {path.stem for path in folder.glob(pattern)}


def module_of(name: str) -> str:
    """A method's module; names may have hyphens."""
    return name.replace("-", "_")


def test_every_method_has_its_file_page_tests_and_presets() -> None:
    known = set(METHODS)
    assert names(Path(methods.__file__).parent, "*.py") - HELPERS == set(map(module_of, known))
    assert names(PAGES, "*.md") - {"index", "costs", "results"} == known
    tests = {name.removeprefix("test_") for name in names(ROOT / "tests" / "methods", "test_*.py")}
    assert tests - {"registry", "matrix"} == set(map(module_of, known))
    assert {folder.name for folder in PRESETS.iterdir() if folder.is_dir()} == known


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_what_it_is_registered_as(name: str) -> None:
    method = METHODS.load(name)
    assert method.name == name
    assert method.title.lower().startswith(name)
    assert method.__module__ == f"fedguild.methods.{module_of(name)}"
    assert isinstance(build_method(name), method)
    for option, field in method.Settings.model_fields.items():
        assert field.description, option


@pytest.mark.parametrize("name", METHODS)
def test_the_presets_of_a_method_are_its_own(name: str) -> None:
    presets = sorted((PRESETS / name).glob("*.yaml"))
    assert presets
    for preset in presets:
        config = load_config(f"{name}/{preset.stem}")
        assert config.method.name == name
        build_method(name, config.method.options)


@pytest.mark.parametrize("name", METHODS)
def test_a_page_lists_the_options_as_they_are(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    assert as_markdown(settings_of(METHODS.load(name).Settings)) in page
    for heading in ("## The idea", "## The algorithm", "## Symbols", "## Options", "## Deviations", "## Claims and"):
        assert heading in page


def test_the_index_names_every_method_once() -> None:
    page = (PAGES / "index.md").read_text()
    for name, method in METHODS.items():
        assert page.count(f"({name}.md)") == 1
        assert method.title.partition(":")[0] in page


def test_an_unknown_method_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Unknown method 'flam'\.\nDid you mean 'flame'\? Known: .*fedit.*flame"):
        build_method("flam")


def test_an_unknown_option_gets_the_nearest() -> None:
    told = r"method\.temprature: flame has no such option\.\nDid you mean 'temperature'\? Known: alpha, frequency"
    with pytest.raises(ConfigError, match=told):
        build_method("flame", {"temprature": 2, "rank": 0})


def test_options_are_those_of_the_method() -> None:
    with pytest.raises(ConfigError, match=r"method\.temperature: fedit has no such option"):
        build_method("fedit", {"temperature": 2})


def test_a_value_out_of_range_gets_its_help() -> None:
    with pytest.raises(ConfigError, match=r"method\.rank: .*got 'many'\.\nIt is: LoRA rank r"):
        build_method("flame", {"rank": "many"})


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = METHODS.load("flame").Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.rank = 3  # type: ignore[attr-defined]
