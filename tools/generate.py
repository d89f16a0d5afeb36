"""Generated parts of the documentation: `make docs` writes them, a test sees that they are up to date.

A page marks each of them with `<!-- generated: NAME -->` and `<!-- end -->`. What stands between is read off the
code (options, costs) or, in the index of the methods, off the section "In short" of every method's page.

    python -m tools.generate             # all parts, and the figures of recorded tables
    python -m tools.generate recorded    # the recorded tables and their figures alone
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import torch
import yaml

from fedguild.cli.profile_tables import published_markdown, server_markdown
from fedguild.client.budget import Budget
from fedguild.config import table_cells, tables
from fedguild.config.reference import as_markdown, settings_of
from fedguild.config.schema import Config
from fedguild.config.table import ShippedTable, Table
from fedguild.core.errors import DataError
from fedguild.measuring.costs.memory import memory
from fedguild.measuring.costs.published import compare
from fedguild.measuring.costs.published_claims import CLAIMS
from fedguild.methods import METHODS, build_method
from fedguild.model.backbone import describe_config
from fedguild.model.families import FAMILIES
from fedguild.model.info import ModelInfo
from fedguild.model.known import known_models
from fedguild.model.moe.family import Family
from fedguild.model.targets import fitting_targets
from fedguild.report import table_figures
from fedguild.server.method import is_client_mean
from tools.records.cells import CellRecord, read_choices, read_records
from tools.records.claims import OLDER, VERDICTS, claims_in_short, count_verdicts
from tools.records.pages import chosen_near_chance, table_page
from tools.records.remarks import render_overview, render_remark
from tools.records.summary import summary_grid
from tools.records.tables import Listing, plans
from tools.several_gpus import USABLE, gpus_markdown

ROOT = Path(__file__).parents[1]
METHOD_PAGES = ROOT / "docs" / "methods"
RECORDS = METHOD_PAGES / "records"
FIGURES = METHOD_PAGES / "figures"
"""Where the recorded tables' figures are written, as SVG files."""
REMARK = "remark.txt"
"""In a table's folder of records: what its results mean, a template of Markdown (`tools/records/remarks.py`).

The first paragraph is the answer in short; the method's page has it too."""
OVERVIEW = "overview.txt"
"""In the folder of a method's tables: what they say together, another such template."""
MARKED = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLE_PAGES = METHOD_PAGES / "results"
"""Where every recorded table has a page."""
MAIN = ("flame/table-2", "ub-smoe/table-4", "fedamole/table-1", "fedalign-moe/table-1")
"""The tables of the four papers whose claims the page of results lists."""
MODELS = ("smollm2", "english")
"""The models of these tables, the largest first."""
COUNTED = """## All recorded tables

Verdicts by score, counted over claims and columns. *Not recorded*: a row of the claim has not been run. *No verdict*:
a row's setting was chosen near chance.
"""
MEAN_OF_PERPLEXITIES = f"""{OLDER} The logarithm of the clients' mean perplexity, which a few clients can decide: these
records do not have the mean of the clients' nats.
"""
LEGEND = "[What the columns say](results/index.md).\n"
"""Above the recorded tables on a method's page."""
FACTS = ("Trains", "Sent up", "The client keeps", "The server combines", "Use it when")
"""The list of the section "In short", in this order; the columns of the index."""
GPU_GIB = (12, 16, 24, 48, 80, 141)
"""Memory of the GPUs in the table of known models."""
TOKENS_OF_STEP = 1024
STOPPED = "ended the run"
BEFORE_ATTACKS: Mapping[str, Mapping[str, str]] = {
    "TRAIN": {
        "metadata of null": STOPPED,
        "a shape of 2^126 zeros": STOPPED,
        "a header of lists": f"{STOPPED} (a deeply nested header)",
        "steps without end": STOPPED,
        "10^300 tokens": STOPPED,
        "a frequency of another shape": STOPPED,
        "values of 1e30": "aggregated and saved; the next round's honest clients were rejected",
        "values of -3e38": f"{STOPPED} in the SVD of FLoRIST and FlexLoRA",
        "a failure with escapes": "reached the terminal raw",
    },
    "HELLO": {
        "a budget that is a list": STOPPED,
        "sizes of 10^400": STOPPED,
        "sizes of 10^15": "the aggregate became its upload",
    },
    "SCORE": {
        "another client's name": "recorded",
        "another round": "recorded",
        "the scope of the global model": "recorded",
        "1e308": "recorded",
        "not a number": STOPPED,
        "records that are no list": STOPPED,
    },
}
"""The table of attacks -> the attack -> what 0.1.0 did, where it was tried (on 6e474f1, 2026-11-22)."""


def outdated(parts: Collection[str] = ()) -> dict[Path, str]:
    """Returns file -> its text as it should be, for every page with a generated part, and every figure, not up to date.

    Args:
        parts: The parts to look at, with `recorded` the figures too; all if empty.

    Raises:
        DataError: a record cannot be read, or a table's remark names something that its records do not have.
        ValueError: a page marks a part that nothing generates, or a method's page lacks a line of "In short".
    """
    _records.cache_clear()
    _recorded_tables.cache_clear()
    pages = sorted((ROOT / "docs").rglob("*.md"))
    texts = {page: page.read_text("utf-8") for page in pages}
    pages_to_write = {page: new for page, old in texts.items() if (new := _generated(page, old, parts)) != old}
    if parts and "recorded" not in parts:
        return pages_to_write
    drawn = {path: draw() for path, (told, draw) in _figures().items() if not _says(path, told)}
    written = {path: new for path, new in table_pages().items() if texts.get(path) != new}
    return pages_to_write | drawn | written


@cache
def _records(folder: Path) -> list[CellRecord]:
    """Returns the records of a folder, read once for all pages."""
    return read_records(folder)


def strays() -> list[Path]:
    """Returns the files of figures and of tables' pages that no recorded table has."""
    recorded = {TABLE_PAGES / _page_name(name) for name in _recorded_tables(RECORDS)}
    pages = set(TABLE_PAGES.glob("*.md")) - {TABLE_PAGES / "index.md"} - recorded
    return sorted(set(FIGURES.glob("*.svg")) - _figures().keys() | pages)


def _figures() -> dict[Path, tuple[str, Callable[[], str]]]:
    """Returns the file of every recorded figure -> its description, and what draws it."""
    records, found = _records(RECORDS), dict[Path, tuple[str, Callable[[], str]]]()
    for shipped in tables():
        table = shipped.load()
        drawn = table_figures.drawings(table, [one.drawn for one in records if one.table == shipped.name])
        for end, drawing in drawn.items():
            path = _figure_path(shipped, end)
            found[path] = (
                table_figures.description(drawing),
                partial(_svg_file, path.stem, drawing),
            )
    return found


def _svg_file(name: str, drawing: table_figures.Drawing) -> str:
    """Returns a figure as the text of an SVG file with the size of an image."""
    text = f"{table_figures.svg(name, drawing)}\n"
    sides = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert sides is not None
    width, height = (float(side) * 96 / 72 for side in sides.groups())
    return text.replace("<svg", f'<svg width="{width:.0f}" height="{height:.0f}"', 1)


def _figure_path(shipped: ShippedTable, end: str) -> Path:
    return FIGURES / f"{'-'.join([*shipped.name.split('/'), *([end] if end else [])])}.svg"


def _says(path: Path, told: str) -> bool:
    """Whether a figure's file exists and has this description, which has all its numbers.

    The drawing itself is not compared: it differs between versions of Matplotlib.
    """
    return path.is_file() and f'aria-label="{html.escape(told, quote=True)}"' in path.read_text("utf-8")


def _generated(page: Path, text: str, parts: Collection[str] = ()) -> str:
    def part(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in PARTS:
            raise ValueError(f"{page} marks '{name}', but known are {', '.join(PARTS)}.")
        return match[0] if parts and name not in parts else f"{match[1]}{PARTS[name](page)}{match[3]}"

    return MARKED.sub(part, text)


def _options(page: Path) -> str:
    """Returns the options of the method that a page is about."""
    return as_markdown(settings_of(METHODS.load(page.stem).Settings))


def _settings(page: Path) -> str:
    """Returns every setting of a config."""
    return as_markdown(settings_of(Config))


def _server_costs(page: Path) -> str:
    """Returns the order of every method's server work."""
    return server_markdown({name: METHODS.load(name).facts.costs for name in METHODS})


def _published(page: Path) -> str:
    """Returns the papers' figures beside ours."""
    return published_markdown([compare(claim, build_method) for claim in CLAIMS])


def table_pages() -> dict[Path, str]:
    """Returns the file of every recorded table's page -> its text."""
    pages = {}
    for name, (content, of_table) in _recorded_tables(RECORDS).items():
        (shipped,) = (one for one in tables() if one.name == name)
        drawn = table_figures.drawings(content, [record.drawn for record in of_table])
        figures = {f"../{FIGURES.name}/{_figure_path(shipped, end).name}": one for end, one in drawn.items()}
        remark = re.sub(r"\]\((?![a-z]+:|#)", "](../", _remark(name))
        choices = read_choices(RECORDS, name)
        text = table_page(name, shipped.description, content, of_table, choices, figures, remark)
        pages[TABLE_PAGES / _page_name(name)] = text
    return pages


def _page_name(table: str) -> str:
    return f"{table.replace('/', '-')}.md"


def _results(page: Path) -> str:
    """Returns the claims of the four papers' main tables with their verdicts, and how many each table has."""
    every = _recorded_tables(RECORDS)
    parts = []
    for model in MODELS:
        lines = [["table", "claim", "by score", "by nats per token", "costs"]]
        for name in [f"{table}-{model}" for table in MAIN]:
            if name in every:
                title = f"[{name.removesuffix(f'-{model}')}](results/{_page_name(name)})"
                lines += [[title, *said] for said in claims_in_short(*every[name], _near_chance(name))]
        parts.append(f"### On {model}\n\n{_as_markdown(lines)}")
        if any(OLDER in cell for line in lines for cell in line):
            parts.append(MEAN_OF_PERPLEXITIES)
    rest = [["table", *VERDICTS]]
    for shipped in _in_the_plans_order(tables()):
        if shipped.name in every:
            counts = count_verdicts(*every[shipped.name], _near_chance(shipped.name))
            rest.append([f"[{shipped.name}](results/{_page_name(shipped.name)})", *map(str, counts.values())])
    return "\n".join([*parts, COUNTED, _as_markdown(rest)])


def _to_run(page: Path) -> str:
    """Returns what is left to run of the planned tables, with the hours of one core that it should take."""
    every = plans()
    counts = Listing(every)
    lines = [["table", "cells to run", "of", "hours of one core"]]
    for plan in every:
        left = counts.left(plan)
        if left.missing or left.choices:
            hours = "unknown" if left.hours is None else f"{left.hours:.1f}"
            lines.append([f"`{plan.name}`", str(left.missing), str(left.cells), hours])
    return _as_markdown(lines)


def _near_chance(table: str) -> Collection[str]:
    """Returns a table's rows whose setting was chosen near chance: they carry no verdict."""
    return chosen_near_chance(read_choices(RECORDS, table))


def _as_markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _recorded(page: Path) -> str:
    """Returns what the recorded tables say of the method that a page is about, in short; their pages have the rest."""
    every = _recorded_tables(RECORDS)
    parts, others = [], []
    for shipped in _in_the_plans_order(tables()):
        if shipped.name not in every:
            continue
        content, of_table = every[shipped.name]
        link = f"results/{_page_name(shipped.name)}"
        if shipped.name.startswith(f"{page.stem}/"):
            answer = _remark(shipped.name).partition("\n\n")[0]
            scores = summary_grid(content, of_table)
            parts += [
                f"### {shipped.name}\n",
                f"{shipped.description} [The whole table]({link}).\n",
                *([f"{answer}\n"] if answer else []),
                *([scores.to_markdown()] if scores else []),
            ]
        elif rows := [row for row, method in _methods_of_rows(shipped).items() if method == page.stem]:
            others.append(f"- [{shipped.name}]({link}): {', '.join(f'`{row}`' for row in rows)}")
    if others:
        parts.append("\n".join(["Rows in other tables:\n", *others, ""]))
    if not parts:
        return "No table with this method has been recorded yet: `make tables`.\n"
    if unrun := [name for name in _plan(RECORDS) if name.startswith(f"{page.stem}/") and name not in every]:
        parts.append(f"Planned, not run yet: {', '.join(f'`{name}`' for name in unrun)}.\n")
    return "\n".join([LEGEND, *parts])


def _in_the_plans_order(shipped: Iterable[ShippedTable]) -> list[ShippedTable]:
    """Returns tables as plan.yaml has them, which begins with the main ones; others by name behind them."""
    place = {name: number for number, name in enumerate(_plan(RECORDS))}
    return sorted(shipped, key=lambda one: (place.get(one.name, len(place)), one.name))


@cache
def _plan(records: Path) -> list[str]:
    """Returns the names of the tables of plan.yaml, in its order."""
    path = records / "plan.yaml"
    return [*yaml.safe_load(path.read_text("utf-8"))] if path.is_file() else []


@cache
def _recorded_tables(records: Path) -> dict[str, tuple[Table, Sequence[CellRecord]]]:
    """Returns name -> every shipped table of which there are records, with these."""
    found: dict[str, list[CellRecord]] = {}
    for record in _records(records):
        found.setdefault(record.table, []).append(record)
    return {one.name: (one.load(), found[one.name]) for one in tables() if one.name in found}


def _remark(name: str) -> str:
    """Returns the remark on a recorded table, with its figures; empty without one.

    Raises:
        DataError: the remark names something that the records do not have.
    """
    written = RECORDS / name / REMARK
    return render_remark(written.read_text("utf-8"), name, _recorded_tables(RECORDS)) if written.is_file() else ""


@cache
def _methods_of_rows(shipped: ShippedTable) -> dict[str, str]:
    """Returns row -> the name of its method."""
    content = shipped.load()
    cells = table_cells(shipped.name, content, columns=[next(iter(content.columns))])
    return {cell.row: cell.config().method.name for cell in cells}


def _index(page: Path) -> str:
    """Returns the table of all methods with the facts of their pages."""
    head = f"| method | {' | '.join(fact[0].lower() + fact[1:] for fact in FACTS)} |"
    rows = [f"| [{_short_title(name)}]({name}.md) | {' | '.join(in_short(name).values())} |" for name in METHODS]
    return "\n".join([head, "| --- " * (len(FACTS) + 1) + "|", *rows, ""])


def _short_title(name: str) -> str:
    titles: Mapping[str, str] = {plugin.name: plugin.title for plugin in METHODS.found()}
    return titles[name].partition(":")[0]


def in_short(name: str) -> dict[str, str]:
    """Returns the facts of the section "In short" of a method's page.

    Raises:
        ValueError: the page or a fact is missing.
    """
    page = METHOD_PAGES / f"{name}.md"
    if not page.is_file():
        raise ValueError(f"{page.relative_to(ROOT)} is missing: write it with the sections of fedprox.md.")
    listed = dict(re.findall(r"^- \*\*(.+?):\*\* (.+(?:\n  .+)*)", page.read_text("utf-8"), re.MULTILINE))
    if missing := [fact for fact in FACTS if fact not in listed]:
        raise ValueError(f"{page.relative_to(ROOT)}, section In short, lacks '- **{missing[0]}:** …'.")
    return {fact: " ".join(listed[fact].split()) for fact in FACTS}


def _private(page: Path) -> str:
    """Returns what every method says about differential privacy, with its default options."""
    rows = []
    for name in METHODS:
        kind = METHODS.load(name)
        method = kind(kind.Settings())
        client, example = (method.privacy_refusal(unit) for unit in ("client", "example"))
        is_mean = not client and is_client_mean(method, describe_config("embedded"), [Budget("all", 8, 4)])
        central = client or ("" if is_mean else "(central) its aggregate is no mean")
        marks = ["no" if reason else "yes" for reason in (client, central, example)]
        why = "; ".join(dict.fromkeys(reason for reason in (client, central, example) if reason))
        rows.append(f"| [`{name}`](../methods/{name}.md) | {' | '.join(marks)} | {why} |")
    head = ["| method | client, local | client, central | example | why not |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *rows, ""])


def _secure(page: Path) -> str:
    """Returns which methods declare the sums that secure aggregation takes, and why the others do not."""
    rows = []
    for name in METHODS:
        kind = METHODS.load(name)
        mark = "no" if kind.facts.not_linear else "yes"
        rows.append(f"| [`{name}`](../methods/{name}.md) | {mark} | {kind.facts.not_linear} |")
    head = ["| method | aggregates securely | why not |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, ""])


def _decisions(page: Path) -> str:
    """Returns every decision with the date of its page, the newest first."""
    rows = []
    for path in sorted(page.parent.glob("[0-9]*.md"), reverse=True):
        text = path.read_text("utf-8")
        title = re.sub(r" \(\d{4}-\d\d-\d\d\)$", "", text.partition("\n")[0].removeprefix("# ")).partition(": ")
        date = re.search(r"\d{4}-\d\d-\d\d", text)
        rows.append(f"| [{title[0]}]({path.name}) | {title[2][0].upper()}{title[2][1:]} | {date[0] if date else ''} |")
    return "\n".join(["| number | decision | date |", "| --- | --- | --- |", *rows, ""])


def _families(page: Path) -> str:
    """Returns the families of mixture-of-experts models whose routers and experts can be adapted, with their exports.

    Those are the forms that tests/export/test_every_family.py and test_switch.py load back.
    """
    with _tests_importable():
        stacked = import_module("tests.families").STACKED
    rows = [["model_type", "family", "weights of the active experts", "exports", "transformers"]]
    for one in FAMILIES.found():
        family = FAMILIES.load(one.name)
        exports = "merged, adapter" if one.name in {*stacked, "switch_transformers"} else "merged, adapter, by expert"
        rows.append([f"`{one.name}`", one.title, _told(family), exports, family.since])
    return _as_markdown(rows)


@contextmanager
def _tests_importable() -> Iterator[None]:
    sys.path.insert(0, str(ROOT))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT))


def _told(family: Family) -> str:
    """Returns a family's rule in words."""
    routing = family.routing
    words = [routing.get("score", "softmax")]
    if renormalised := routing.get("renormalise"):
        words.append("made to sum to one" if renormalised is True else "made to sum to one or not, by the config")
    if "groups" in routing:
        words.append("chosen by groups, with a bias")
    elif family.bias:
        words.append("chosen with a bias")
    return ", ".join(words)


def _memory_of_models(page: Path) -> str:
    """Returns the estimated memory of a training step for every known model, and the smallest GPU that has it."""
    of_attention, of_all = (f"{trained}: 16 bit" for trained in ("attention", "and experts or MLPs"))
    titles = ["model", "family", of_attention, "GPU", "4 bit", of_all, "GPU", "4 bit"]
    rows = [titles, ["---", "---", *["---:"] * 6]]
    for known in known_models():
        model, cells = describe_config(known.name), []
        packable = model.family not in ("gpt_oss", "switch_transformers")  # published in MXFP4; experts one by one
        mixing = fitting_targets(model, ("attention",))
        for targets in (mixing, (*mixing, "experts") if model.moe else (*mixing, "mlp")):
            plan = build_method("fedit", {"rank": 8, "targets": targets}).plan(model, _budget(model))
            wide, narrow = (
                memory(model, plan, TOKENS_OF_STEP, dtype=torch.bfloat16, checkpointing=True, four_bit=four_bit)
                for four_bit in (False, True)
            )
            size = wide.total_bytes / 2**30
            fitting = next((f"{each} GiB" for each in GPU_GIB if size <= USABLE * each), "several")
            packed = f"{narrow.total_bytes / 2**30:,.1f} GiB" if packable else "–"
            cells += [f"{size:,.1f} GiB", fitting, packed]
        rows.append([known.hub_id, f"`{model.family}`", *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _several_gpus(page: Path) -> str:
    """Returns the fewest GPUs for models that one does not hold, or hardly."""
    models = [describe_config(name) for name in ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3")]
    trained = (("attention",), ("attention", "experts"))
    plans = [
        (
            " and ".join(targets),
            [build_method("fedit", {"rank": 8, "targets": targets}).plan(model, _budget(model)) for model in models],
        )
        for targets in trained
    ]
    return gpus_markdown(models, plans, 1024, GPU_GIB[2:])


def _budget(model: ModelInfo) -> Budget:
    return Budget("all", model.top_k, 8)


def _attacks(page: Path) -> str:
    """Returns the hostile answers of tests/trust/attacks.py as tables.

    Raises:
        ValueError: `BEFORE_ATTACKS` names an attack that is not among them.
    """
    with _tests_importable():
        from tests.trust import attacks
    tables: dict[str, Mapping[str, str]] = {
        "TRAIN": {name: f"rejected: “… {reason} …”" for name, (_, reason) in attacks.TRAIN.items()},
        "HELLO": dict.fromkeys(attacks.HELLO, "it does not take part"),
        "SCORE": dict.fromkeys(attacks.SCORE, "no score of it is recorded"),
    }
    for table, told in BEFORE_ATTACKS.items():
        if unknown := sorted(told.keys() - tables[table].keys()):
            raise ValueError(
                f"tools/generate.py tells of '{unknown[0]}', but tests/trust/attacks.py has no such attack."
            )
    titles = {
        "TRAIN": ("The answer to a round", "test_attacks_on_a_round"),
        "HELLO": ("The answer to the question who a client is", "test_attacks_on_the_question_who_a_client_is"),
        "SCORE": ("The answer to the request for scores", "test_attacks_on_the_scores"),
    }
    parts: list[str] = []
    for table, (title, test) in titles.items():
        parts += [f"### {title}", "", f"`tests/trust/test_attacks.py::{test}`", ""]
        parts += [*_attack_rows(tables[table].items(), BEFORE_ATTACKS[table]), ""]
    return "\n".join(parts)


def _attack_rows(attacks: Iterable[tuple[str, str]], before: Mapping[str, str]) -> list[str]:
    """Returns the lines of a table."""
    rows = [f"| {_cell(name)} | {_cell(before.get(name, ''))} | {_cell(now)} |" for name, now in attacks]
    return ["| attack | 0.1.0 | now |", "| --- | --- | --- |", *rows]


def _overview(page: Path) -> str:
    """Returns what the recorded tables say of a method together, from a template beside its tables' records.

    Raises:
        DataError: it names something that the records do not have.
    """
    written = RECORDS / page.stem / OVERVIEW
    if not written.is_file():
        raise ValueError(f"{page} marks 'overview', but {written.relative_to(ROOT)} is missing.")
    text = written.read_text("utf-8")
    return f"{render_overview(text, page.stem, _recorded_tables(RECORDS))}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


PARTS: dict[str, Callable[[Path], str]] = {
    "options": _options,
    "settings": _settings,
    "server-costs": _server_costs,
    "published": _published,
    "recorded": _recorded,
    "results": _results,
    "overview": _overview,
    "to-run": _to_run,
    "index": _index,
    "private-methods": _private,
    "secure-methods": _secure,
    "decisions": _decisions,
    "families": _families,
    "memory-of-models": _memory_of_models,
    "several-gpus": _several_gpus,
    "attacks": _attacks,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes what is not up to date and says what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parts = parser.parse_args(arguments).parts
    if unknown := sorted(set(parts) - PARTS.keys()):
        parser.error(f"there is no part '{unknown[0]}'; known are {', '.join(PARTS)}")
    try:
        pages = outdated(parts)
    except (DataError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in strays():
        path.unlink()
        print(f"removed {path.relative_to(ROOT)}")
    for page, text in pages.items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, "utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
