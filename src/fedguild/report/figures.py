"""The figures of one run, each from plain numbers to an `<svg>` element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from fedguild.report import units
from fedguild.report.costs import Cost
from fedguild.report.style import (
    FULL_WIDTH,
    HEAT,
    INK,
    METHOD_COLOURS,
    MUTED,
    RULE,
    Svg,
    gridlines,
    key_at,
    ordered_colours,
    scale_beside,
    spread_apart,
    styled,
    tilt_if_long,
    to_svg,
    trend_limits,
)

Curve = Sequence[tuple[int, float]]
_MOST_LABELS, _MOST_LABELS_NARROW = 60, 14
_MOST_ROWS_NAMED = 40
CLIENT_MARKS = (
    (75, MUTED, "o"),
    (34, METHOD_COLOURS[0], "o"),
    (11, METHOD_COLOURS[1], "o"),
    (16, METHOD_COLOURS[2], "D"),
)
"""Size, colour and shape of the marks of a client's models, so that all can be seen where they lie on each other."""


def score_curves(
    curves: Mapping[str, Curve], split: str, key: str = "curves", width: float = FULL_WIDTH, metric: str = "score"
) -> Svg:
    """Returns the scores over the rounds, one line per budget, each named at its end.

    The axis begins below the lowest score, not at zero, so that trends are visible.

    Args:
        curves: Label of a budget's line -> (round, score), in the order of the tables.
        split: The split of the scores.
        metric: What the scores are.
        key: Prefix of the ids in the SVG.
        width: In inches.
    """
    key = key_at(key, width)
    with styled(key):
        figure = Figure(figsize=(width, 3.1), layout="constrained")
        axes = figure.subplots()
        colours = ordered_colours(len(curves))
        low, high = trend_limits((score for curve in curves.values() for _, score in curve), (0.0, 1.0))
        ends = spread_apart([curve[-1][1] for curve in curves.values()], gap=0.07 * (high - low))
        for (name, curve), colour, end in zip(curves.items(), colours, ends, strict=True):
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.8, marker="o", markersize=3.5)
            short = name if width == FULL_WIDTH else name.partition(" (")[0]
            text = f"{short}  {units.score(curve[-1][1])}"
            place = (curve[-1][0], end)
            axes.annotate(
                *(text, place, (8, 0)), textcoords="offset points", va="center", color=colour, annotation_clip=False
            )
        axes.set(xlabel="round", ylabel=f"{split} {metric}", ylim=(min(low, *ends), max(high, *ends)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.02)
        gridlines(axes)
        return to_svg(figure, key, f"Line chart: {split} {metric} over the rounds for {', '.join(curves)}.")


def client_dots(
    scores: Mapping[str, Mapping[str, float | None]], split: str, width: float = FULL_WIDTH, metric: str = "score"
) -> Svg:
    """Returns a row per client with a mark for each of its models' scores, joined by a line.

    Args:
        scores: Label of a model's marks, of up to four models -> client -> score, or None if there is none.
        split: The split of the scores.
        metric: What the scores are.
        width: In inches.
    """
    key = key_at("clients", width)
    assert len(scores) <= len(CLIENT_MARKS)
    clients = list(dict.fromkeys(client for model in scores.values() for client in model))
    marks = zip(scores.items(), CLIENT_MARKS, strict=False)
    with styled(key):
        figure = Figure(figsize=(width, 0.9 + min(0.24 * len(clients), 8.0)), layout="constrained")
        axes = figure.subplots()
        for place, client in enumerate(clients):
            known = [value for model in scores.values() if (value := model.get(client)) is not None]
            axes.plot([min(known), max(known)] if known else [], [place] * min(2, 2 * len(known)), color=RULE, zorder=1)
        for (name, model), (size, colour, shape) in marks:
            points = [
                (value, place) for place, client in enumerate(clients) if (value := model.get(client)) is not None
            ]
            across, down = [x for x, _ in points], [y for _, y in points]
            face = "white" if colour == MUTED else colour
            axes.scatter(across, down, s=size, marker=shape, facecolors=face, edgecolors=colour, label=name, zorder=2)
        step = 1 if len(clients) <= _MOST_ROWS_NAMED else -(-len(clients) // _MOST_ROWS_NAMED)
        axes.set_yticks(range(0, len(clients), step), clients[::step])
        axes.set(xlabel=f"{split} {metric}, own data", ylabel="client", ylim=(len(clients) - 0.4, -0.6))
        gridlines(axes, "x")
        names_across = 3 if width == FULL_WIDTH else 2
        figure.legend(loc="outside upper left", ncols=names_across, frameon=False, handletextpad=0.2)
        return to_svg(figure, key, f"Dot chart: {split} {metric} of {len(clients)} clients: {', '.join(scores)}.")


def expert_heat_map(frequency: NDArray[np.float64], clients: Sequence[str], width: float = FULL_WIDTH) -> Svg:
    """Returns clients × experts activation frequencies, the mean over the layers (FLAME, Figure 2).

    Args:
        frequency: [clients, L, M] share of a client's tokens that activated an expert.
        clients: Row names.
        width: In inches; a narrow figure has its scale below.
    """
    shown = frequency.mean(axis=1)
    rows, experts = shown.shape
    key, wide = key_at("experts", width), width == FULL_WIDTH
    with styled(key):
        height = (0.75 if wide else 1.3) + min(0.26 * rows, 6.5)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        image = _draw_heat(axes, shown, top=float(shown.max()))
        axes.set(xlabel="expert", ylabel="client")
        step = 1 if rows <= _MOST_ROWS_NAMED else -(-rows // _MOST_ROWS_NAMED)
        axes.set_yticks(range(0, rows, step), [clients[row] for row in range(0, rows, step)])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=16 if wide else 8, integer=True))
        bar = scale_beside(figure, axes, image, width, format=FuncFormatter(_percent))
        bar.set_label("tokens routed to it")
        summary = f"Heat map: activation frequency of {experts} experts for {rows} clients, mean over layers."
        return to_svg(figure, key, summary)


def expert_heat_maps_by_layer(frequency: NDArray[np.float64], width: float = FULL_WIDTH) -> Svg:
    """Returns one small clients × experts heat map per layer, all on one colour scale.

    Args:
        frequency: [clients, L, M] share of a client's tokens that activated an expert.
        width: In inches.
    """
    rows, layers, _ = frequency.shape
    across = min(4 if width == FULL_WIDTH else 2, layers)
    down, key = -(-layers // across), key_at("layers", width)
    with styled(key):
        height = min(0.13 * rows + 0.3, 2.4)
        figure = Figure(figsize=(width, down * height + 0.25), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False)
        for layer, axes in enumerate(grid.flat):
            if layer >= layers:
                axes.set_axis_off()
                continue
            _draw_heat(axes, frequency[:, layer], top=float(frequency.max()))
            axes.set_title(f"Layer {layer}", fontsize=8, fontweight="normal", color=MUTED, pad=3)
            axes.set(xticks=[], yticks=[])
        return to_svg(figure, key, f"Heat maps: expert activation by client in each of {layers} layers.")


def partition_bubbles(
    labels: Sequence[str], counts: NDArray[np.int64], clients: Sequence[str], width: float = FULL_WIDTH
) -> Svg:
    """Returns clients × labels, each circle's area the number of examples.

    Beyond 60 labels, in a narrow figure beyond 14, the rarer ones are combined as `other`.

    Args:
        labels: Column names.
        counts: [clients, labels] number of examples.
        clients: Row names.
        width: In inches.
    """
    wide = width == FULL_WIDTH
    names, shown = _merge_rare(labels, counts, _MOST_LABELS if wide else _MOST_LABELS_NARROW)
    rows, columns = shown.shape
    key = key_at("partition", width)
    with styled(key):
        depth = min(0.28 * rows, 9.0)
        figure = Figure(figsize=(width, 0.7 + depth), layout="constrained")
        axes = figure.subplots()
        row, column = np.nonzero(shown)
        widest_points = 0.92 * 72 * min((0.88 if wide else 0.68) * width / columns, depth / rows)
        areas = shown[row, column] / max(int(shown.max()), 1) * widest_points**2
        axes.scatter(column, row, s=areas, color="#1f77a4", alpha=0.85, linewidths=0)
        axes.set_xticks(range(columns), names)
        if tilt_if_long(axes, width, degrees=60 if columns > 30 else 35):
            figure.set_figheight(0.7 + depth + (0.05 if wide else 0.075) * max(map(len, names)))
        step = 1 if rows <= _MOST_ROWS_NAMED else -(-rows // _MOST_ROWS_NAMED)
        axes.set_yticks(range(0, rows, step), [clients[index] for index in range(0, rows, step)])
        for index in range(0, rows, step):
            total = f"{int(shown[index].sum())}"
            axes.annotate(total, (1.01, index), xycoords=("axes fraction", "data"), va="center", color=MUTED, size=8.5)
        axes.annotate("total", (1.01, -0.75), xycoords=("axes fraction", "data"), va="center", color=MUTED, size=8.5)
        axes.set(ylabel="client", xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6))
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
        gridlines(axes, "both")
        return to_svg(figure, key, f"Bubble chart: examples of {columns} labels on {rows} clients.")


def cost_panels(costs: Mapping[str, Cost]) -> list[tuple[str, str, list[float]]]:
    """Returns the title, the unit and the values, budget by budget, of each kind of cost; unknown values are 0."""
    return [
        ("Training", "FLOP", [cost.training_flops or 0.0 for cost in costs.values()]),
        ("Upload", "B", [cost.upload_bytes for cost in costs.values()]),
        ("Download", "B", [cost.download_bytes for cost in costs.values()]),
        ("Peak memory", "B", [cost.peak_memory_bytes or 0.0 for cost in costs.values()]),
        ("Time", "s", [cost.seconds or 0.0 for cost in costs.values()]),
    ]


def cost_bars(costs: Mapping[str, Cost]) -> Svg:
    """Returns the costs of a client of each budget over a run, a panel per kind of cost.

    Args:
        costs: Budget name -> mean cost of its clients, in the order of the tables.
    """
    panels = cost_panels(costs)
    with styled("costs"):
        figure = Figure(figsize=(FULL_WIDTH, 0.5 + 0.24 * len(costs)), layout="constrained")
        for axes, (title, unit, values) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
            axes.barh(range(len(costs)), values, height=0.62, color=ordered_colours(len(costs)))
            for place, value in enumerate(values):
                text = amount(value, unit)
                axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", size=8, color=INK)
            axes.set_title(title)
            axes.set(xticks=[], xlim=(0, max(*values, 1.0) * 1.9), ylim=(len(costs) - 0.45, -0.55))
            axes.set_yticks(range(len(costs)), list(costs))
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(length=0)
        return to_svg(figure, "costs", f"Bar charts: training FLOPs, bytes, memory and time of {', '.join(costs)}.")


def amount(value: float, unit: str) -> str:
    """Returns a cost with its unit; `–` for 0, which means unknown."""
    if not value:
        return units.MISSING
    return units.duration(value) if unit == "s" else units.si(value, unit)


def _draw_heat(axes: Axes, values: NDArray[np.float64], top: float) -> AxesImage:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return axes.imshow(values, cmap=HEAT, vmin=0.0, vmax=top or 1.0, aspect="auto", interpolation="none")


def _percent(value: float, _position: int | None = None) -> str:
    return f"{value:.0%}"


def _merge_rare(labels: Sequence[str], counts: NDArray[np.int64], most: int) -> tuple[list[str], NDArray[np.int64]]:
    """Returns at most `most` columns: all, or the most frequent in their order and the sum of the others."""
    if len(labels) <= most:
        return list(labels), counts
    ranked = np.argsort(-counts.sum(axis=0), kind="stable")
    kept = np.sort(ranked[: most - 1])
    rest = counts[:, ranked[most - 1 :]].sum(axis=1, keepdims=True)
    names = [labels[index] for index in kept] + [f"{len(labels) - len(kept)} other"]
    return names, np.concatenate([counts[:, kept], rest], axis=1)
