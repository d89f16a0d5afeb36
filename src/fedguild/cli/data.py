"""`fedguild data`: what a config makes of its data, before any model is loaded."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import fedguild
from fedguild.cli.options import JsonOption, OverridesArgument, config_and_settings, is_setting
from fedguild.cli.output import note, show, show_json
from fedguild.core.errors import ConfigError
from fedguild.federation.site import SITE_FILE

if TYPE_CHECKING:
    from fedguild.data.view import DataView, Piece

EXAMPLES = (
    "fedguild data chats.jsonl",
    "fedguild data chats.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct --html chats.html",
    "fedguild data ours.csv data.options.instruction_column=Frage --examples 1",
    "fedguild data fedguild.yaml data.train_on=last_turn",
    "fedguild data union/client-000",
)
LEARNED, READ = "bold green", "dim"
MOST_LABELS = 10
BAR = 30


def command(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|CONFIG|SITE",
            help="Data (a file, a folder, or a pattern in quotes), a preset or YAML file, or the folder of a "
            "federation's client; by default fedguild.yaml.",
            show_default=False,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Model whose tokenizer and chat template to use, as model.path.", show_default=False
        ),
    ] = None,
    examples: Annotated[int, typer.Option("--examples", "-n", min=0, help="Training texts to show.")] = 3,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how data is read: layout, what is left out or cut, lengths, labels, duplicates and learned tokens.

    Only the tokenizer of the model is loaded. Data without a config is shown as it is, not partitioned.
    """
    if html and html.suffix != ".html":
        raise ConfigError(f"--html writes a page, but {html} does not end in .html.")
    at = model and (os.path.abspath(model) if os.path.exists(model) else model)
    given = [*(overrides or ()), *([f"model.path={at}"] if at else [])]
    is_default = False
    named = None if source is None or is_setting(source) else source
    if named is not None and (site := _site_folder(Path(named))) is not None:
        title, view = named, _view_of_site(site, given, examples)
    elif named is not None and _is_data(named):
        title, is_default = named, not any(setting.startswith("model.path=") for setting in given)
        view = fedguild.inspect_data(None, *given, dataset=named, examples=examples)
    else:
        title, settings = config_and_settings(source, given)
        view = fedguild.inspect_data(title, *settings, examples=examples)
    if as_json:
        show_json({**asdict(view), "histogram": [asdict(bar) for bar in view.histogram()]})
    else:
        show(*_shown(view))
    for sentence in view.sentences():
        note(sentence)
    if not view.lengths:
        note("The tokenizer is not on this machine: no tokens are shown. Name a model with --model.")
    if is_default:
        note("Tokens and chat template are those of the small model that ships: name your own with --model.")
    if html:
        from fedguild.report.html import write_data

        note(f"Page: {write_data(view, html, title)}")


def _site_folder(source: Path) -> Path | None:
    """Returns the folder of a federation's client, given by itself or by its file; None for anything else."""
    folder = source.parent if source.name == SITE_FILE else source
    return folder if (folder / SITE_FILE).is_file() else None


def _view_of_site(folder: Path, settings: list[str], examples: int) -> DataView:
    from fedguild.federation.site import data_config, load_site

    config = data_config(load_site(folder))
    with contextlib.chdir(folder):  # where the site's relative paths begin
        return fedguild.inspect_data(config, *settings, examples=examples)


def _is_data(source: str) -> bool:
    from fedguild.data.corpora.source import is_data, kind_of

    return is_data(source) or kind_of(Path(source)) is not None  # a table that is not there, too, is no config


def _shown(view: DataView) -> list[Any]:
    from fedguild.report.html import data_facts

    facts = Text("   ".join(data_facts(view)))
    texts = [part for text in view.shown for part in (Text(), _coloured(text))]
    key = Text.assemble(*_learned("learned"), "   ", ("read, not learned", READ))
    labels = list(view.labels.items())
    bars = [(f"{bar.first} to {bar.last} tokens", bar.count) for bar in view.histogram()]
    shown = labels[:MOST_LABELS] + [("others", sum(count for _, count in labels[MOST_LABELS:]))] * (
        len(labels) > MOST_LABELS
    )
    tables = [_bars(title, rows) for title, rows in (("length", bars), ("label", shown)) if rows]
    return [facts, *([Text(), key] if texts else []), *texts, *(part for table in tables for part in (Text(), table))]


def _coloured(text: tuple[Piece, ...]) -> Text:
    runs = (("".join(each.text for each in run), kind) for kind, run in groupby(text, key=attrgetter("learned")))
    return Text.assemble(*(part for said, kind in runs for part in (_learned(said) if kind else [(said, READ)])))


def _learned(text: str) -> list[tuple[str, str]]:
    """Returns learned text, in brackets where colours may not be seen."""
    return [(text, LEARNED)] if sys.stdout.isatty() else [("⟦", READ), (text, LEARNED), ("⟧", READ)]


def _bars(title: str, rows: list[tuple[str, int]]) -> Table:
    largest = max(count for _, count in rows)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(title)
    table.add_column("texts", justify="right")
    table.add_column("")
    for name, count in rows:
        table.add_row(name, str(count), "▇" * -(-BAR * count // largest))
    return table
