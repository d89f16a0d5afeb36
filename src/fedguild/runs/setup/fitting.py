"""The method and the budgets of a config, as given and as fitted to a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fedguild.client.budget import Budget
from fedguild.config import Config
from fedguild.core.errors import ConfigError
from fedguild.methods import METHODS, build_method
from fedguild.model.info import ModelInfo
from fedguild.server.method import Method


def method_of(config: Config) -> Method:
    """Returns the config's method with the options that the config gives.

    Raises:
        ConfigError: the method or an option is unknown, or out of range.
    """
    return build_method(config.method.name, config.method.options)


def require_preferences(method: Method) -> None:
    """Raises ConfigError if a method cannot train on preference pairs."""
    if method.facts.not_preferences:
        raise ConfigError(
            f"{method.name} cannot train on preference pairs by DPO: it {method.facts.not_preferences}.",
            "Choose a method whose clients train by the plain loop, such as fedit or flame, or set "
            "training.objective=sft, which trains on the chosen answers alone.",
        )


def fitted(method: Method, config: Config, model: ModelInfo) -> Method:
    """Returns a method as it runs on a model in the config's federation.

    Raises:
        ModelError: the method needs experts, and the model has none.
        ConfigError: an option does not fit the model or the federation.
    """
    if method.facts.needs_experts:
        model.require_experts(method.title)
    federation = config.federation
    settings = method.settings.fitted(model, federation.clients, exact=federation.wire_dtype == "fp32")
    return method if settings is method.settings else type(method)(settings)


def budgets_of(config: Config, model: ModelInfo) -> dict[str, Budget]:
    """Returns the config's budgets by name; one without a number of active experts has the model's.

    Raises:
        ConfigError: a budget asks for more active experts than the model has.
    """
    budgets = {
        tier.name: Budget(tier.name, tier.active_experts or model.top_k, tier.rank)
        for tier in config.federation.budgets
    }
    for budget in budgets.values():
        if model.moe or (model.undescribed and budget.active_experts not in (0, *model.active_by_config)):
            model.require_active_experts(budget.active_experts, f"federation.budgets: '{budget.name}'")
    return budgets


def method_record(given: Method, method: Method) -> dict[str, Any]:
    """Returns a run's record of its method.

    Args:
        given: The method with the config's options.
        method: The method as it runs.

    Returns:
        `name`; `from`, the package that it comes from, with its version, or `fedguild`; `options`, every option as the
            method runs; `fitted`, the options that differ from the config or their default, each with the original
            value.
    """
    options = method.settings.model_dump(mode="json")
    before = given.settings.model_dump(mode="json")
    changed = {name: value for name, value in before.items() if value != options[name]}
    return {"name": method.name, "from": METHODS.origin(method.name), "options": options, "fitted": changed}


def tell_fitted(given: Method, method: Method, tell: Callable[[str], None]) -> None:
    """Reports the options that differ from the config or their defaults."""
    record = method_record(given, method)
    for name, value in record["fitted"].items():
        used = json.dumps(record["options"][name])
        tell(f"method.{name} is {used} here, not {json.dumps(value)}, to fit the model and the federation.")
