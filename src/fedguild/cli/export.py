"""`fedguild export`: a model that plain transformers and peft load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedguild.cli.options import RunFolderArgument
from fedguild.cli.output import note

EXAMPLES = (
    "fedguild export runs/fedit-tiny-tasks --budget b1 --output adapter",
    "fedguild export runs/flame-tiny-tasks --budget b4 --output model --merged",
    "fedguild export runs/fdlora-tiny-tasks --client client-000 --output mine",
)


def command(
    folder: RunFolderArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.", show_default=False)],
    budget: Annotated[
        str, typer.Option("--budget", help="Export the global model for this budget.", show_default=False)
    ] = "",
    client: Annotated[
        str, typer.Option("--client", help="Export a client's own model, for example client-000.", show_default=False)
    ] = "",
    merged: Annotated[
        bool, typer.Option("--merged", help="Write a whole Hugging Face checkpoint with the adapter merged in.")
    ] = False,
    round: Annotated[int | None, typer.Option("--round", help="The round to export; the last by default.")] = None,
) -> None:
    """Write a run's model for a budget, or a client's own, as a PEFT adapter or merged into a checkpoint.

    A merged checkpoint has the budget's active experts in its config. Where an adapter alone
    cannot carry the model (FLAME's output scale, fewer active experts, experts trained in full), the
    merged form is written. A mixture of LoRA experts depends on its input, so it cannot be exported in either form.
    """
    from fedguild.export import Subject, export_adapter, export_merged

    exported = (export_merged if merged else export_adapter)(folder, Subject(budget, client), output, round)
    if exported.reason:
        note(f"This is {exported.reason}.")
    typer.echo(exported.folder)
