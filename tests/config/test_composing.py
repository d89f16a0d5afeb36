"""Presets composed from their axes: those of 0.3 unchanged, all others that fit, and the error for an unknown name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedguild.config import axes, find_preset, load_config, presets
from fedguild.config.composing import NOT_SETTINGS, PRESETS_FOLDER
from fedguild.config.renamed import with_old_names
from fedguild.config.schema import Config
from fedguild.core.errors import ConfigError
from fedguild.methods import METHODS
from fedguild.model.backbone import describe_config
from tests.plugins import install

RECORDED = json.loads((Path(__file__).parent / "presets_of_0.3.json").read_text("utf-8"))
"""`flame/tiny-tasks`: its resolved settings; `differences`: section -> what others have in its place; `presets`:
a name, and for each of these sections, which."""

SINCE = {
    "data.chat_template": None,
    "data.train_on": "all_turns",
    "data.special_tokens": "text",
    "federation.robust": "auto",
    "training.objective": "auto",
    "training.dpo_beta": 0.1,
    "evaluation.samples": 3,
}
"""Settings that 0.3 did not have. An aggregator of auto is none in a simulation, as 0.3 had it, and an objective of
auto is SFT for data that are not pairs; samples change no result."""


def recorded(name: str) -> dict[str, Any]:
    settings = {**RECORDED["flame/tiny-tasks"], "name": name.replace("/", "-")}
    for (section, found), index in zip(RECORDED["differences"].items(), RECORDED["presets"][name], strict=True):
        whole = section in ("method", "seed")
        settings[section] = found[index] if whole else overlaid(settings[section], found[index])
    return settings


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: overlaid(below[key], value) for key, value in above.items() if isinstance(below.get(key), dict)}
    return {**below, **above, **nested}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value."""
    found = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize("method", sorted({name.partition("/")[0] for name in RECORDED["presets"]}))
def test_the_presets_of_0_3_resolve_to_what_they_did(method: str) -> None:
    for name in RECORDED["presets"]:
        if name.startswith(f"{method}/"):
            before, now = flat(recorded(name)) | SINCE, flat(with_old_names(load_config(name).model_dump(mode="json")))
            assert {key: now.get(key) for key in before.keys() | now.keys() if before.get(key) != now.get(key)} == {
                key: before.get(key) for key in before.keys() | now.keys() if before.get(key) != now.get(key)
            }, name
            assert before.keys() == now.keys(), name


def test_every_combination_that_fits_is_a_preset() -> None:
    known = axes()
    names = [preset.name for preset in presets()]
    assert len(names) == len(set(names))
    assert len(names) > 4000
    assert {preset.method.name for preset in presets()} == set(METHODS)
    assert {preset.model.name for preset in presets()} == known.models.keys()
    assert {preset.data.name for preset in presets()} == known.data.keys()
    for preset in presets():
        assert find_preset(preset.name) == preset
        config = load_config(preset.name)
        assert (config.method.name, config.name) == (preset.method.name, preset.name.replace("/", "-"))


def test_every_variant_says_something() -> None:
    for preset in presets():
        if preset.model.name == "tiny":
            for variant in preset.variants:
                assert find_preset(f"{preset.name}-{variant}") is not None
                assert list(find_preset(f"{preset.name}-{variant}").layers()) != list(preset.layers())  # type: ignore[union-attr]


def test_the_parts_of_an_axis_have_what_the_axis_has() -> None:
    known = axes()
    words = {word for axis in (known.models, known.data, known.setups) for part in axis.values() for word in part.words}
    named = [name for axis in (known.models, known.data, known.setups) for name in axis]
    assert len(named) == len(set(named))
    for axis, allowed in (
        ("methods", {"setup", "needs", "where", "variants"}),
        ("models", {"is", "active_experts", "where"}),
        ("data", {"is", "setup", "where"}),
        ("setups", {"where", "variants"}),
        ("cells", {"setup"}),
    ):
        for part in getattr(known, axis).values():
            assert part.content.keys() & set(NOT_SETTINGS) <= allowed, part.source
            assert part.content.keys() - set(NOT_SETTINGS) <= Config.model_fields.keys(), part.source
            assert len(part.description) > 12, part.source
            for key in part.content.get("where", {}):
                assert {word for alternative in key.split(",") for word in alternative.split()} <= words, part.source


def test_every_file_is_of_an_axis_and_there_are_fewer_than_a_hundred() -> None:
    files = list(PRESETS_FOLDER.rglob("*.*"))
    assert {path.relative_to(PRESETS_FOLDER).parts[0] for path in files} == set(vars(axes()))
    assert len(files) == sum(map(len, vars(axes()).values())) < 100
    assert all(find_preset(name) for name in axes().cells)


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_needs_is_what_it_says(name: str) -> None:
    assert ("moe" in axes().methods[name].needs) == METHODS.load(name).facts.needs_experts


@pytest.mark.usefixtures("small_english")
@pytest.mark.parametrize("name", axes().models)
def test_what_a_model_is_is_what_it_has(name: str) -> None:
    part = axes().models[name]
    path = part.content["model"]["path"]
    if path.startswith("models/") and not Path(path).is_dir():
        pytest.skip(f"no {path}: make smollm2")
    info = describe_config(path)
    assert part.content.get("active_experts", 0) == info.top_k
    assert ("moe" in part.words, "dense" in part.words) == (bool(info.moe), not info.moe)
    assert ("softmax" in part.words) == (bool(info.moe) and {moe.routing for moe in info.moe} == {"softmax"})
    assert ("unbiased" in part.words) == (bool(info.moe) and not any(moe.biased for moe in info.moe))
    assert ("hybrid" in part.words) == any(linear.group == "mixer" for linear in info.linears)
    assert ("seq2seq" in part.words, "causal" in part.words) == (info.seq2seq is not None, info.seq2seq is None)


def test_budgets_have_at_most_the_experts_of_the_model() -> None:
    for model, expected in {"tiny": [8, 4, 2, 1], "switch": [1, 1, 1, 1], "deepseek-v2-lite": [6, 4, 2, 1]}.items():
        budgets = load_config(f"hetlora/{model}-ag_news").federation.budgets
        assert [budget.active_experts for budget in budgets] == expected
    assert [tier.active_experts for tier in load_config("hetlora/llama-ag_news").federation.budgets] == [0] * 4


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("guild/llama-dolly", "guild needs a mixture-of-experts model, which llama is not (LLaMA-7B, dense)."),
        (
            "guild/llama-dolly",
            "olmoe, qwen3-30b-a3b, qwen3-next, smollm2-moe, switch, tiny.",
        ),
        ("fedprompt/switch-snli", "fedprompt needs a causal language model, which switch is not"),
        ("flame/tiny-task", "Did you mean 'flame/tiny-tasks'? Data sets: ag_news, alpagasus, "),
        ("flame/olmo-tasks", "Did you mean 'flame/olmoe-tasks'? Models: deepseek-v2-lite, english, "),
        ("flme/tiny-tasks", "Did you mean 'flame/tiny-tasks'? Methods: a3smoe, "),
        ("fedit/tiny-tasks-rank", "Did you mean 'fedit/tiny-tasks-ranks'? Variants of fedit/tiny-tasks: ranks, 40."),
    ],
)
def test_what_does_not_fit_is_told_with_what_does(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert told in str(caught.value)


def test_a_cell_with_a_file_of_its_own_has_its_settings_on_top() -> None:
    """FLoRA's released code, on the data of FedIT's."""
    flora, fedit = load_config("flora/llama-dolly"), load_config("fedit/llama-dolly")
    assert flora.method.options == {"scale": 2, "dropout": 0.05, "targets": ["q_proj", "v_proj"]}
    assert flora.data == fedit.data
    assert (flora.federation.rounds, flora.training.gradient_accumulation_steps) == (3, 16)


def test_a_method_of_another_package_runs_on_every_model_and_data_set(tmp_path, monkeypatch):
    install(
        monkeypatch,
        tmp_path / "mine",
        "mine",
        entry_points="[fedguild.methods]\nmine = mine",
        modules={"mine.py": '"""mine: a method of my own."""\n'},
    )
    config, flame = load_config("mine/tiny-ag_news"), load_config("flame/tiny-ag_news")
    assert (config.method.name, config.method.options) == ("mine", {})
    assert (config.data, config.federation, config.training) == (flame.data, flame.federation, flame.training)
