"""Loading of configs: a YAML file or a preset, and overrides, validated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from pydantic import ValidationError

from fedguild.config.composing import find_preset, unknown_preset
from fedguild.config.explaining import Layer, explained
from fedguild.config.renamed import refuse_old_names, with_new_names
from fedguild.config.schema import Config
from fedguild.config.trust import Code, require_trusted
from fedguild.config.yaml_reading import parse, parse_file
from fedguild.core.errors import ConfigError

TABLES_FOLDER = Path(__file__).parent / "tables"


Given = str | Path | Mapping[str, Any] | Config
"""A config: the name of a preset, a YAML file, a mapping of settings, or a config as it is."""
Override = str | Mapping[str, Any]
"""`key.sub=value`, or a mapping of settings, nested or with dotted keys."""


def load_config(given: Given, overrides: Sequence[Override] = (), *, between: Sequence[Layer] = ()) -> Config:
    """Returns the validated config of a file or preset.

    A config may build on another with `extends: <preset or file in the same folder>`. Mappings are merged key by key;
    anything else is replaced. The options of a method or of a corpus are dropped if a layer above names another one.

    Args:
        given: A YAML file, the name of a preset, a mapping of settings, which may have `extends`, or a config.
        overrides: `key.sub=value`, the value read as YAML, or a mapping of settings; of two for one key the later wins.
        between: Settings that override the file's and are overridden by `overrides`.

    Raises:
        ConfigError: there is no such file or preset, it is not YAML, or a setting is unknown or out of range; the
            message names the source and the full key of every such setting.
    """
    above = [replace(layer, settings=_written_out(layer.settings)) for layer in between]
    below, name = _given_layers(given)
    layers = [*below, *above, *map(_override_layer, overrides)]
    for layer in layers:
        refuse_old_names(layer.settings, layer.source)
    return _validated(layers, name)


def load_saved(path: Path) -> Config:
    """Returns the config that a run wrote into its folder; runs of 0.3 had other names.

    Raises:
        ConfigError: the file cannot be read, or is not a config.
    """
    layers = [replace(layer, settings=with_new_names(layer.settings)) for layer in _file_layers(path, ())]
    return _validated(layers, default_name(path))


def _validated(layers: Sequence[Layer], name: str) -> Config:
    config = _read(layers, name)
    for code in config.code:
        if file := next(layer.file for layer in reversed(layers) if _says(layer, code.setting)):
            require_trusted(file, code)
    return config


def _read(layers: Sequence[Layer], name: str) -> Config:
    settings: dict[str, Any] = {"name": name}
    for layer in layers:
        settings = _merged(settings, layer.settings)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise explained(error, layers, Config) from error


def _says(layer: Layer, key: str) -> bool:
    """Whether a layer has a setting, `section.name` or deeper."""
    settings: Any = layer.settings
    for name in key.split("."):
        if not isinstance(settings, Mapping) or name not in settings:
            return False
        settings = settings[name]
    return True


def asking_files(path: Path) -> list[tuple[Path, Code]]:
    """Returns the files of a config that ask to run Python code, and that code.

    Raises:
        ConfigError: as `load_config`.
    """
    layers = [replace(layer, settings=with_new_names(layer.settings)) for layer in _file_layers(path, ())]
    code = _read(layers, default_name(path)).code
    return [(layer.file, each) for each in code for layer in layers if layer.file and _says(layer, each.setting)]


def _given_layers(given: Given) -> tuple[list[Layer], str]:
    """Returns the layers of what was given, and the default name of the run."""
    if isinstance(given, Config):
        return [Layer("the config", given.model_dump(mode="json"))], given.name
    if isinstance(given, Mapping):
        settings = dict(given)
        parent = settings.pop("extends", None)
        if not isinstance(parent, (str, Path, NoneType)):
            raise ConfigError(f"extends: must name one preset or file, got {parent!r}.")
        extended, name = ([], "run") if parent is None else _given_layers(parent)
        return [*extended, Layer("the config", _written_out(settings))], name
    name = str(given)
    if preset := find_preset(name):
        return list(preset.layers()), preset.name.replace("/", "-")
    path = _existing(name, Path(name))
    return list(_file_layers(path, ())), default_name(path)


def _existing(name: str, path: Path) -> Path:
    if _is_file(path):
        return path
    if _is_file(TABLES_FOLDER / f"{name}.yaml"):
        raise ConfigError(
            f"'{name}' is a table of several runs, not the config of one.", f"`fedguild compare {name}` runs it."
        )
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"There is no config file {path}.", "`fedguild presets` lists the configs that ship.")
    raise unknown_preset(name)


def _is_file(path: Path) -> bool:
    """Whether there is a file; False also for a name that the file system cannot hold."""
    try:
        return path.is_file()
    except OSError:
        return False


def _file_layers(path: Path, children: tuple[Path, ...]) -> Iterator[Layer]:
    """Yields the layers of what a file extends, then its own."""
    if path.resolve() in children:
        raise ConfigError(f"{path} extends itself, through {', '.join(str(child) for child in children)}.")
    try:
        settings = parse_file(path)
    except OSError as error:
        raise ConfigError(f"Cannot read the config {path}: {error.strerror or error}.") from error
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: a config is a mapping of keys to values, but this is {settings!r:.60}.")
    settings = dict(settings)
    parent = settings.pop("extends", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise ConfigError(f"{path}: extends: must name one preset or file, got {parent!r}.")
        preset = find_preset(parent)
        beside = (*children, path.resolve())
        yield from preset.layers() if preset else _file_layers(_existing(parent, path.parent / parent), beside)
    yield Layer(str(path), _written_out(settings), file=path)


def _override_layer(override: Override) -> Layer:
    if isinstance(override, Mapping):
        return Layer("the overrides", _written_out(_nested(override)), is_override=True)
    if not isinstance(override, str):
        raise ConfigError(
            f"{override!r} is not an override.",
            "In Python every override is an argument of its own, text or a mapping: run(config, 'training.steps=5', "
            "{'seed': 1}).",
        )
    key, equals, value = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ConfigError(
            f"'{override}' is not an override.",
            "An override is key.sub=value, for example training.learning_rate=1e-4.",
        )
    settings: Any = parse(value, f"override '{override}'")
    for part in reversed(key.split(".")):
        settings = {part: settings}
    return Layer(f"override '{override}'", _written_out(settings), is_override=True)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings whose keys may be dotted, `{"training.steps": 5}`, as nested mappings."""
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        inner = _nested(value) if isinstance(value, Mapping) else value
        for part in reversed(str(key).split(".")):
            inner = {part: inner}
        nested = _merged(nested, inner)
    return nested


def _written_out(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Expands `method: flame` to `method: {name: flame}`; likewise `tracking` and `federation.engine`."""
    method, tracking, federation = (settings.get(section) for section in ("method", "tracking", "federation"))
    written = dict(settings)
    if isinstance(method, str):
        written["method"] = {"name": method}
    if isinstance(tracking, (str, list)):
        written["tracking"] = {"trackers": [tracking] if isinstance(tracking, str) else tracking}
    if isinstance(federation, Mapping) and isinstance(federation.get("engine"), str):
        written["federation"] = {**federation, "engine": {"name": federation["engine"]}}
    return written


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        lower = result.get(key)
        if isinstance(value, Mapping) and isinstance(lower, Mapping):
            result[key] = _merged(_still_valid(key, lower, value), value)
        else:
            result[key] = value
    return result


def _still_valid(section: str, lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drops the options of a method or corpus that the upper settings replace."""
    choice = {"method": "name", "data": "dataset"}.get(section)
    if choice is None or choice not in lower or upper.get(choice, lower[choice]) == lower[choice]:
        return lower
    return {} if section == "method" else {name: value for name, value in lower.items() if name != "options"}


def default_name(path: Path) -> str:
    """Returns the name of a run whose config has none: the file's, reduced to allowed characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "run"
