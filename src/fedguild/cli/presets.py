"""`fedguild presets`: the axes of the built-in configs, and every setting of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import typer

from fedguild.cli.options import JsonOption, OverridesArgument
from fedguild.cli.output import listing, note, setting_table, show, show_json
from fedguild.config import Config, Part, Preset, ShippedTable, axes, load_config, presets, tables
from fedguild.config.reference import settings_of
from fedguild.core.errors import ConfigError

EXAMPLES = (
    "fedguild presets",
    "fedguild presets flame",
    "fedguild presets --model olmoe --data dolly",
    "fedguild presets flame/olmoe-dolly > mine.yaml",
    "fedguild presets --settings",
)


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="METHOD|NAME",
            help="Show what this method runs on and its tables, or this preset or file with every setting, as YAML.",
        ),
    ] = None,
    overrides: OverridesArgument = None,
    model: Annotated[
        str | None, typer.Option("--model", help="List presets on a model whose name contains this, for example olmoe.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="List presets on data whose name contains this, for example dolly.")
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List every setting, what it accepts, its default and its meaning.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the configs that ship with FedGuild, or print one as a starting point for your own.

    A preset is METHOD/MODEL-DATA: any method on any model and data set that it fits. A variant has a
    suffix, for example fedit/tiny-tasks-ranks.
    """
    method = name if name in axes().methods else None
    if settings:
        _list_settings(as_json)
    elif name is None or method is not None:
        shown = _Chosen.of(method, model, data)
        if as_json:
            show_json(shown.to_json())
        elif model or data:
            show(listing("preset", "what it is", ((one.name, one.description) for one in shown.presets)))
        elif method:
            shown.show_method(axes().methods[method])
        else:
            shown.show_axes()
    elif table := next((known for known in tables() if known.name == name), None):
        typer.echo(table.path.read_text("utf-8"), nl=False)
    else:
        config = load_config(name, overrides or ())
        if as_json:
            show_json(config.model_dump(mode="json"))
        else:
            typer.echo(config.resolved_yaml(), nl=False)


def methods_with_presets(model: str | None, data: str | None) -> set[str]:
    """Returns the methods that run on a model and on data whose names contain these; None for any.

    Raises:
        ConfigError: there is none.
    """
    return {preset.method.name for preset in _Chosen.of(None, model, data).presets}


@dataclass(frozen=True)
class _Chosen:
    """The presets and tables that were selected."""

    presets: Sequence[Preset]
    tables: Sequence[ShippedTable]

    @classmethod
    def of(cls, method: str | None, model: str | None, data: str | None) -> Self:
        """Selects by method, model and data; None for any.

        Raises:
            ConfigError: there is none.
        """
        found = [
            preset
            for preset in presets()
            if method in (None, preset.method.name)
            and _contains(preset.model, model, "model", "path")
            and _contains(preset.data, data, "data", "dataset")
        ]
        if not found:
            asked = ", ".join(filter(None, (method, model and f"model {model}", data and f"data {data}")))
            raise ConfigError(f"There is no preset for {asked}.", "`fedguild presets` lists what there is.")
        return cls(found, [table for table in tables() if method in (None, table.name.partition("/")[0])])

    @property
    def axes(self) -> Mapping[str, list[Part]]:
        """The methods, models and data sets, each once."""
        return {
            axis: list({part.name: part for preset in self.presets for part in (getattr(preset, attribute),)}.values())
            for axis, attribute in (("methods", "method"), ("models", "model"), ("data", "data"))
        }

    @property
    def own_files(self) -> list[str]:
        return [preset.name for preset in self.presets if preset.own]

    def to_json(self) -> dict[str, Any]:
        return {
            **{
                axis: [
                    {"name": part.name, "description": part.description, "variants": list(part.variants)}
                    for part in parts
                ]
                for axis, parts in self.axes.items()
            },
            "presets": [preset.name for preset in self.presets],
            "own_files": self.own_files,
            "tables": [{"name": table.name, "description": table.description} for table in self.tables],
        }

    def show_axes(self) -> None:
        """Prints the models, the data sets and the names of the methods, which `fedguild methods` describes."""
        show(_listed("model", self.axes["models"]), "", _listed("data", self.axes["data"]), "")
        show(f"methods: {', '.join(part.name for part in self.axes['methods'])}")
        note("\nA preset is METHOD/MODEL-DATA, for example flame/tiny-tasks. `fedguild methods` describes the methods;")
        note("`fedguild presets METHOD` shows what one runs on, its variants and its tables.")
        note(f"With a file of its own: {', '.join(self.own_files)}.")

    def show_method(self, method: Part) -> None:
        """Prints a method's models and data sets, the variants of their presets, and its tables."""
        show(method.description, "", _listed("model", self.axes["models"]), "", _listed("data", self.axes["data"]))
        variants = dict.fromkeys(variant for preset in self.presets for variant in preset.variants)
        if self.tables:
            rows = ((table.name, table.description) for table in self.tables)
            show("", listing("table", "what `fedguild compare TABLE` prints", rows))
        note(f"\nA preset is {method.name}/MODEL-DATA, for example {self.presets[0].name}.")
        if variants:
            note(f"Variants, at the end of a name: {', '.join(variants)}.")
        if self.own_files:
            note(f"With a file of its own: {', '.join(self.own_files)}.")


def _contains(part: Part, word: str | None, section: str, key: str) -> bool:
    return word is None or word.lower() in f"{part.name} {part.content.get(section, {}).get(key, '')}".lower()


def _listed(title: str, parts: Sequence[Part]) -> Any:
    return listing(title, "what it is", ((part.name, part.description) for part in parts))


def _list_settings(as_json: bool) -> None:
    settings = settings_of(Config)
    if as_json:
        show_json([vars(setting) for setting in settings])
        return
    show(setting_table("setting", settings))
