"""`fedguild premise`: what a model loses with fewer active experts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

import fedguild
from fedguild.cli.options import JsonOption
from fedguild.cli.output import errors, note, show, show_json
from fedguild.runs.terminal import TerminalProgress

if TYPE_CHECKING:
    from fedguild.measuring.scores.premise import Premise

EXAMPLES = (
    "fedguild premise allenai/OLMoE-1B-7B-0924 --text book.txt",
    "fedguild premise english --text a.txt.gz --text b.txt --tokens 20000",
    "fedguild premise models/mine --json < book.txt",
)


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A hub id, a folder, embedded or english.", show_default=False)
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text to measure on, plain or as .gz; may be repeated. Without it standard input is read.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[int, typer.Option("--context", min=2, help="Tokens of a row.")] = 256,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How many tokens to read at most.")] = 8192,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the hub's own model code run.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a mixture of experts loses with fewer active experts, before it is fine-tuned.

    The loss on your text at the model's own top-k, half of it, and so on to one active expert, with and without scaling
    the active experts' weights to sum to one; and how evenly each layer uses its experts. If one active expert loses
    nothing, methods for fewer active experts have nothing to repair on this model.
    """
    given: list[str | Path] = list(text or ())
    if not given and not sys.stdin.isatty():
        given = [sys.stdin.read()]
    with TerminalProgress(errors) as progress:
        found = fedguild.premise(
            model,
            given,
            context=context,
            tokens=tokens,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if as_json:
        show_json(found.record())
        return
    show(_losses(found), "", _uses(found))
    note(found.verdict)


def _losses(found: Premise) -> Table:
    """Returns the table of losses: a row for each number of active experts, the model's own scaling first."""
    scalings = (found.renormalises, not found.renormalises)
    titles = {False: "weights as they are", True: "renormalized to 1"}
    table = Table("active experts", box=None, header_style="bold", pad_edge=False)
    for scaling in scalings:
        table.add_column(f"{titles[scaling]}: nats a token", justify="right")
        table.add_column("lost (95 %)", justify="right")
    for active in dict.fromkeys(level.active_experts for level in found.levels):
        cells = []
        for scaling in scalings:
            level = next(one for one in found.levels if (one.active_experts, one.renormalised) == (active, scaling))
            cells += [f"{level.nats:.3f}", f"{level.lost:+.3f} ± {level.half_width:.3f}"]
        table.add_row(str(active), *cells)
    return table


def _uses(found: Premise) -> Table:
    """Returns the table of the experts' use: a row for each layer, at the model's top-k and at one."""
    numbers = (found.top_k, 1)
    table = Table("layer", box=None, header_style="bold", pad_edge=False)
    for active in numbers:
        table.add_column(f"Gini, k = {active}", justify="right")
        table.add_column(f"idle, k = {active}", justify="right")
    for name in dict.fromkeys(layer.layer for layer in found.layers):
        cells = []
        for active in numbers:
            use = next(one for one in found.layers if (one.layer, one.active_experts) == (name, active))
            cells += [f"{use.gini:.3f}", f"{use.idle:.0%}"]
        table.add_row(name, *cells)
    return table
