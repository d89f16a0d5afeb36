"""`fedguild presets`: the configs that ship with FedGuild, and every setting of a config."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import typer
from rich.table import Table

from fedguild.cli.options import JsonOption, OverridesArgument
from fedguild.cli.output import listing, note, setting_table, show, show_json
from fedguild.config import Config, Preset, ShippedTable, load_config, preset_subject, presets, tables
from fedguild.config.reference import settings_of
from fedguild.errors import ConfigError

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
            help="List the presets of this method, or show this preset or file with every setting, as YAML.",
        ),
    ] = None,
    overrides: OverridesArgument = None,
    model: Annotated[
        str | None, typer.Option("--model", help="List those on a model whose name contains this, for example olmoe.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="List those on data whose name contains this, for example dolly.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List all of them.")] = False,
    settings: Annotated[
        bool, typer.Option("--settings", help="List every setting, what it accepts, its default and its meaning.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the configs that ship with FedGuild, or print one as a starting point for your own.

    Without a METHOD, a filter or --all it prints how many there are.
    """
    method = name if name in {preset.name.partition("/")[0] for preset in presets()} else None
    if settings:
        _list_settings(as_json)
    elif name is None or method is not None:
        shown = _Chosen.of(method, model, data)
        if as_json:
            show_json(shown.to_json())
        elif every or method or model or data:
            shown.list()
        else:
            shown.summarise()
    elif table := next((known for known in tables() if known.name == name), None):
        typer.echo(table.path.read_text("utf-8"), nl=False)
    else:
        config = load_config(name, overrides or ())
        if as_json:
            show_json(config.model_dump(mode="json"))
        else:
            typer.echo(config.resolved_yaml(), nl=False)


def methods_with_presets(model: str | None, data: str | None) -> set[str]:
    """Returns the methods with a preset on a model and on data whose names contain these; None for any.

    Raises:
        ConfigError: there is none.
    """
    return {preset.name.partition("/")[0] for preset, _, _ in _Chosen.of(None, model, data).presets}


@dataclass(frozen=True)
class _Chosen:
    """The presets and tables that were asked for.

    Attributes:
        presets: Each preset with its model and its corpus.
        tables: The tables.
    """

    presets: Sequence[tuple[Preset, str, str]]
    tables: Sequence[ShippedTable]

    @classmethod
    def of(cls, method: str | None, model: str | None, data: str | None) -> Self:
        """Returns those of a method, on a model and on data; None for any.

        Raises:
            ConfigError: there is none.
        """
        found = []
        for preset in presets():
            path, corpus = preset_subject(preset)
            own, _, rest = preset.name.partition("/")
            fits = (
                method in (None, own)
                and (model is None or model.lower() in f"{path} {rest}".lower())
                and (data is None or data.lower() in f"{corpus} {rest}".lower())
            )
            found += [(preset, path, corpus)] if fits else []
        words = [word.lower() for word in (model, data) if word]
        listed = [
            table
            for table in tables()
            if method in (None, table.name.partition("/")[0])
            and all(word in table.path.read_text("utf-8").lower() for word in words)
        ]
        if not found and not listed:
            asked = ", ".join(filter(None, (method, model and f"model {model}", data and f"data {data}")))
            raise ConfigError(f"There is no preset for {asked}.", "`fedguild presets` lists what there is.")
        return cls(found, listed)

    def to_json(self) -> list[dict[str, str]]:
        """Returns all of them as plain JSON values."""
        configs = [
            {
                "name": one.name,
                "kind": "preset",
                "description": one.description,
                "method": one.name.partition("/")[0],
                "model": model,
                "data": corpus,
            }
            for one, model, corpus in self.presets
        ]
        compared = [{"name": one.name, "kind": "table", "description": one.description} for one in self.tables]
        return [*configs, *compared]

    def list(self) -> None:
        """Prints a line for each."""
        if self.presets:
            show(listing("preset", "what it is", ((one.name, one.description) for one, _, _ in self.presets)))
        if self.tables:
            compared = ((one.name, one.description) for one in self.tables)
            show("", listing("table", "what `fedguild compare TABLE` prints", compared))

    def summarise(self) -> None:
        """Prints the numbers of each method, short enough for a screen, and what there is to choose by."""
        by_method: dict[str, list[tuple[str, str]]] = {}
        for preset, model, corpus in self.presets:
            by_method.setdefault(preset.name.partition("/")[0], []).append((model.rpartition("/")[2], corpus))
        counted = Counter(table.name.partition("/")[0] for table in self.tables)
        listed = Table(box=None, header_style="bold", pad_edge=False)
        listed.add_column("method", no_wrap=True)
        for title in ("presets", "tables", "models", "data sets"):
            listed.add_column(title, justify="right")
        for method, subjects in by_method.items():
            models, corpora = (set(column) for column in zip(*subjects, strict=True))
            numbers = (len(subjects), counted[method] or "–", len(models), len(corpora))
            listed.add_row(method, *map(str, numbers))
        show(listed)
        models, corpora = (set(column) for column in zip(*itertools.chain(*by_method.values()), strict=True))
        note("\n`fedguild presets METHOD` lists a method's presets and tables, --all those of all.")
        note(f"--model chooses by model: {', '.join(sorted(models, key=str.lower))}.")
        note(f"--data chooses by data: {', '.join(sorted(corpora))}.")


def _list_settings(as_json: bool) -> None:
    settings = settings_of(Config)
    if as_json:
        show_json([vars(setting) for setting in settings])
        return
    show(setting_table("setting", settings))
