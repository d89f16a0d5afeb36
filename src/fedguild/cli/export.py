"""`fedguild export`: a model that plain transformers and peft load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import fedguild
from fedguild.cli.options import RunFolderArgument
from fedguild.cli.output import note
from fedguild.core.errors import ConfigError

EXAMPLES = (
    "fedguild export runs/fedit-tiny-tasks --output adapter",
    "fedguild export runs/fedit-tiny-tasks --budget b1 --output adapter --format per-expert",
    "fedguild export runs/flame-tiny-tasks --budget b4 --output model --format merged",
    "fedguild export runs/fdlora-tiny-tasks --client client-000 --output mine",
    "fedguild export union/client-000/work/models/latest --output served --format merged",
)


def command(
    folder: RunFolderArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.", show_default=False)],
    budget: Annotated[
        str,
        typer.Option(
            "--budget", help="Export the global model for this budget; the largest by default.", show_default=False
        ),
    ] = "",
    client: Annotated[
        str,
        typer.Option(
            "--client", help="Export a client's own model instead, for example client-000.", show_default=False
        ),
    ] = "",
    format: Annotated[
        Literal["peft", "per-expert", "merged", "code", "gguf"],
        typer.Option(
            "--format",
            help="peft: an adapter for peft and transformers; per-expert: one for vLLM and SGLang; merged: a whole "
            "checkpoint; code: a checkpoint with the method's own modelling code; gguf: one file, by llama.cpp's "
            "converter.",
        ),
    ] = "peft",
    merged: Annotated[bool, typer.Option("--merged", help="The same as --format merged.")] = False,
    round: Annotated[int | None, typer.Option("--round", help="The round to export; the last by default.")] = None,
) -> None:
    """Write a run's model for a budget, or a client's own, in a format that other programs load.

    FOLDER may also be an exported model, such as a site's work/models/latest, which is written in another format.

    A merged checkpoint has the budget's active experts in its config. If an adapter alone cannot represent the model
    (FLAME's output scale, fewer active experts, experts trained in full), the default is merged. If the method changes
    more than weights (UB-SMoE, FedAMoLE, PFL-MoE), it is a checkpoint with its own modelling code.
    """
    if merged and format in ("per-expert", "code", "gguf"):
        raise ConfigError(f"--merged and --format {format} contradict each other.", "Give one of the two.")
    exported = fedguild.export_model(
        folder, output, budget or None, client or None, format="merged" if merged else format, round=round
    )
    if exported.reason:
        note(f"This is {exported.reason}.")
    note(exported.audience)
    typer.echo(exported.folder)
