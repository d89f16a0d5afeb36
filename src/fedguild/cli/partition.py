"""`fedguild partition`: the clients' shares of the data, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import fedguild
from fedguild.cli.options import ConfigArgument, JsonOption, OverridesArgument, config_and_settings
from fedguild.cli.output import note, show, show_json
from fedguild.core.errors import ConfigError

if TYPE_CHECKING:
    from fedguild.data import ClientData, PartitionTable
    from fedguild.runs.results import Partition

EXAMPLES = (
    "fedguild partition flame/tiny-tasks",
    "fedguild partition flame/tiny-tasks data.partition.alpha=0.1 --plot partition.svg",
)
MOST_LABELS = 10
BAR = " ▁▂▃▄▅▆▇█"


def command(
    config: ConfigArgument = None,
    overrides: OverridesArgument = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the partition to this SVG file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how many examples of each label every client would get, without training."""
    if plot and plot.suffix != ".svg":
        raise ConfigError(f"--plot writes an SVG file, but {plot} does not end in .svg.")
    named, settings = config_and_settings(config, overrides)
    shares = fedguild.partition(named, *settings)
    table, clients, budgets = shares.data.partition_table, shares.data.clients, shares.budgets
    if as_json:
        cut = None if shares.cut is None else asdict(shares.cut)
        show_json({**_as_json(table, clients, budgets), "dropped": dict(shares.dropped), "cut": cut})
    else:
        show(_as_table(table, clients, budgets))
    _tell_lost(shares)
    if plot:
        shares.figures()["partition"].save(plot)
        note(f"Plot: {plot}")


def _tell_lost(shares: Partition) -> None:
    """Reports what the data was recognised as, what was left out of it, and which texts are cut."""
    from fedguild.runs.setup import data_sentences

    for sentence in data_sentences(shares.data.corpus, shares.dropped):
        note(sentence)
    if shares.cut is None:
        note("The tokenizer is not on this machine, so `fedguild run` counts the texts longer than data.max_length.")
    for sentence in shares.cut.sentences() if shares.cut else ():
        note(sentence)


def _as_table(table: PartitionTable, clients: Sequence[ClientData], budgets: Sequence[str]) -> Table:
    """Returns clients × labels; a bar beside each number shows it relative to the largest."""
    names, rows = _most_frequent(table)
    largest = max((count for row in rows for count in row), default=0)
    shown = Table(box=None, header_style="bold", pad_edge=False, title="Examples per client and label")
    shown.add_column("client")
    shown.add_column("budget")
    for name in names:
        shown.add_column(name, justify="right", overflow="fold")
    for part in ("total", "train", "validation", "test"):
        shown.add_column(part, justify="right")
    for index, (row, total, client) in enumerate(zip(rows, table.client_sizes, clients, strict=True)):
        cells = [f"{count or '·'} {BAR[-(-8 * count // max(largest, 1))]}" for count in row]
        parts = [total, len(client.train), len(client.validation), len(client.test)]
        shown.add_row(str(index), budgets[index], *cells, *map(str, parts))
    return shown


def _most_frequent(table: PartitionTable) -> tuple[list[str], list[list[int]]]:
    """Returns the most frequent labels and their counts per client, the rest in one column."""
    names = list(table.labels[:MOST_LABELS])
    rows = [list(row[:MOST_LABELS]) for row in table.counts]
    rest = len(table.labels) - MOST_LABELS
    if rest > 0:
        names.append(f"{rest} more")
        rows = [[*shown, sum(row[MOST_LABELS:])] for shown, row in zip(rows, table.counts, strict=True)]
    return names, rows


def _as_json(table: PartitionTable, clients: Sequence[ClientData], budgets: Sequence[str]) -> dict[str, Any]:
    return {
        "labels": list(table.labels),
        "clients": [
            {
                "client": index,
                "budget": budgets[index],
                "counts": list(row),
                "train": len(client.train),
                "validation": len(client.validation),
                "test": len(client.test),
            }
            for index, (row, client) in enumerate(zip(table.counts, clients, strict=True))
        ],
    }
