"""The methods that are found, and what ties each to its preset, test and page."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from fedguild.core.errors import ConfigError
from fedguild.methods import METHODS, build_method
from tests.methods.test_matrix import CASES

ROOT = Path(__file__).parents[2]
PRESETS = Path(str(resources.files("fedguild.config"))) / "presets" / "methods"
SECTIONS = (
    "## In short",
    "## The idea",
    "## The algorithm",
    "## Symbols",
    "## Options",
    "## Deviations",
    "## Claims and our figures",
)


def lacks(name: str) -> list[str]:
    """Returns what a method still lacks, each in a sentence."""
    page, module = ROOT / "docs" / "methods" / f"{name}.md", name.replace("-", "_")
    tests = ROOT / "tests" / "methods"
    text = page.read_text("utf-8") if page.is_file() else ""
    wanted = {
        f"Write its part of the presets, src/fedguild/config/presets/methods/{name}.yaml.": (
            PRESETS / f"{name}.yaml"
        ).is_file(),
        f"Give '{name}' small settings in CASES of tests/methods/test_matrix.py.": any(
            label.partition(" ")[0] == name for label in CASES
        ),
        f"Test its arithmetic in tests/methods/test_{module}.py.": any(tests.glob(f"test_{module}.py"))
        or any((tests / module).glob("test_*.py")),
        f"Write docs/methods/{name}.md with the sections of docs/methods/fedprox.md.": bool(text),
    } | {f"docs/methods/{name}.md lacks the section '{section}'.": section in text for section in SECTIONS if text}
    return [sentence for sentence, done in wanted.items() if not done]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_all_that_belongs_to_it(name: str) -> None:
    missing = lacks(name)
    assert not missing, " ".join(missing)


def test_what_a_method_lacks_is_said_in_sentences() -> None:
    sentences = lacks("not-there")
    assert len(sentences) == 4
    assert "Write its part of the presets, src/fedguild/config/presets/methods/not-there.yaml." in sentences


def test_nothing_is_left_of_a_method_that_is_gone() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")} - {"index", "costs", "results"}
    assert pages == {path.stem for path in PRESETS.iterdir()} == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_what_its_file_says(name: str) -> None:
    method = METHODS.load(name)
    (found,) = [plugin for plugin in METHODS.found() if plugin.name == name]
    assert (method.name, method.title, found.origin) == (name, found.title, "fedguild")
    assert method.title.lower().startswith(name)
    assert isinstance(build_method(name), method)
    for option, field in method.Settings.model_fields.items():
        assert field.description, option


def test_an_unknown_method_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"There is no method 'flam'\.\nDid you mean 'flame'\? Known: .*fedit.*flame"):
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


OUT_OF_RANGE = (
    ("fdlora", "synchronise_every", 0, r"greater than or equal to 1, got 0"),
    ("fdlora", "outer_momentum", 1, r"less than 1, got 1"),
    ("fdlora", "fusion_budget", 0, r"got 0\.\nIt is: pairs of weights"),
    ("fdlora", "held_out", 0, r"greater than 0, got 0"),
    ("fedalign-moe", "regularisation", -1, r"got -1\.\nIt is: lambda of Eq\. 11"),
    ("fedalign-moe", "fixed_threshold", 2, r"less than or equal to 1, got 2"),
    ("fedalign-moe", "gate", "shared", r"'private', 'uploaded' or 'averaged', got 'shared'"),
    ("fedamole", "embedding_share", 1.0, r"less than 1"),
    ("fedamole", "privacy_eta", 0, r"greater than 0"),
    ("fedamole", "assignment", "best", r"'relevance', 'once', 'fixed' or 'random', got 'best'"),
    ("fedavg", "gate", "averaged", r"'full', 'lora' or 'none', got 'averaged'"),
    ("fedavg", "experts", True, r"got True"),
    ("fedit", "alpha", 0, r"greater than 0, got 0"),
    ("fedit", "weights", "n", r"'size' or 'uniform', got 'n'"),
    ("fedmoe", "memory", {"small": 1.5}, r"got 1\.5"),
    ("fedmoe", "memory_share", 0, r"got 0"),
    ("fedmoe", "stage_one_rounds", 0, r"got 0"),
    ("fedmoe", "label_smoothing", 1.0, r"got 1"),
    ("fedprompt", "tokens", 0, r"greater than or equal to 1, got 0"),
    ("fedprompt", "text", "", r"at least 1 character.*got ''"),
    ("fedprox", "mu", -1, r"greater than or equal to 0, got -1\.\nIt is: mu of Eq\. 2"),
    ("fedptuning", "width", 0, r"greater than or equal to 1, got 0"),
    ("flame", "rank", 0, r"greater than or equal to 1, got 0"),
    ("flame", "temperature", -1, r"got -1\.\nIt is: t of Eq\. 6"),
    ("flame", "rescaler", "learned", r"'per_layer', 'shared', 'static' or 'none', got 'learned'"),
    ("flexlora", "alpha", 0, r"greater than 0, got 0"),
    ("florist", "threshold", 0.0, r"got 0"),
    ("florist", "threshold", 1.1, r"got 1\.1"),
    ("guild", "mix", 1.5, r"got 1\.5"),
    ("hetlora", "gamma", 0, r"greater than 0, got 0"),
    ("hetlora", "gamma", 1.5, r"less than or equal to 1, got 1\.5"),
    ("hetlora", "penalty_weight", -1, r"got -1"),
    ("hetlora", "minimum_rank", 0, r"got 0"),
    ("hetlora", "weights", "n", r"'norm' or 'size', got 'n'"),
    ("pfl-moe", "gate_share", 1.0, r"got 1"),
    ("pfl-moe", "gate_epochs", 0, r"got 0"),
    ("pfl-moe", "personal_from", 0, r"got 0"),
    ("pfl-moe", "features", "logits", r"got 'logits'"),
    ("smoe-llb", "balance_weight", -0.1, r"got -0\.1\.\nIt is: c_"),
    ("smoe-llb", "z_weight", -1, r"got -1\.\nIt is: c_"),
    ("ub-smoe", "targets", ["attention"], r"must include experts, which UB-SMoE balances"),
    ("ub-smoe", "phi_max", -2.0, r"must be at least phi_min, -1\.0, got -2\.0"),
    ("ub-smoe", "momentum", 1.5, r"got 1\.5\.\nIt is: zeta of Eq\. 14"),
    ("ub-smoe", "scaling", "cubic", r"'inverse_root' or 'log', got 'cubic'"),
    ("ub-smoe", "modulation", "all", r"'candidate', 'preserve' or 'none', got 'all'"),
)


@pytest.mark.parametrize(("name", "option", "value", "told"), OUT_OF_RANGE, ids=str)
def test_a_value_out_of_its_options_range(name: str, option: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{option}.*: .*{told}"):
        build_method(name, {option: value})


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = METHODS.load("flame").Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.rank = 3  # type: ignore[attr-defined]


def test_options_that_contradict_each_other_are_told_without_all_that_were_given() -> None:
    with pytest.raises(ConfigError) as error:
        build_method("guild", {"start_norm": 2, "basis": "singular"})
    assert str(error.value) == (
        "method: start_norm has no effect without basis: received; in a singular basis it is basis_norm."
    )
