"""Figures of a method's observations: lines over the rounds, and heat maps of the last round or of one row in each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedguild.measuring.log.records import ObservationRecord
from fedguild.report.observations import Series
from fedguild.report.style import (
    FULL_WIDTH,
    HEAT,
    INK,
    MUTED,
    Svg,
    gridlines,
    key_at,
    method_colours,
    scale_beside,
    styled,
    text_on,
    tilt_if_long,
    to_svg,
)

MOST_NAMED = 8
"""Rows beyond which the lines are thin and unnamed, and their mean stands out."""
_MOST_TICKS, _MOST_TICKS_NARROW = 40, 12
_MOST_PRINTED, _MOST_COLUMNS_PRINTED = 60, 5
"""Fields of a heat map, and columns, up to which its values are written into it."""
_INCHES_A_LETTER = 0.06
"""Height that a letter of a tilted name takes."""


def observation_figure(series: Series, key: str, width: float = FULL_WIDTH) -> Svg:
    """Returns a figure's lines over the rounds, or its heat map if a row has a value for each column.

    A figure with one such row is shown in all rounds, one below the other.

    Args:
        key: Prefix of the ids in the SVG.
        width: In inches.
    """
    key = key_at(key, width)
    return _heat_map(series.matrix(), key, width) if series.is_matrix else _lines(series, key, width)


def _lines(series: Series, key: str, width: float) -> Svg:
    lines = series.lines()
    few, wide = len(lines) <= MOST_NAMED, width == FULL_WIDTH
    with styled(key):
        height = 2.3 if wide or not few else 2.3 + 0.1 * len(lines)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        for (row, points), colour in zip(lines.items(), method_colours(len(lines)), strict=True):
            (line,) = axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.7, label=row)
            if not few:
                line.set(color=MUTED, linewidth=0.6, alpha=0.45)
            if len(points) == 1:
                line.set(marker="o", markersize=3.5)
        if few and lines:
            place: Literal["outside right upper", "outside upper left"]
            place = "outside right upper" if wide else "outside upper left"
            figure.legend(loc=place, ncols=1 if wide else 2, frameon=False, handlelength=1.2)
        elif lines:
            axes.plot(*zip(*_mean_line(series), strict=True), color=INK, linewidth=2.4)
        axes.set(xlabel="round", ylabel=series.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.02)
        gridlines(axes)
        return to_svg(figure, key, f"Line chart: {series.name} over the rounds, {len(lines)} lines.")


def _mean_line(series: Series) -> list[tuple[int, float]]:
    """Returns (round, mean over the rows)."""
    by_round: dict[int, list[float]] = {}
    for points in series.lines().values():
        for number, value in points:
            by_round.setdefault(number, []).append(value)
    return [(number, float(np.mean(by_round[number]))) for number in sorted(by_round)]


def _heat_map(record: ObservationRecord, key: str, width: float) -> Svg:
    values = np.asarray(record.values, dtype=np.float64)
    rows, columns = values.shape
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    low = 0.0 if 0 < low < high / 2 else low
    with styled(key):
        height = (0.75 if width == FULL_WIDTH else 1.3) + min(max(0.2 * rows, 0.6), 7.0)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        top = high if high > low else low + 1.0
        image = axes.imshow(values, cmap=HEAT, vmin=low, vmax=top, aspect="auto", interpolation="none")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        _label(axes, "y", record.rows, width)
        if _label(axes, "x", record.columns, width):
            longest = max(len(label.get_text()) for label in axes.get_xticklabels())
            figure.set_size_inches(width, height + _INCHES_A_LETTER * longest)
        if rows * columns <= _MOST_PRINTED and columns <= _MOST_COLUMNS_PRINTED:
            _print_values(axes, values, low, top)
        bar = scale_beside(figure, axes, image, width)
        bar.set_label(record.unit)
        return to_svg(figure, key, f"Heat map: {record.name} of {rows} rows and {columns} columns.")


def _print_values(axes: Axes, values: NDArray[np.float64], low: float, top: float) -> None:
    """Writes every value into its field, in a legible colour."""
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = text_on((value - low) / (top - low))
            axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=colour)


def _label(axes: Axes, axis: str, labels: Sequence[str], width: float) -> bool:
    """Names the rows or columns; the labels' common prefix becomes the name of the axis.

    Returns:
        Whether the labels are tilted.
    """
    word, names = split_labels(labels)
    step = -(-len(names) // (_MOST_TICKS if axis == "y" or width == FULL_WIDTH else _MOST_TICKS_NARROW))
    ticks = range(0, len(names), step)
    shown = [names[place] for place in ticks]
    if axis == "y":
        axes.set_yticks(ticks, shown)
        axes.set_ylabel(word)
        return False
    axes.set_xticks(ticks, shown)
    axes.set_xlabel(word)
    return tilt_if_long(axes, width)


def split_labels(labels: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the labels' common prefix, and their remainders: `expert`, `["0", "1"]` for `expert 0`, `expert 1`.

    Without a common prefix the labels are returned unchanged, with an empty prefix.
    """
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*labels, strict=False))
    shared = "".join(letters[0] for letters in same) if len(labels) > 1 else ""
    length = 1 + max(shared.rfind(separator) for separator in " .-")
    return shared[:length].rstrip(" .-"), [label[length:] for label in labels]
