"""`fedguild generate`: talk to a run's model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from fedguild.cli.options import RunFolderArgument
from fedguild.cli.output import note

EXAMPLES = (
    'fedguild generate runs/flame-tiny-tasks --budget b4 "Compute the sum of 3 and 4."',
    "fedguild generate runs/fedamole-tiny-tasks --client client-000",
    "fedguild generate runs/flame-tiny-tasks < prompts.txt",
)


def command(
    folder: RunFolderArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; without one they are read line by line.")
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", help="Budget whose active experts the global model runs; the largest by default.")
    ] = "",
    client: Annotated[str, typer.Option("--client", help="A client's own model instead, for example client-000.")] = "",
    round: Annotated[int | None, typer.Option("--round", help="The round to take; the last by default.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: the likeliest token; above: sampling.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt as it is, without the template that the run trained with.")
    ] = False,
) -> None:
    """Print what a run's model answers, as it is generated.

    Without a PROMPT, every line of standard input is a prompt, until its end (Ctrl-D).
    """
    from fedguild.runs.api.generating import open_generator

    note(f"Loading the model of {folder}")
    generator = open_generator(folder, budget or None, client or None, round)
    for text in [prompt] if prompt is not None else _lines():
        _print(generator.stream(text, max_new_tokens, temperature=temperature, seed=seed, raw=raw))


def _lines() -> Iterator[str]:
    """Yields the lines of standard input; on a terminal after a prompt."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _print(pieces: Iterable[str]) -> None:
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
