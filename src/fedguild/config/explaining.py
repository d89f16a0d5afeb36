"""Validation errors of a config in plain language, one line per setting."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedguild.core.errors import ELSEWHERE, ConfigError, nearest

Location = tuple[str | int, ...]

_PLAIN = {
    "missing": "is required",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "too_short": "must have at least {min_length} item(s)",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "does not have the accepted form ({help})",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be {expected}",
    "value_error": "{error}",
}
_MOST_LINES = 50
"""Most settings that one error names."""
_SHOWS_ITS_INPUT_ITSELF = {"missing", "value_error"}


@dataclass(frozen=True)
class Layer:
    """Settings from one source, before validation: a file, a preset, or one override; `file` is where it was read."""

    source: str
    settings: Mapping[str, Any]
    is_override: bool = False
    file: Path | None = None


def explained(error: ValidationError, layers: Sequence[Layer], schema: type[BaseModel]) -> ConfigError:
    """Returns the error as a ConfigError with one line per setting, each naming its source.

    Args:
        layers: The sources in the order in which they were merged; the last overrides the others.
        schema: The model that the settings were validated against.
    """
    lines, hints = [], []
    every = list(_one_per_location(error))
    for location, details in every[:_MOST_LINES]:
        source = _source(location, layers)
        if details[0]["type"] == "extra_forbidden":
            lines.append(f"{source}: unknown key '{dotted(location)}'")
            hints.append(_hint(location, schema))
        else:
            told = _joined(dict.fromkeys(_told(detail, schema) for detail in details))
            silent = all(detail["type"] in _SHOWS_ITS_INPUT_ITSELF for detail in details)
            got = "" if silent else f", got {_shown(details[0]['input'])}"
            lines.append(f"{source}: {dotted(location)}: {told}{got}" if location else f"{source}: {told}{got}")
    if len(every) > _MOST_LINES:
        lines.append(f"and {len(every) - _MOST_LINES} more such settings")
    return ConfigError("\n".join(lines), "\n".join(dict.fromkeys(hints)))


def dotted(location: Location) -> str:
    """Returns `federation.budgets[1].rank` for ("federation", "budgets", 1, "rank")."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text


def known_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yields the dotted name of every setting below `schema`, sections included."""
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}"
        if section := _section(field.annotation):
            yield from known_keys(section, f"{prefix}{name}.")


def _one_per_location(error: ValidationError) -> Iterator[tuple[Location, list[ErrorDetails]]]:
    """Groups the alternatives of a union (`auto` or a number) under their one setting.

    A list that is too short only because items of it are wrong is left out.
    """
    grouped: dict[Location, list[ErrorDetails]] = {}
    for detail in error.errors():
        location = tuple(part for part in detail["loc"] if not _is_union_tag(part))
        grouped.setdefault(location, []).append(detail)
    for location, details in grouped.items():
        too_short = details[0]["type"] == "too_short"
        if not (
            too_short and any(len(other) > len(location) and other[: len(location)] == location for other in grouped)
        ):
            yield location, details


def _is_union_tag(part: str | int) -> bool:
    """Whether this is pydantic's name for an alternative of a union, not a key of the config."""
    return isinstance(part, str) and (part in ("int", "constrained-int") or part.startswith("literal["))


def _told(detail: ErrorDetails, schema: type[BaseModel]) -> str:
    template = _PLAIN.get(detail["type"])
    if template is None:
        return detail["msg"]
    section, name = _enclosing(detail["loc"], schema)
    help_text = section.model_fields[name].description if name in section.model_fields else ""
    return template.format(**{**detail.get("ctx", {}), "help": (help_text or "").rstrip(".")})


def _joined(alternatives: Iterable[str]) -> str:
    first, *others = alternatives
    return " or ".join([first, *(other.removeprefix("must be ") for other in others)])


def _shown(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _source(location: Location, layers: Sequence[Layer]) -> str:
    """Returns the topmost source that sets the location, or else the nearest section around it."""
    for length in range(len(location), 0, -1):
        for layer in reversed(layers):
            if _holds(layer.settings, location[:length]):
                return layer.source
    return next(layer.source for layer in reversed(layers) if not layer.is_override)


def _holds(settings: Any, location: Location) -> bool:
    """Whether a layer sets the location, itself or by a list or value that replaces all below it."""
    for part in location:
        if not isinstance(settings, Mapping):
            return True
        if part not in settings:
            return False
        settings = settings[part]
    return True


def _hint(location: Location, schema: type[BaseModel]) -> str:
    """Returns the nearest known key: one of the same name elsewhere, else one of the key's own section."""
    section, key = _enclosing(location, schema)
    names = {key, ELSEWHERE.get(key, key)} - set(section.model_fields)
    elsewhere = [known for known in known_keys(schema) if known.rsplit(".", 1)[-1] in names]
    if elsewhere:
        return f"Did you mean '{elsewhere[0]}'?"
    prefix = dotted(location[:-1])
    return nearest(dotted(location), [f"{prefix}.{name}" if prefix else name for name in section.model_fields])


def _enclosing(location: Location, schema: type[BaseModel]) -> tuple[type[BaseModel], str]:
    section = schema
    for part in location[:-1]:
        if part in section.model_fields:
            section = _section(section.model_fields[str(part)].annotation) or section
    return section, str(location[-1]) if location else ""


def _section(annotation: Any) -> type[BaseModel] | None:
    """Returns the model that a field holds, directly or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section, typing.get_args(annotation))), None)
