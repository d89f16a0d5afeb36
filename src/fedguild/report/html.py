"""One self-contained HTML page for a run, one for a comparison, one for a folder of runs: no network, no script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedguild import __version__
from fedguild.core.errors import CheckpointError
from fedguild.core.files import write_text
from fedguild.data.view import DataView
from fedguild.measuring.log.folder import Run, load_run
from fedguild.measuring.log.index import (
    COMPARISON_FILE,
    REPORT_FILE,
    SWEEP_FILE,
    RunSummary,
    find_pages,
    find_runs,
)
from fedguild.measuring.log.records import PartitionRecord
from fedguild.report import comparison_figures, figures, units
from fedguild.report.comparison import ComparisonTable, compare
from fedguild.report.costs import Cost, budget_costs, client_totals, phase_seconds
from fedguild.report.differing import differing_grid, flat
from fedguild.report.grid import Grid, counts_grid, curves_grid
from fedguild.report.observation_figures import MOST_NAMED, observation_figure
from fedguild.report.observations import Series, observation_grid, observed, stability_grids
from fedguild.report.style import FULL_WIDTH, Svg, following, wide_and_narrow
from fedguild.report.summary import budget_title, comparison_summary, run_summary
from fedguild.report.sweep import SweepTable
from fedguild.report.tables import RunTable, privacy_grid, routing_grid, run_table, task_grid, training_grid

INDEX_FILE = "index.html"
_MOST_OBSERVATIONS_SHOWN = 4
"""Number of a method's figures that are shown; the others are collapsed."""


def write_report(run_folder: Path) -> Path:
    """Writes `report.html` into a run folder and returns its path.

    Raises:
        CheckpointError: the folder is not that of a run, or damaged, or has no score yet.
        FedGuildError: the page cannot be written.
    """
    return _write(run_folder / REPORT_FILE, "run.html.j2", _run_page(load_run(run_folder), wide_and_narrow))


def write_comparison(
    runs: Mapping[str, Sequence[Path]],
    output: Path,
    *,
    reference: str | None = None,
    title: str | None = None,
    drawn: Mapping[str, Callable[[float], Svg]] = MappingProxyType({}),
) -> Path:
    """Writes `comparison.html` into a folder and returns its path.

    Args:
        runs: Label -> run folders of the method, one per seed.
        output: The folder that receives the page.
        reference: Label of the method that the others are compared with; by default the last.
        title: The page's title; by default the labels.
        drawn: Figures of the table to which the comparison belongs as a column: caption -> function of a width in
            inches.

    Raises:
        ConfigError: the runs cannot be compared, or the reference is unknown.
        CheckpointError: a folder is not that of a run, or damaged, or has no score yet.
        FedGuildError: the page cannot be written.
    """
    loaded = {label: [load_run(folder) for folder in folders] for label, folders in runs.items()}
    table = compare(loaded, reference)
    page = _comparison_page(table, loaded) | {
        "drawn": [(caption, wide_and_narrow(draw)) for caption, draw in drawn.items()]
    }
    return _write(output / COMPARISON_FILE, "comparison.html.j2", {**page, "title": title or page["title"]})


def write_sweep(table: SweepTable, runs: Mapping[str, Sequence[Path]], folder: Path, title: str) -> Path:
    """Writes `sweep.html` into a folder and returns its path.

    Args:
        runs: Label -> the setting's finished runs, one per seed; some may have none.

    Raises:
        CheckpointError: a folder is not that of a run, or damaged.
        FedGuildError: the page cannot be written.
    """
    first = load_run(next(member for members in runs.values() for member in members))
    page = {
        "title": title,
        "facts": [*(fact for fact in _facts(first) if not fact.startswith("seed")), *_seed_facts(table.seeds)],
        "summary": table.sentences(),
        "warnings": table.warnings,
        "grid": table.grid(),
        "drawn": wide_and_narrow(table.figure) if len(table.keys) <= 2 else None,
        "one_key": len(table.keys) == 1,
        "split": table.split,
        "rejections": [],
        "configs": [("Config of the first run", _yaml(first.config))],
        "environment": list(flat(first.environment)),
    }
    return _write(folder / SWEEP_FILE, "sweep.html.j2", page)


def _seed_facts(seeds: Sequence[int]) -> list[str]:
    return [f"{units.count_of(len(seeds), 'seed')} ({', '.join(map(str, seeds))})"]


def write_index(folder: Path) -> Path:
    """Writes `index.html` into a folder of runs, a line for each with a link to its report, and returns its path.

    The page filters by method, data, model and status without a script, and links comparisons and sweeps of the runs.

    Raises:
        CheckpointError: there is no run below the folder.
        FedGuildError: the page cannot be written.
    """
    found = [RunSummary(each) for each in find_runs(folder)]
    if not found:
        raise CheckpointError(
            f"There is no run in {folder}, nor below it.",
            "Give the folder that `fedguild run` wrote, or one with such folders in it, for example runs.",
        )
    return _write(folder / INDEX_FILE, "index.html.j2", _index_page(folder, found))


def write_data(view: DataView, path: Path, title: str) -> Path:
    """Writes the page of a data set's view, and returns its path."""
    labels = list(view.labels.items())
    bars = (
        ("Lengths", [(f"{bar.first} to {bar.last} tokens", bar.count) for bar in view.histogram()]),
        ("Labels", labels),
    )
    return _write(
        path,
        "data.html.j2",
        {
            "title": Path(title).name,
            "facts": data_facts(view),
            "sentences": view.sentences(),
            "texts": view.shown,
            "bars": [
                (heading, [(name, count, 100 * count / max(one for _, one in rows)) for name, count in rows])
                for heading, rows in bars
                if rows
            ],
        },
    )


def data_facts(view: DataView) -> list[str]:
    """Returns the figures of a data set's view, a phrase each."""
    tokens = sum(view.lengths)
    return [
        *([view.layout] if view.layout else []),
        f"{view.train} training and {view.test} test examples",
        *([f"{tokens} tokens, {view.learned} of them learned"] if tokens else []),
        *([f"{min(view.lengths)} to {max(view.lengths)} tokens a text"] if tokens else []),
        units.count_of(len(view.labels), "label"),
    ]


def run_figures(run: Run) -> dict[str, Svg]:
    page = _run_page(run, _once)
    personal, experts = page["personal"] or {}, page["experts"] or {}
    drawn = {
        "scores": page["curves"],
        "client means": personal.get("curves"),
        "clients": personal.get("dots"),
        "costs": page["costs"],
        "experts": experts.get("mean"),
        "experts by layer": experts.get("layers"),
        "partition": page["partition"],
    }
    seen = dict(
        zip((series.title for series in observed(run)), page["observations"] + page["more_observations"], strict=True)
    )
    return {
        **{name: svg for name, svg in drawn.items() if svg},
        **{title: observation["svg"] for title, observation in seen.items()},
    }


def run_fragment(run: Run) -> str:
    """Returns a run's facts, tables and scores over the rounds as HTML to place inside a page."""
    page = _run_page(run, _once)
    personal = page["personal"] or {}
    grids = [page["grid"], personal.get("grid")]
    return _fragment(page, grids, [page["curves"] or personal.get("curves")])


def comparison_figures_of(table: ComparisonTable, runs: Mapping[str, Sequence[Run]]) -> dict[str, Svg]:
    return {
        "scores": comparison_figures.score_bars(table),
        "rounds": comparison_figures.curves_by_column(table, runs),
        "costs": comparison_figures.cost_against_score(table, runs),
    }


def comparison_fragment(table: ComparisonTable, title: str = "") -> str:
    """Returns a comparison's summary, tables and scores as HTML to place inside a page."""
    page = {"title": title, "facts": [], "summary": comparison_summary(table)}
    return _fragment(page, table.grids(), [comparison_figures.score_bars(table)])


def _fragment(page: Mapping[str, Any], grids: Sequence[Grid | None], drawn: Sequence[Svg | None]) -> str:
    shown = {"grids": [grid for grid in grids if grid], "figures": [svg for svg in drawn if svg]}
    return _environment().get_template("fragment.html.j2").render(**page, **shown)


def _run_page(run: Run, shown: Shown) -> dict[str, Any]:
    table, totals = run_table(run), client_totals(run)
    curves = {budget_title(row.budget): run.curve("budget", row.budget.name) for row in table.rows}
    costs = budget_costs(run)
    seen = [_observation(series, place, shown) for place, series in enumerate(observed(run))]
    routing = run.last_routing
    phases = phase_seconds(run)
    return {
        "title": run.name,
        "facts": _facts(run),
        "summary": run_summary(table),
        "grid": table.grid().leading(table.heading, "Before") if table.rows else None,
        "curves": shown(lambda width: figures.score_curves(curves, run.split, width=width, metric=run.metric))
        if curves
        else None,
        "curve_values": curves_grid(curves, f"{run.split.capitalize()} {run.metric} by round"),
        "from_the_start": any(record.round == 0 for record in run.evaluations),
        "tasks": task_grid(run),
        "samples": _samples(run),
        "privacy": privacy_grid(run),
        "guarantee": run.guarantee,
        "personal": _personal(run, table, shown),
        "observations": seen[:_MOST_OBSERVATIONS_SHOWN],
        "more_observations": seen[_MOST_OBSERVATIONS_SHOWN:],
        "experts": _expert_figures(run, shown),
        "routing": routing_grid(routing) if routing else None,
        "partition": _partition_figure(run, shown),
        "partition_values": _partition_values(run),
        "costs": figures.cost_bars(costs) if costs else None,
        "cost_bars": _cost_bars(costs),
        "clients": training_grid(totals) if len(totals) else None,
        "phases": [(name, units.duration(spent), spent / sum(phases.values())) for name, spent in phases.items()],
        "rejections": run.rejections(),
        "configs": [("Config", _yaml(run.config))],
        "environment": list(flat(run.environment)),
    }


def _samples(run: Run) -> list[dict[str, Any]]:
    """Returns the sampled examples, each with what every budget answered before training and after the last round."""
    shown: dict[tuple[str, str], dict[str, Any]] = {}
    for one in run.samples:
        example = shown.setdefault(
            (one.prompt, one.reference), {"prompt": one.prompt, "reference": one.reference, "answers": {}}
        )
        before, after = example["answers"].setdefault(one.budget, [None, None])
        example["answers"][one.budget] = [one, after] if one.round == 0 else [before, one]
    return list(shown.values())


def _comparison_page(table: ComparisonTable, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    first = next(iter(runs.values()))[0]
    rejections = [
        (f"{label}, seed {run.seed}, round {round}", client, reason)
        for label, members in runs.items()
        for run in members
        for round, client, reason in run.rejections()
    ]
    return {
        "title": " and ".join(runs) if len(runs) == 2 else ", ".join(runs),
        "facts": [fact for fact in _facts(first, method=False) if not fact.startswith("seed")]
        + _seed_facts(table.seeds),
        "summary": comparison_summary(table),
        "scores": table.score_grid().leading("Mean"),
        "bars": wide_and_narrow(lambda width: comparison_figures.score_bars(table, width)),
        "scatter": wide_and_narrow(lambda width: comparison_figures.cost_against_score(table, runs, width)),
        "rounds": wide_and_narrow(lambda width: comparison_figures.curves_by_column(table, runs, width)),
        "observations": observation_grid(runs),
        "stability": stability_grids(runs),
        "metrics": table.metric_grid(),
        "costs": table.cost_grid().leading("mean"),
        "differing": differing_grid(runs),
        "partition": _partition_figure(first, wide_and_narrow),
        "partition_values": _partition_values(first),
        "round_values": _round_values(table, runs),
        "partition_seed": first.seed,
        "equal_inference": table.equal_inference and bool(table.budgets),
        "with_budgets": bool(table.budgets),
        "reference": table.reference,
        "warnings": table.warnings,
        "rejections": rejections,
        "configs": [(label, _yaml(members[0].config)) for label, members in runs.items()],
        "environment": list(flat(first.environment)),
    }


def _index_page(folder: Path, found: Sequence[RunSummary]) -> dict[str, Any]:
    of: dict[str, Callable[[RunSummary], str]] = {
        "method": lambda run: run.method,
        "data": lambda run: run.data,
        "model": lambda run: run.model,
        "status": lambda run: run.how.status,
    }
    choices = {key: sorted({value(run) for run in found} - {""}) for key, value in of.items()}
    places = {key: {choice: place for place, choice in enumerate(known)} for key, known in choices.items()}
    rows = [
        {
            "name": run.name,
            "place": run.folder.relative_to(folder).as_posix(),
            "link": quote((run.folder / REPORT_FILE).relative_to(folder).as_posix()) if run.has_report else "",
            "places": [(key, places[key].get(value(run), "")) for key, value in of.items()],
            "word": run.how.status,
            "cells": [
                *(units.score(run.score), units.MISSING if run.score is None else run.metric, units.score(run.before)),
                f"{run.round}/{run.planned_rounds or '?'}",
                *(run.method, run.data, run.model),
                units.count(run.number_of_clients) if run.number_of_clients else units.MISSING,
                str(run.seed) if run.config else units.MISSING,
                units.duration(run.seconds),
            ],
            "reason": run.how.reason,
        }
        for run in found
    ]
    headings = ("Run", "Status", "Score", "Metric", "Before", "Rounds", "Method", "Data", "Model", "Clients", "Seed")
    return {
        "title": folder.resolve().name,
        "count": units.count_of(len(found), "run"),
        "words": sorted(Counter(run.how.status for run in found).items()),
        "filters": [{"key": key, "title": key.capitalize(), "choices": known} for key, known in choices.items()],
        "headings": (*headings, "Time"),
        "rows": rows,
        "pages": [
            {"kind": page.kind, "name": page.name, "place": page.place, "link": quote(f"{page.place}/{page.file}")}
            for page in find_pages(folder, [run.folder for run in found])
        ],
    }


def _facts(run: Run, *, method: bool = True) -> list[str]:
    facts = [f"method {run.method}"] if method else []
    facts += [f"model {run.model}"] if run.model else []
    facts += [f"data {run.data}"] if run.data else []
    facts += [run.partition_scheme] if run.partition_scheme else []
    facts += [units.count_of(run.number_of_clients, "client")] if run.number_of_clients else []
    return [*facts, units.count_of(run.last_round, "round"), f"seed {run.seed}"]


def _expert_figures(run: Run, shown: Shown) -> dict[str, Any] | None:
    """Returns the heat maps of the last recorded round, the clients of one budget side by side."""
    routing = run.last_routing
    if routing is None or not routing.clients:
        return None
    budgets = {record.client: record.budget for record in run.clients}
    listed = [str(entry["name"]) for entry in run.setting("federation", "budgets", default=[])]
    ranked = {name: place for place, name in enumerate(listed)}
    places = range(len(routing.clients))
    order = sorted(places, key=lambda i: (ranked.get(budgets.get(routing.clients[i], ""), 0), routing.clients[i]))
    frequency = np.asarray(routing.frequency)[order]
    names = [_client_name(routing.clients[i], budgets) for i in order]
    return {
        "round": routing.round,
        "mean": shown(lambda width: figures.expert_heat_map(frequency, names, width=width)),
        "values": counts_grid(
            frequency.mean(axis=1),
            names,
            list(map(str, range(routing.experts))),
            "Tokens routed to each expert",
            digits=3,
        ),
        "layers": shown(lambda width: figures.expert_heat_maps_by_layer(frequency, width))
        if routing.layers > 1
        else None,
    }


def _personal(run: Run, table: RunTable, shown: Shown) -> dict[str, Any] | None:
    """Returns the clients' scores on their own data: a table, the means over the rounds, a mark per model."""
    grid = table.client_grid()
    if grid is None:
        return None
    curves = {
        "own model": run.client_curve("client"),
        "as trained": run.client_curve("trained"),
        "as received": run.client_curve("received"),
    }
    names = [row.client.removeprefix("client-") for row in table.clients]
    marks = {
        "before training": dict(zip(names, (row.before for row in table.clients), strict=True)),
        "own model": dict(zip(names, (row.own for row in table.clients), strict=True)),
        "as trained": dict(zip(names, (row.trained for row in table.clients), strict=True)),
        "as received": dict(zip(names, (row.received for row in table.clients), strict=True)),
    }
    drawn = {name: scores for name, scores in marks.items() if any(score is not None for score in scores.values())}
    known = {name: curve for name, curve in curves.items() if curve}
    return {
        "grid": grid.leading("Own model", "As trained", "As received"),
        "curves": shown(lambda width: figures.score_curves(known, run.split, "personal", width, run.metric))
        if known
        else None,
        "curve_values": curves_grid(known, f"{run.split.capitalize()} {run.metric} by round, mean over the clients"),
        "dots": shown(lambda width: figures.client_dots(drawn, run.split, width, run.metric)) if drawn else None,
        "both": len(known) > 1,
    }


def _observation(series: Series, place: int, shown: Shown) -> dict[str, Any]:
    """Returns a figure of one of the method's observations, with its caption."""
    of = f", in {series.unit}" if series.unit else ""
    if series.is_over_rounds:
        caption = (
            f"{series.title}{of}, over the rounds: a row for each, a column for each of {len(series.last.columns)}."
        )
    elif series.is_matrix:
        caption = f"{series.title}{of}, after round {series.last.round}: a row for each of {len(series.last.rows)}, "
        caption += f"a column for each of {len(series.last.columns)}."
    else:
        many = len(series.lines()) > MOST_NAMED
        caption = f"{series.title}{of}, over the rounds."
        caption += f" A line for each of {len(series.lines())}; the thick one is their mean." if many else ""
    drawn = shown(lambda width: observation_figure(series, f"observed-{place}", width))
    return {"caption": caption, "svg": drawn, "values": series.grid()}


def _cost_bars(costs: Mapping[str, Cost]) -> list[tuple[str, list[tuple[str, str, float]]]]:
    """Returns the title of each kind of cost, and (budget, printed value, share of the largest), for a narrow page."""
    panels = figures.cost_panels(costs) if costs else []
    return [
        (
            title,
            [
                (name, figures.amount(value, unit), value / (max(values) or 1.0))
                for name, value in zip(costs, values, strict=True)
            ],
        )
        for title, unit, values in panels
    ]


def _shown_partition(run: Run) -> PartitionRecord | None:
    """Returns the partition; None if it is unknown or empty, or if privacy was promised to the clients."""
    partition = run.partition
    return None if run.guarantee or partition is None or not (partition.counts and partition.labels) else partition


def _partition_figure(run: Run, shown: Shown) -> Svg | Markup | None:
    partition = _shown_partition(run)
    if partition is None:
        return None
    labels, counts, clients = partition.labels, np.asarray(partition.counts), _holders(run)
    return shown(lambda width: figures.partition_bubbles(labels, counts, clients, width))


def _partition_values(run: Run) -> Grid | None:
    partition = _shown_partition(run)
    if partition is None:
        return None
    counts = np.asarray(partition.counts)
    return counts_grid(counts, _holders(run), partition.labels, "Examples of each label on each client")


def _holders(run: Run) -> list[str]:
    budgets = {record.client: record.budget for record in run.clients}
    return [_client_name(client, budgets) for client in range(len(run.partition.counts) if run.partition else 0)]


def _round_values(table: ComparisonTable, runs: Mapping[str, Sequence[Run]]) -> Grid | None:
    """Returns round × method and column, mean over the seeds."""
    means = comparison_figures.mean_curves(table, runs)
    curves = {f"{label}, {column}": curve for (label, column), curve in means.items()}
    return curves_grid(curves, f"{table.split.capitalize()} {table.metric} by round, mean over the seeds")


def _client_name(client: int, budgets: Mapping[int, str]) -> str:
    return f"{budgets[client]} · {client}" if client in budgets else str(client)


def _yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=88)


Shown = Callable[[Callable[[float], Svg]], Svg | Markup]
"""Places a figure that can be drawn at any width in inches."""


def _once(draw: Callable[[float], Svg]) -> Svg:
    """Returns a figure drawn for a wide page alone."""
    return draw(FULL_WIDTH)


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("fedguild.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _write(path: Path, template: str, page: Mapping[str, Any]) -> Path:
    text = _environment().get_template(template).render(version=__version__, **page)
    write_text(path, following(text))
    return path
