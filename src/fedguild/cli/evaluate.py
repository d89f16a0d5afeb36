"""`fedguild evaluate`: score a run's model again."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.table import Table

from fedguild.cli.options import JsonOption, RunFolderArgument
from fedguild.cli.output import show, show_json

EXAMPLES = ("fedguild evaluate runs/flame-tiny-tasks --split validation",)


def command(
    folder: RunFolderArgument,
    round: Annotated[int | None, typer.Option("--round", help="The round to score; the last by default.")] = None,
    split: Annotated[
        Literal["test", "validation"], typer.Option("--split", help="Which held-out examples to score.")
    ] = "test",
    as_json: JsonOption = False,
) -> None:
    """Score the global model of a run, as every budget runs it."""
    from fedguild import experiment

    result = experiment.evaluate(folder, round=round, split=split)
    if as_json:
        show_json({"folder": str(folder), "split": split, "scores": dict(result.scores), "mean": result.mean})
        return
    table = Table("budget", "score", box=None, header_style="bold", pad_edge=False)
    for name, score in result.scores.items():
        table.add_row(name, f"{score:.3f}")
    table.add_row("mean", f"{result.mean:.3f}")
    show(table)
