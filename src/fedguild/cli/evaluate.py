"""`fedguild evaluate`: score a run's model again."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from fedguild.cli.options import JsonOption, RunFolderArgument
from fedguild.cli.output import show, show_json
from fedguild.errors import ConfigError

EXAMPLES = ("fedguild evaluate runs/flame-tiny-tasks --split validation",)


def command(
    folder: RunFolderArgument,
    round: Annotated[int | None, typer.Option("--round", help="The round to score; the last by default.")] = None,
    split: Annotated[str, typer.Option("--split", help="test or validation.")] = "test",
    as_json: JsonOption = False,
) -> None:
    """Score the global model of a run, as every budget runs it."""
    if split not in ("test", "validation"):
        raise ConfigError(f"--split must be 'test' or 'validation', got '{split}'.")

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
