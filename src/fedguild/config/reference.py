"""Reference of every setting, read off the schema: accepted values, default and help."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

_TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
    "object": "mapping",
    "array": "list",
}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


@dataclass(frozen=True)
class Setting:
    """One setting as a reader sees it.

    Attributes:
        key: Dotted name; `[]` stands for each item of a list.
        accepts: The values that it may have, in words.
        default: The default as YAML writes it; `required` where there is none.
        help: What it does.
    """

    key: str
    accepts: str
    default: str
    help: str


def settings_of(schema: type[BaseModel]) -> tuple[Setting, ...]:
    """Returns every setting of a pydantic model in order, with nested sections flattened."""
    described = schema.model_json_schema()
    return tuple(_settings(described, described.get("$defs", {}), ""))


def as_markdown(settings: tuple[Setting, ...]) -> str:
    rows = []
    for setting in settings:
        help_in_cell = setting.help.replace("|", "\\|")
        rows.append(f"| `{setting.key}` | {setting.accepts} | `{setting.default}` | {help_in_cell} |")
    return "\n".join(["| setting | accepts | default | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"


def _settings(node: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str) -> Iterator[Setting]:
    required = node.get("required", [])
    for name, child in node.get("properties", {}).items():
        key = f"{prefix}{name}"
        if section := _section(child, definitions):
            yield from _settings(section, definitions, f"{key}.")
            continue
        default = "required" if name in required else _yaml(child.get("default", {}))
        items = _section(child.get("items", {}), definitions)
        yield Setting(key, _accepts(child, definitions), default, child.get("description", ""))
        if items:
            yield from _settings(items, definitions, f"{key}[].")


def _section(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any] | None:
    target = definitions.get(str(node.get("$ref", "")).rsplit("/", 1)[-1])
    return target if target and "properties" in target else None


def _accepts(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "anyOf" in node:
        return ", or ".join(_accepts(choice, definitions) for choice in node["anyOf"])
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    bounds = " and ".join(f"{sign} {node[bound]:g}" for bound, sign in _BOUNDS.items() if bound in node)
    return f"{_TYPES.get(node.get('type', ''), 'any value')} {bounds}".strip()


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)
