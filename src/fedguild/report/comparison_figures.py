"""The figures of a comparison: scores per budget, scores against costs, scores over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from fedguild.core.score_names import MEAN, MTAL, POOLED, RECEIVED, TRAINED
from fedguild.measuring.log.folder import ClientScope, Run
from fedguild.report import units
from fedguild.report.comparison import ComparisonTable
from fedguild.report.costs import client_totals
from fedguild.report.style import (
    FULL_WIDTH,
    INK,
    MUTED,
    RULE,
    Svg,
    gridlines,
    key_at,
    method_colours,
    spread_apart,
    styled,
    tilt_if_long,
    to_svg,
    trend_limits,
)

_MOST_METHODS_LABELLED = 4


def score_bars(table: ComparisonTable, width: float = FULL_WIDTH) -> Svg:
    """Returns grouped bars per column, with the seeds' sample deviation and a dot per seed."""
    colours, key = method_colours(len(table.rows)), key_at("bars", width)
    narrow = width < FULL_WIDTH
    thick = 0.8 / len(table.rows)
    with styled(key):
        figure = Figure(figsize=(width, 3.3), layout="constrained")
        axes = figure.subplots()
        for index, (row, colour) in enumerate(zip(table.rows, colours, strict=True)):
            for place, column in enumerate(table.columns):
                spread = row.spread(column)
                if spread is None:
                    continue
                x = place + (index - (len(table.rows) - 1) / 2) * thick
                axes.bar(x, spread.mean, thick * 0.9, color=colour, alpha=0.82, linewidth=0)
                values = list(row.scores[column].values())
                if spread.count > 1:
                    axes.errorbar(x, spread.mean, spread.std, color=INK, linewidth=0.9, capsize=3)
                    axes.scatter([x + 0.28 * thick] * len(values), values, s=9, color="white", edgecolors=INK, lw=0.6)
                if len(table.rows) > _MOST_METHODS_LABELLED or narrow:
                    continue
                above = max(*values, spread.mean + spread.std, spread.mean)
                label = f"{spread.mean:.2f}"
                axes.annotate(label, (x, above), (0, 4), textcoords="offset points", ha="center", size=8, color=INK)
        titles = [_column_title(table, column) for column in table.columns]
        axes.set_xticks(range(len(titles)), [title.partition("\n")[0] if narrow else title for title in titles])
        if narrow:
            tilt_if_long(axes, width)
        axes.set(ylabel=f"{table.split} {table.metric}", ylim=(0, None))
        axes.tick_params(axis="x", length=0)
        gridlines(axes)
        _name_methods(figure, table, width)
        methods = ", ".join(row.label for row in table.rows)
        return to_svg(figure, key, f"Bar chart: {table.split} {table.metric} per budget for {methods}.")


def cost_against_score(table: ComparisonTable, runs: Mapping[str, Sequence[Run]], width: float = FULL_WIDTH) -> Svg:
    """Returns score against training FLOPs and against bytes sent, a point per method and budget.

    Without budgets it is a point per method: the score on the clients' own data against the mean over its clients.

    Args:
        runs: Label -> the method's runs, for each budget's bytes.
        width: In inches; a narrow figure has its panels one below the other.
    """
    key, wide = key_at("scatter", width), width == FULL_WIDTH
    with styled(key):
        figure = Figure(figsize=(width, 3.1 if wide else 5.4), layout="constrained")
        left, right = figure.subplots(*((1, 2) if wide else (2, 1)), sharey=True)
        labels: dict[int, list[_Label]] = {0: [], 1: []}
        heights: list[float] = []
        for index, (row, colour) in enumerate(zip(table.rows, method_colours(len(table.rows)), strict=True)):
            flops, uploads = row.training_flops, _upload_bytes(runs[row.label])
            if not table.budgets and row.cost:
                trained = row.cost.training_flops
                flops, uploads = {} if trained is None else {table.own: trained}, {table.own: row.cost.upload_bytes}
            for panel, (axes, costs) in enumerate(((left, flops), (right, uploads))):
                points = [
                    (costs[column], spread.mean, _column_title(table, column).partition("\n")[0])
                    for column in ([budget.name for budget in table.budgets] or [table.own])
                    if column in costs and (spread := row.spread(column))
                ]
                heights += [y for _, y, _ in points]
                axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=colour, linewidth=0.9, alpha=0.6)
                axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=26, color=colour, zorder=3)
                side: Literal["left", "right"] = "left" if index % 2 else "right"
                labels[panel] += [_Label(x, y, name, colour, side) for x, y, name in points]
        left.set(xlabel="training FLOPs per client", ylabel=f"{table.split} {table.metric}")
        right.set(xlabel="bytes sent per client")
        low, high = trend_limits(heights, (0.0, 1.0))
        for panel, (axes, unit) in enumerate(((left, ""), (right, "B"))):
            axes.xaxis.set_major_formatter(EngFormatter(unit))
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5 if wide else 4))
            if axes.has_data() and axes.dataLim.x1 > 0:  # training FLOPs may be withheld
                axes.set(xlim=(0, 1.1 * axes.dataLim.x1), ylim=(low, high))
                if len(table.rows) <= _MOST_METHODS_LABELLED:
                    _place_labels(axes, labels[panel], 1.1 * axes.dataLim.x1, high - low)
            gridlines(axes, "both")
        _name_methods(figure, table, width)
        return to_svg(figure, key, "Scatter charts: score against training FLOPs and against bytes sent.")


@dataclass(frozen=True)
class _Label:
    """The name of a point, and the side of the point where it is written."""

    x: float
    y: float
    text: str
    colour: str
    side: Literal["left", "right"]


def _place_labels(axes: Axes, labels: Sequence[_Label], across: float, up: float) -> None:
    """Labels points; labels on one side that would overlap are moved apart vertically."""
    for side, offset in (("left", 6), ("right", -6)):
        columns: list[list[_Label]] = []
        for label in sorted((one for one in labels if one.side == side), key=lambda one: one.x):
            if columns and label.x - columns[-1][-1].x < 0.08 * across:
                columns[-1].append(label)
            else:
                columns.append([label])
        for column in columns:
            places = spread_apart([label.y for label in column], gap=0.06 * up)
            for label, place in zip(column, places, strict=True):
                axes.annotate(
                    label.text,
                    (label.x, place),
                    (offset, 0),
                    textcoords="offset points",
                    ha=label.side,
                    va="center",
                    size=8,
                    color=label.colour,
                    annotation_clip=False,
                    bbox={"facecolor": "#ffffff", "edgecolor": "none", "pad": 0.6},
                    zorder=2.5,
                )


def curves_by_column(table: ComparisonTable, runs: Mapping[str, Sequence[Run]], width: float = FULL_WIDTH) -> Svg:
    """Returns the scores over the rounds: mean and sample deviation over the seeds.

    A panel for each budget, and one for each mean over clients. All share one axis, which begins below the lowest
    score.
    """
    columns = [column for column in table.columns if column != MEAN]
    across = min(4 if width == FULL_WIDTH else 2, len(columns))
    down = -(-len(columns) // across)
    key, drawn = key_at("rounds", width), list[float]()
    with styled(key):
        figure = Figure(figsize=(width, 0.4 + 1.9 * down), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for axes in list(grid.flat)[len(columns) :]:
            axes.set_axis_off()
        for axes, column in zip(grid.flat, columns, strict=False):
            for row, colour in zip(table.rows, method_colours(len(table.rows)), strict=True):
                rounds, means, deviations = _mean_curve([_curve(run, column) for run in runs[row.label]])
                low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
                high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
                axes.fill_between(rounds, low, high, color=colour, alpha=0.18, linewidth=0)
                axes.plot(rounds, means, color=colour, linewidth=1.6)
                drawn += [*low, *high]
            axes.set_title(_column_title(table, column).replace("\n", ", "), fontweight="normal", fontsize=8.5)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
            gridlines(axes)
        grid[0][0].set_ylim(*trend_limits(drawn, (0.0, 1.0)))
        figure.supxlabel("round", fontsize=9, color=MUTED)
        grid[0][0].set_ylabel(f"{table.split} {table.metric}")
        _name_methods(figure, table, width)
        return to_svg(figure, key, "Line charts: score over the rounds, mean and deviation over seeds.")


def mean_curves(
    table: ComparisonTable, runs: Mapping[str, Sequence[Run]]
) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Returns (method, column) -> (round, mean score over the seeds)."""
    found = {}
    for row in table.rows:
        for column in (column for column in table.columns if column != MEAN):
            rounds, means, _ = _mean_curve([_curve(run, column) for run in runs[row.label]])
            found[row.label, column] = list(zip(rounds, means, strict=True))
    return found


def _name_methods(figure: Figure, table: ComparisonTable, width: float) -> None:
    keys = [
        Line2D([], [], color=colour, marker="s", linestyle="", markersize=7)
        for colour in method_colours(len(table.rows))
    ]
    labels = [row.label for row in table.rows]
    figure.legend(
        keys,
        labels,
        loc="outside upper left",
        ncols=4 if width == FULL_WIDTH else 1,
        frameon=False,
        edgecolor=RULE,
        handletextpad=0.3,
    )


def _column_title(table: ComparisonTable, column: str) -> str:
    for budget in table.budgets:
        if budget.name == column and budget.active_experts:
            return f"{column}\n{units.count_of(budget.active_experts, 'expert')}"
    titles = {MTAL: "MTAL", TRAINED: "as trained", RECEIVED: "as received", POOLED: "as received, all data"}
    return titles.get(column, column)


def _curve(run: Run, column: str) -> Sequence[tuple[int, float]]:
    """Returns (round, score) of a budget, or of the mean over clients."""
    scopes: Mapping[str, ClientScope] = {MTAL: "client", TRAINED: "trained", RECEIVED: "received", POOLED: "pooled"}
    return run.client_curve(scopes[column]) if column in scopes else run.curve("budget", column)


def _upload_bytes(runs: Sequence[Run]) -> dict[str, float]:
    """Returns budget name -> bytes that one of its clients sent over a run, mean over clients and seeds."""
    totals = pandas.concat([client_totals(run) for run in runs])
    return dict(totals.groupby("budget")["upload_bytes"].mean())


def _mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[int], list[float], list[float]]:
    """Returns rounds, means and sample deviations of the rounds that every curve has."""
    by_round = pandas.DataFrame([dict(curve) for curve in curves]).dropna(axis=1).sort_index(axis=1)
    return list(by_round), list(by_round.mean()), list(by_round.std().fillna(0.0))
