"""Every method with its default options on every supported family: what fits, what is fitted, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedguild.client.budget import Budget
from fedguild.config import load_config, presets
from fedguild.core.errors import ConfigError, ModelError
from fedguild.core.payload import Payload
from fedguild.methods import METHODS, build_method
from fedguild.model.backbone import Backbone, describe_config
from fedguild.model.info import ModelInfo
from fedguild.model.plan import adapter_shapes
from fedguild.model.targets import fitting_targets
from fedguild.runs.setup import fitted, method_of, method_record
from fedguild.server.method import Method, client_model, excerpt_of
from fedguild.server.settings import AveragingSettings
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client
from tests.methods.test_matrix import CASES

KNOWN = (
    "olmoe-1b-7b",
    "mixtral-8x7b",
    "qwen1.5-moe-a2.7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "switch-base-16",
    "llama-3.2-1b",
    "qwen2.5-0.5b",
    "olmo-1b",
)
DENSE = {"llama-3.2-1b", "qwen2.5-0.5b", "olmo-1b"}
OTHER_NAMES = {"deepseek-v2-lite", "deepseek-v3", "switch-base-16"}
"""Models whose attention has no q_proj or no v_proj."""


@pytest.fixture(scope="module")
def models() -> dict[str, ModelInfo]:
    """Every family at its real size, from its config alone; DeepSeek-V3 small."""
    return {name: describe_config(name) for name in KNOWN} | {"deepseek-v3": tiny_backbone("deepseek_v3").info}


def options_of(name: str, model: str) -> dict[str, Any]:
    """The options that the tests need: a rank without an alpha may be too large for the small DeepSeek-V3."""
    fields = METHODS.load(name).Settings.model_fields
    return {"rank": 4} if model == "deepseek-v3" and "rank" in fields and "alpha" not in fields else {}


def planned(method: Method, model: ModelInfo, clients: int = 8) -> Method:
    """Returns the method as it runs, after its plan was held against the model."""
    if method.facts.needs_experts:
        model.require_experts(method.title)
    method = type(method)(method.settings.fitted(model, clients, exact=True))
    assert adapter_shapes(model, method.plan(model, Budget("all", model.top_k, 8)))
    return method


@pytest.mark.parametrize("label", [*KNOWN, "deepseek-v3"])
@pytest.mark.parametrize("name", METHODS)
def test_defaults_fit_every_family_that_a_method_supports(name: str, label: str, models: dict[str, ModelInfo]) -> None:
    method, model = build_method(name, options_of(name, label)), models[label]
    if label in CASES[name].refuses or (method.facts.needs_experts and label in DENSE):
        with pytest.raises(ModelError, match="needs a"):
            planned(method, model)
        return
    try:
        runs = planned(method, model).settings.model_dump()
    except ModelError as error:
        pytest.fail(
            f"{name} refuses {label}: {error.message} If that is meant, name the model in `refuses` of its case in "
            "tests/methods/test_matrix.py."
        )
    given = method.settings.model_dump()
    changed = {option: value for option, value in runs.items() if value != given[option]}
    if isinstance(method.settings, AveragingSettings):
        fitted = {"gate": "none", "experts": "none", "targets": ("attention",)} if label in DENSE else {}
    elif {"q_proj", "v_proj"} & set(given.get("targets", ())):
        fitted = {"targets": ("attention",)} if label in OTHER_NAMES else {}
    else:
        names_experts = {"router", "experts"} & set(given.get("targets", ()))
        fitted = {"targets": ("attention",)} if label in DENSE and names_experts else {}
    assert changed == fitted


BY_BUDGET = ("a3smoe", "fed-sb", "fedsa-lora", "ffa-lora", "flame", "guild", "rolora", "smoe-llb", "ub-smoe")
"""Methods whose clients run their budget's active experts, by their cases in the matrix."""


@pytest.mark.parametrize("name", BY_BUDGET)
def test_clients_run_their_budgets_experts(
    name: str, tmp_path: Path, olmoe_backbone: Backbone, llama_backbone: Backbone
) -> None:
    method, model = (
        build_method(name, {**CASES[name].options, "targets": ["attention", "experts"]}),
        olmoe_backbone.info,
    )
    clients = [client(0, LARGE), client(1, MIDDLE), client(2, SMALL)]
    federation = Federation(olmoe_backbone, method, clients, tmp_path)
    state = federation.start()
    for who in clients:
        own = client_model(method, excerpt_of(method, state, model, who), model, who, Payload())
        for plan in (method.plan(model, who.budget), own.plan):
            assert (plan.active_experts, plan.rank) == (who.budget.active_experts, 2)
    for active in (0, 9):
        with pytest.raises(
            ConfigError, match=rf"'x' has active_experts {active}, but tiny olmoe runs 4 of 8(.|\n)*1 to 4"
        ):
            method.plan(model, Budget("x", active, 2))
    if not method.facts.needs_experts:
        dense = build_method(name, {"rank": 2, "targets": ["attention"]})
        assert dense.plan(llama_backbone.info, LARGE).active_experts is None


@pytest.mark.parametrize(
    ("defaults", "model", "expected"),
    [
        (("attention", "router", "experts"), "olmoe-1b-7b", ("attention", "router", "experts")),
        (("attention", "router", "experts"), "llama-3.2-1b", ("attention",)),
        (("q_proj", "experts"), "llama-3.2-1b", ("q_proj",)),
        (("router", "experts"), "llama-3.2-1b", ("attention",)),
        (("q_proj", "v_proj", "experts"), "deepseek-v2-lite", ("attention", "experts")),
        (("q_proj", "mlp"), "llama-3.2-1b", ("q_proj", "mlp")),
        ((), "llama-3.2-1b", ()),
    ],
)
def test_targets_that_a_model_lacks(
    defaults: tuple[str, ...], model: str, expected: tuple[str, ...], models: dict[str, ModelInfo]
) -> None:
    assert fitting_targets(models[model], defaults) == expected


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("fedit", {"targets": ["attention", "experts"]}, r"target\(s\) experts name no layer"),
        ("fedamole", {"targets": ["q"]}, r"target\(s\) q name no layer"),
        ("fedavg", {"gate": "full"}, "method.gate and method.experts need experts"),
        ("fedprox", {"targets": ["attention"], "experts": "lora"}, "method.gate and method.experts need experts"),
    ],
)
def test_what_the_user_writes_is_refused_not_changed(
    name: str, options: dict[str, object], told: str, models: dict[str, ModelInfo]
) -> None:
    with pytest.raises(ConfigError, match=told):
        planned(build_method(name, options), models["llama-3.2-1b"])


def test_what_the_user_writes_beside_a_default_is_kept(models: dict[str, ModelInfo]) -> None:
    settings = planned(build_method("fedavg", {"targets": ["mlp"], "rank": 3}), models["llama-3.2-1b"]).settings
    assert (settings.gate, settings.experts, settings.targets, settings.rank) == ("none", "none", ("mlp",), 3)


@pytest.mark.parametrize(
    ("clients", "options", "experts", "clients_per_expert"),
    [
        (10, {}, 30, 2),  # the paper's
        (8, {}, 30, 2),
        (6, {}, 24, 2),  # 30 x 2 > 6 x 8
        (40, {}, 40, 2),  # 30 x 2 < 40 x 2
        (1, {}, 8, 1),
        (6, {"experts_per_client": 4}, 12, 2),
        (6, {"experts": 20}, 20, 2),
        (40, {"scale_clients_per_expert": True}, 30, 2),
        (4, {"clients_per_expert": 4}, 8, 4),
    ],
)
def test_the_number_of_experts_fits_the_clients(
    clients: int, options: dict[str, object], experts: int, clients_per_expert: int, models: dict[str, ModelInfo]
) -> None:
    method = planned(build_method("fedamole", options), models["llama-3.2-1b"], clients)
    assert (method.settings.experts, method.settings.clients_per_expert) == (experts, clients_per_expert)
    assert planned(method, models["llama-3.2-1b"], clients).settings is method.settings


@pytest.mark.parametrize(
    ("clients", "options"), [(6, {"experts": 30}), (40, {"experts": 30}), (1, {"clients_per_expert": 2})]
)
def test_numbers_that_the_user_writes_are_refused(
    clients: int, options: dict[str, object], models: dict[str, ModelInfo]
) -> None:
    with pytest.raises(ConfigError, match="method"):
        planned(build_method("fedamole", options), models["llama-3.2-1b"], clients)


@pytest.mark.usefixtures("small_english")
def test_no_shipped_preset_needs_fitting() -> None:
    models: dict[str, ModelInfo] = {}
    seen = set()
    for preset in presets():
        if (preset.method.name, preset.model.name, preset.setup.name) in seen:
            continue
        seen.add((preset.method.name, preset.model.name, preset.setup.name))
        config = load_config(preset.name)
        path = config.model.path
        if path not in models:
            models[path] = describe_config(path)
        given = method_of(config)
        method = fitted(given, config, models[path])
        assert method_record(given, method)["fitted"] == {}, preset.name
