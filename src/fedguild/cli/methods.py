"""`fedguild methods`: the available methods, their origins, and the options of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedguild.cli.options import JsonOption
from fedguild.cli.output import show, show_json
from fedguild.cli.presets import methods_with_presets
from fedguild.config.reference import settings_of
from fedguild.errors import FedGuildError
from fedguild.methods import METHODS

if TYPE_CHECKING:
    from fedguild.plugins import Found
    from fedguild.server.method import Method

EXAMPLES = (
    "fedguild methods",
    "fedguild methods flame",
    "fedguild methods --model olmoe --data dolly",
    "fedguild methods --check",
)


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show the options of this method.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="List those with a preset on a model whose name contains this.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="List those with a preset on data whose name contains this.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Import every method; exit with 1 if one cannot be used.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the methods with the package that each comes from, or the options of one."""
    if name is not None:
        described = _described(METHODS.load(name))
        show_json(described) if as_json else _show_one(described)
        return
    plugins = list(METHODS.checked() if check else METHODS.found())
    if model or data:
        wanted = methods_with_presets(model, data)
        plugins = [plugin for plugin in plugins if plugin.name in wanted]
    if as_json:
        show_json([{"name": one.name, "title": one.title, "from": one.origin, "fault": one.fault} for one in plugins])
    else:
        _show_all(plugins)
    if check and any(one.fault for one in plugins):
        raise FedGuildError("; ".join(one.warning for one in plugins if one.fault))


def _described(method: type[Method]) -> dict[str, Any]:
    return {
        "name": method.name,
        "title": method.title,
        "needs_experts": method.needs_experts,
        "options": [vars(option) for option in settings_of(method.Settings)],
    }


def _show_all(plugins: list[Found]) -> None:
    table = Table("method", "title", "from", box=None, header_style="bold", pad_edge=False)
    for plugin in plugins:
        table.add_row(plugin.name, plugin.warning if plugin.fault else plugin.title, plugin.origin)
    show(table)


def _show_one(described: dict[str, Any]) -> None:
    table = Table("option", "accepts", "default", "meaning", box=None, header_style="bold", pad_edge=False)
    for option in described["options"]:
        table.add_row(f"method.{option['key']}", option["accepts"], option["default"], option["help"])
    models = "mixture-of-experts models" if described["needs_experts"] else "any model"
    show(f"{described['name']}: {described['title']} (for {models})", table)
