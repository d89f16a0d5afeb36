"""The methods: one file or folder per paper, discovered automatically.

Other packages register methods in the entry-point group `fedguild.methods`. On one machine the name of a method may
also be `module:Class`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from fedguild.core.errors import ConfigError, nearest
from fedguild.core.plugins import Plugins, is_target

if TYPE_CHECKING:
    from fedguild.server.method import Method


def _method_of(name: str, target: Any) -> type[Method]:
    """Returns the method class that a module defines, or the class itself; `module:Class` gets that as its name.

    Raises:
        TypeError: there is none, or more than one, or it has another name, or it lacks what every method has.
    """
    from fedguild.server.method import Method  # not before a method is loaded: it imports torch

    candidates = vars(target).values() if isinstance(target, ModuleType) else [target]
    classes = [
        candidate
        for candidate in candidates
        if isinstance(candidate, type)
        and issubclass(candidate, Method)
        and (candidate.__module__ == target.__name__ or candidate is target)
    ]
    if len(classes) != 1:
        raise TypeError(f"it defines {len(classes)} subclasses of fedguild.server.method.Method instead of one")
    method = classes[0]
    if is_target(name):  # a class of its own: the same one may be registered under another name
        known = {"name": name, "title": method.title, "__module__": method.__module__, "__doc__": method.__doc__}
        method = cast(type[Method], type(method.__name__, (method,), known))
    if method.name != name:
        raise TypeError(f"its class has the name '{method.name}'; set `name = \"{name}\"` in it")
    if lacking := sorted(method.__abstractmethods__):
        raise TypeError(f"its class does not define `{'`, `'.join(lacking)}`")
    return method


METHODS: Plugins[type[Method]] = Plugins(
    "method", __name__, "fedguild.methods", _method_of, dashes=True, unregistered=True
)


def require_registered(name: str) -> None:
    """Raises ConfigError for `module:Class`, of which a federation over the network must import nothing."""
    if is_target(name):
        raise ConfigError(
            f"method.name: '{name}' is a Python class, which only runs on one machine import.",
            "In a federation, install it as a plug-in at the server and at every site (docs/guides/plug-ins.md).",
        )


def build_method(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """Returns a method by its name, its options checked.

    Raises:
        ConfigError: the method or an option is unknown, or a value is out of range.
    """
    method = METHODS.load(name)
    try:
        settings = method.Settings(**(options or {}))
    except ValidationError as error:
        raise _explained(name, method, error) from error
    return method(settings)


def _explained(name: str, method: type[Method], error: ValidationError) -> ConfigError:
    known = method.Settings.model_fields
    for problem in error.errors():
        key = str(problem["loc"][0]) if problem["loc"] else ""
        if problem["type"] == "extra_forbidden":
            return ConfigError(f"method.{key}: {name} has no such option.", nearest(key, known))
    problem = error.errors()[0]
    where = ".".join(str(part) for part in ("method", *problem["loc"]))
    help_text = known[str(problem["loc"][0])].description if problem["loc"] else ""
    told = str(problem["ctx"]["error"]) if problem["type"] == "value_error" else problem["msg"]
    got = f", got {problem['input']!r}" if problem["loc"] else ""  # of several options the message names the values
    return ConfigError(f"{where}: {told}{got}.", f"It is: {help_text}" if help_text else "")
