"""The method of a config, as given and as it runs on a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fedguild.config import Config
from fedguild.methods import build_method
from fedguild.server.method import Method


def method_of(config: Config) -> Method:
    """Returns the config's method with the options that the config gives.

    Raises:
        ConfigError: the method or an option is unknown, or out of range.
    """
    return build_method(config.method.name, config.method.options)


def method_record(given: Method, method: Method) -> dict[str, Any]:
    """Returns a run's record of its method.

    Args:
        given: The method with the config's options.
        method: The method as it runs.

    Returns:
        `name`; `options`, every option as the method runs; `fitted`, the options that differ from the config or their
        default, each with the original value.
    """
    options = method.settings.model_dump(mode="json")
    before = given.settings.model_dump(mode="json")
    fitted = {name: value for name, value in before.items() if value != options[name]}
    return {"name": method.name, "options": options, "fitted": fitted}


def tell_fitted(given: Method, method: Method, tell: Callable[[str], None]) -> None:
    """Reports the options that differ from the config or their defaults."""
    record = method_record(given, method)
    for name, value in record["fitted"].items():
        used = json.dumps(record["options"][name])
        tell(f"method.{name} is {used} here, not {json.dumps(value)}, to fit the model and the federation.")
