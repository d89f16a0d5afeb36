"""`fedguild push`: a run's model on the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

import fedguild
from fedguild.cli.options import RunFolderArgument

EXAMPLES = (
    "fedguild push runs/flame-olmoe --to me/flame-olmoe",
    "fedguild push runs/flame-olmoe --to me/flame-olmoe-small --budget b4",
    "fedguild push runs/fedit-olmoe --to me/fedit-olmoe --budget b1 --format per-expert --public",
)


def command(
    folder: RunFolderArgument,
    to: Annotated[str, typer.Option("--to", metavar="USER/NAME", help="The repository.", show_default=False)],
    budget: Annotated[
        str, typer.Option("--budget", help="Push the global model for this budget; the largest by default.")
    ] = "",
    client: Annotated[
        str, typer.Option("--client", help="Push a client's own model instead, for example client-000.")
    ] = "",
    format: Annotated[
        Literal["peft", "per-expert", "merged", "code"],
        typer.Option("--format", help="As in `fedguild export`; merged if the base model is not on the hub."),
    ] = "peft",
    round: Annotated[int | None, typer.Option("--round", help="The round to push; the last by default.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Let everybody read the repository.")] = False,
) -> None:
    """Push a run's model with its card to the Hugging Face hub, into a private repository unless --public is given."""
    typer.echo(
        fedguild.push(
            folder, to, budget=budget or None, client=client or None, format=format, round=round, public=public
        )
    )
