"""Adapter plans as plain values, to send them to another process without pickling FedGuild's classes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from fedguild.core.errors import FedGuildError
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.plan import AdapterPlan

CLASS = "class"
"""Key of a dataclass's module and name, beside its fields."""


def plain_plan(plan: AdapterPlan) -> dict[str, Any]:
    parts = tuple(_plain(part) for part in plan.parts)
    return {"parts": parts, "active_experts": plan.active_experts, "merges": plan.merges}


def plan_from_plain(plain: dict[str, Any]) -> AdapterPlan:
    """Returns the plan that `plain_plan` wrote.

    Raises:
        FedGuildError: a part is of a class that this process does not know.
    """
    parts = tuple(_restored(part) for part in plain["parts"])
    if unknown := [type(part).__name__ for part in parts if not isinstance(part, AdapterPart)]:
        raise FedGuildError(f"{', '.join(unknown)} is no part of an adapter.")
    return AdapterPlan(parts, plain["active_experts"], plain["merges"])


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        own = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {CLASS: f"{kind.__module__}:{kind.__qualname__}", **own}
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(one) for one in value)
    if isinstance(value, dict):
        return {"items": [(_plain(key), _plain(one)) for key, one in value.items()]}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_restored(one) for one in value)
    if not isinstance(value, dict):
        return value
    if CLASS not in value:
        return {_restored(key): _restored(one) for key, one in value["items"]}
    module, _, name = value[CLASS].partition(":")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FedGuildError(
            f"This process does not know {value[CLASS]}.", "Install the same packages on every machine."
        ) from error
    if not isinstance(kind, type) or not is_dataclass(kind):
        raise FedGuildError(f"{value[CLASS]} is no part of an adapter.")
    return kind(**{name: _restored(one) for name, one in value.items() if name != CLASS})
