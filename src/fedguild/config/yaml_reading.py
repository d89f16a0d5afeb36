"""YAML reader in which `1e-4` is a number, `010` is ten and a repeated key is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from fedguild.core.errors import ConfigError


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml, if PyYAML has it
    """PyYAML's safe loader with YAML 1.2 numbers; duplicate keys are an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: list[Any] = []
        for each, _ in node.value:
            key = self.construct_object(each, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key}' appears twice", problem_mark=each.start_mark)
            seen.append(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Parses an integer as in YAML 1.2, where `010` is ten; in YAML 1.1 it is octal."""
    if re.fullmatch(r"[-+]?0[0-9]+", node.value):
        return int(node.value, 10)
    number: int = loader.construct_yaml_int(node)
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_file(path: Path) -> Any:
    """Returns the value of a YAML file.

    Raises:
        ConfigError: the file is not UTF-8 or not YAML, or a key appears twice.
        OSError: it cannot be read.
    """
    try:
        return parse(path.read_text("utf-8"), str(path))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"Cannot read the config {path}: line {line}: the byte 0x{error.object[error.start]:02x} is not UTF-8.",
            "Configs are read as UTF-8; save the file again as UTF-8.",
        ) from error


def parse(text: str, source: str) -> Any:
    """Returns the value of a YAML text.

    Args:
        source: Where the text comes from, for the error message.

    Raises:
        ConfigError: the text is not YAML, or a key appears twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{where}: {error.problem or error.context}.") from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError of a date that there is not, for example
        raise ConfigError(f"{source}: not readable as YAML: {error}.") from error
