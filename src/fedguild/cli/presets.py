"""`fedguild presets`: the configs that ship with FedGuild, and every setting of a config."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from fedguild.cli.options import JsonOption, OverridesArgument
from fedguild.cli.output import show, show_json
from fedguild.config import Config, load_config, presets, tables
from fedguild.config.reference import settings_of

EXAMPLES = (
    "fedguild presets",
    "fedguild presets flame/olmoe-dolly > mine.yaml",
    "fedguild presets --settings",
)


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this preset or file with every setting, as YAML.")
    ] = None,
    overrides: OverridesArgument = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List every setting, what it accepts, its default and its meaning.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the configs that ship with FedGuild, or print one as a starting point for your own."""
    if settings:
        _list_settings(as_json)
    elif name is None:
        _list_presets(as_json)
    elif table := next((known for known in tables() if known.name == name), None):
        typer.echo(table.path.read_text("utf-8"), nl=False)
    else:
        config = load_config(name, overrides or ())
        if as_json:
            show_json(config.model_dump(mode="json"))
        else:
            typer.echo(config.resolved_yaml(), nl=False)


def _list_presets(as_json: bool) -> None:
    if as_json:
        show_json(
            [
                {"name": entry.name, "kind": kind, "description": entry.description}
                for kind, entries in (("preset", presets()), ("table", tables()))
                for entry in entries
            ]
        )
        return
    listed = Table("preset", "what it is", box=None, header_style="bold", pad_edge=False)
    for preset in presets():
        listed.add_row(preset.name, preset.description)
    compared = Table("table", "what `fedguild compare TABLE` prints", box=None, header_style="bold", pad_edge=False)
    for table in tables():
        compared.add_row(table.name, table.description)
    show(listed, "", compared)


def _list_settings(as_json: bool) -> None:
    settings = settings_of(Config)
    if as_json:
        show_json([vars(setting) for setting in settings])
        return
    table = Table("setting", "accepts", "default", "meaning", box=None, header_style="bold", pad_edge=False)
    for setting in settings:
        table.add_row(setting.key, setting.accepts, setting.default, setting.help)
    show(table)
