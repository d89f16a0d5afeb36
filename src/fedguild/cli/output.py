"""Output of the command line: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fedguild.config.reference import Setting
    from fedguild.report.grid import Grid

PIPED_WIDTH_COLUMNS = 160
_WIDEST_COLUMNS = 10_000

errors = Console(stderr=True)


def show(*renderables: RenderableType) -> None:
    """Prints to stdout, 160 columns wide if stdout is not a terminal and COLUMNS is not set."""
    console = _console()
    for renderable in renderables:
        console.print(renderable, markup=False, highlight=False)


def show_grids(*grids: Grid) -> None:
    """Prints tables of numbers to stdout: folded into a terminal, elsewhere as wide as they are."""
    for table in (grid.to_rich() for grid in grids):
        widest = Console(width=_WIDEST_COLUMNS).measure(table).maximum
        console = _console() if _on_screen() else Console(width=max(PIPED_WIDTH_COLUMNS, widest))
        console.print(table, markup=False, highlight=False)


def listing(name: str, meaning: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Returns a table of names and their meanings, one line each on a screen.

    Names are never cut, so that they can be copied; on a screen narrower than a name it is folded. On a terminal a
    meaning is cut at the edge with an ellipsis; elsewhere it is printed in full.

    Args:
        name: Title of the names.
        meaning: Title of the meanings.
        rows: Each name and its meaning.
    """
    listed = list(rows)
    longest = max(len(text) for text in (name, *(one for one, _ in listed)))
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(name, width=min(longest, _console().width), overflow="fold")
    table.add_column(meaning)
    for one, text in listed:
        table.add_row(one, Text(text, no_wrap=_on_screen(), overflow="ellipsis"))
    return table


def setting_table(name: str, settings: Iterable[Setting]) -> Table:
    """Returns a table of settings, in which keys are never wrapped; `name` is their title."""
    listed = list(settings)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(name, width=min(max(len(one.key) for one in listed), _console().width), overflow="fold")
    for title in ("accepts", "default", "meaning"):
        table.add_column(title, overflow="fold")
    for one in listed:
        table.add_row(one.key, one.accepts, one.default, one.help)
    return table


def _console() -> Console:
    return Console() if _on_screen() else Console(width=PIPED_WIDTH_COLUMNS)


def _on_screen() -> bool:
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def show_json(value: Any) -> None:
    """Prints a value as JSON to stdout; a number that is infinite or not a number, which JSON lacks, as null."""
    typer.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def explain(message: str, hint: str = "") -> None:
    """Prints a message to stderr, and its hint on a separate line."""
    errors.print(message, style="bold red", markup=False, highlight=False, soft_wrap=True)
    if hint:
        errors.print(hint, markup=False, highlight=False, soft_wrap=True)


def note(message: str) -> None:
    errors.print(message, markup=False, highlight=False, soft_wrap=True)
