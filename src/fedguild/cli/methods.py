"""`fedguild methods`: what can be run, and with which options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedguild.cli.options import JsonOption
from fedguild.cli.output import show, show_json
from fedguild.config.reference import settings_of
from fedguild.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fedguild.server.method import Method

EXAMPLES = (
    "fedguild methods",
    "fedguild methods flame",
)


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show the options of this method.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the methods, or the options of one."""
    from fedguild.methods import METHODS

    if name is not None and name not in METHODS:
        raise ConfigError(f"There is no method '{name}'.", nearest(name, METHODS))
    described = [_described(METHODS[known]) for known in METHODS if name in (None, known)]
    if as_json:
        show_json(described if name is None else described[0])
    elif name is None:
        _show_all(described)
    else:
        _show_one(described[0])


def _described(method: type[Method]) -> dict[str, Any]:
    return {
        "name": method.name,
        "title": method.title,
        "needs_experts": method.needs_experts,
        "options": [vars(option) for option in settings_of(method.Settings)],
    }


def _show_all(described: list[dict[str, Any]]) -> None:
    table = Table("method", "what it is", "models", "options", box=None, header_style="bold", pad_edge=False)
    for method in described:
        models = "with experts" if method["needs_experts"] else "any"
        table.add_row(method["name"], method["title"], models, ", ".join(option["key"] for option in method["options"]))
    show(table)


def _show_one(described: dict[str, Any]) -> None:
    table = Table("option", "accepts", "default", "meaning", box=None, header_style="bold", pad_edge=False)
    for option in described["options"]:
        table.add_row(f"method.{option['key']}", option["accepts"], option["default"], option["help"])
    show(f"{described['name']}: {described['title']}", table)
