"""`fedguild methods`: the available methods, their origins, and the options of one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedguild.cli.options import JsonOption
from fedguild.cli.output import listing, note, setting_table, show, show_json
from fedguild.cli.presets import methods_with_presets
from fedguild.config.reference import settings_of
from fedguild.core.errors import FedGuildError
from fedguild.methods import METHODS

if TYPE_CHECKING:
    from fedguild.core.plugins import Found
    from fedguild.server.method import Method

EXAMPLES = (
    "fedguild methods",
    "fedguild methods flame",
    "fedguild methods --model olmoe --data dolly",
    "fedguild methods --check",
)


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show the options of this method, or of MODULE:CLASS, which imports it and torch; a list imports "
            "nothing.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="List those that run on a model whose name contains this.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="List those that run on data whose name contains this.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Import every method; fail if one cannot be used.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the methods with the package that each comes from, or the options of one."""
    if name is not None:
        method = METHODS.load(name)
        show_json(_described(method)) if as_json else _show_one(method)
        return
    plugins = list(METHODS.checked() if check else METHODS.found())
    if model or data:
        wanted = methods_with_presets(model, data)
        plugins = [plugin for plugin in plugins if plugin.name in wanted]
    if as_json:
        show_json([{"name": one.name, "title": one.title, "from": one.origin, "fault": one.fault} for one in plugins])
    else:
        show(listing("method", "what it is", ((one.name, _said_of(one)) for one in plugins)))
        note("Those without a package in brackets come with fedguild.")
    if check and any(one.fault for one in plugins):
        raise FedGuildError("; ".join(one.warning for one in plugins if one.fault))


def _described(method: type[Method]) -> dict[str, Any]:
    return {
        "name": method.name,
        "title": method.title,
        "needs_experts": method.facts.needs_experts,
        "options": [vars(option) for option in settings_of(method.Settings)],
    }


def _said_of(plugin: Found) -> str:
    """Returns a method's description without its name; first the package, if that is not FedGuild."""
    if plugin.fault:
        return plugin.warning
    title = plugin.title.partition(": ")[2] or plugin.title
    return title if plugin.origin == "fedguild" else f"({plugin.origin}) {title}"


def _show_one(method: type[Method]) -> None:
    options = [replace(option, key=f"method.{option.key}") for option in settings_of(method.Settings)]
    models = "mixture-of-experts models" if method.facts.needs_experts else "any model"
    show(f"{method.title} (for {models})", *([setting_table("option", options)] if options else []))
