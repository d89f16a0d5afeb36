"""YAML reader in which `1e-4` is a number, `010` is ten and a repeated key is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from fedguild.core.errors import ConfigError

MOST_VALUES = 20_000
"""Most values of a text; a config has a few hundred."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml, if PyYAML has it
    """PyYAML's safe loader with YAML 1.2 numbers; duplicate keys are an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for each, _ in node.value:
            key = self.construct_object(each, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key}' appears twice", problem_mark=each.start_mark)
            seen.add(key if isinstance(key, Hashable) else id(key))
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
        ConfigError: the text is not YAML, a key appears twice, or it has more than `MOST_VALUES` values.
    """
    if text.count("\n") + text.count(",") > MOST_VALUES:  # one of which stands between two values; parsing is slow
        raise ConfigError(f"{source}: it has more lines or values than a config has ({MOST_VALUES}).")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _require_small(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{where}: {error.problem or error.context}.") from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError of a date that there is not, for example
        raise ConfigError(f"{source}: not readable as YAML: {error}.") from error
    finally:
        loader.dispose()


def _require_small(root: yaml.Node) -> None:
    """Raises MarkedYAMLError if a text says more values than a config has, by its length or by aliases of aliases."""
    counts: dict[int, int | None] = {}  # None while a node's own values are counted
    waiting = [root]
    while waiting:
        node = waiting[-1]
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = [each for pair in node.value for each in pair]
        if id(node) not in counts:
            counts[id(node)] = None
            if any(counts.get(id(child), 0) is None for child in children):
                raise yaml.MarkedYAMLError(
                    problem="an alias stands inside of what it names", problem_mark=node.start_mark
                )
            waiting += [child for child in children if id(child) not in counts]
            continue
        waiting.pop()
        if counts[id(node)] is None:
            counts[id(node)] = total = 1 + sum(counts[id(child)] or 0 for child in children)
            if total > MOST_VALUES:
                problem = f"it has more values than a config has ({MOST_VALUES}), aliases written out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
