"""`fedguild evaluate`: score a run's models again."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from rich.table import Table

import fedguild
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
    """Score a run's models again: the global one as every budget runs it, and those that its config asks for.

    `evaluation.clients` in the run's config asks for every client's own model, `evaluation.trained` and
    `evaluation.received` for its model as trained and as received, `evaluation.pooled` for the latter on all clients'
    examples. If a method has no global model, only the clients' own models are scored.
    """
    from fedguild.report import units

    result = fedguild.evaluate(folder, round=round, split=split)
    if as_json:
        shown: dict[str, Any] = {"folder": str(folder), "split": split, "metric": result.metric}
        shown |= {"scores": dict(result.scores), "mean": result.mean}
        if result.own or result.trained or result.received or result.pooled:
            shown |= {name: dict(getattr(result, name)) for name in ("own", "trained", "received", "pooled")}
            shown |= {"summaries": dict(result.summaries), "deviations": dict(result.deviations)}
        show_json(shown)
        return
    if result.scores:
        table = Table("budget", result.metric, box=None, header_style="bold", pad_edge=False)
        for name, score in result.scores.items():
            table.add_row(name, f"{score:.3f}")
        table.add_row("mean", f"{result.mean:.3f}")
        show(table)
    columns = [
        (title, {**scores, "mean": result.summaries[summary], "deviation": result.deviations.get(summary)})
        for title, scores, summary in (
            ("own model", result.own, "mtal"),
            ("as trained", result.trained, "trained"),
            ("as received", result.received, "received"),
            ("all data", result.pooled, "pooled"),
        )
        if scores
    ]
    if columns:
        titles = [f"{title}, {result.metric}" for title, _ in columns]
        table = Table("client", *titles, box=None, header_style="bold", pad_edge=False)
        for name in columns[0][1]:
            table.add_row(name, *(units.score(scores[name]) for _, scores in columns))
        show(table)
