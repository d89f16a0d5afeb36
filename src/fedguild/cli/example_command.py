"""Commands whose help ends with examples to copy."""

from __future__ import annotations

from typing import Any

import typer
from click import NoSuchOption
from typer.core import TyperCommand


class ExampleCommand(TyperCommand):
    """A command whose help prints examples exactly as typed, and which knows that settings have no dashes."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help, then each example unwrapped on its own line."""
        examples, self.epilog = self.epilog, None
        try:
            super().format_help(ctx, formatter)
        finally:
            self.epilog = examples
        if examples:
            typer.echo("Examples:\n" + "".join(f"  {line}\n" for line in examples.splitlines()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the command line; an unknown option with the name of a setting is an error that says so."""
        given = list(args)  # the parser takes its words away
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            hint = _setting_hint(error.option_name, given, [parameter.name for parameter in self.params])
            if not hint:
                raise
            raise NoSuchOption(error.option_name, f"{error.message} {hint}", ctx=ctx) from error


def _setting_hint(option: str, given: list[str], parameters: list[str | None]) -> str:
    """Returns how to give a setting that was given as an option; empty if it is not one, or the command takes none."""
    from fedguild.config import Config
    from fedguild.config.explaining import known_keys

    if not {"overrides", "configs"} & set(parameters):
        return ""
    wanted = option.lstrip("-").replace("-", "_")
    keys = list(known_keys(Config))
    found = [key for key in keys if wanted in (key, key.rsplit(".", 1)[-1])]
    if not found:
        return ""
    place = given.index(option) + 1 if option in given else len(given)
    value = given[place] if place < len(given) and not given[place].startswith("-") else "VALUE"
    return f"A setting is given without dashes: {min(found, key=len)}={value}"
