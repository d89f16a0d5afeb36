"""Output of the command line: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from rich.console import Console, RenderableType

PIPED_WIDTH_COLUMNS = 160

errors = Console(stderr=True)


def show(*renderables: RenderableType) -> None:
    """Prints to stdout; wide enough for any table where stdout is not a terminal."""
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH_COLUMNS)
    for renderable in renderables:
        console.print(renderable, markup=False, highlight=False)


def show_json(value: Any) -> None:
    """Prints a value to stdout as indented JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def explain(message: str, hint: str = "") -> None:
    """Prints a message to stderr, and its hint on a line of its own."""
    errors.print(message, style="bold red", markup=False, highlight=False, soft_wrap=True)
    if hint:
        errors.print(hint, markup=False, highlight=False, soft_wrap=True)


def note(message: str) -> None:
    """Prints a notice to stderr."""
    errors.print(message, markup=False, highlight=False, soft_wrap=True)
