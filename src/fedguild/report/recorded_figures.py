"""Figures of recorded tables: the score over what the columns, or the rows, change, as lines with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedguild.config.table import Table
from fedguild.evaluation.statistics import Spread, half_width, spread
from fedguild.report.recorded import CellRecord
from fedguild.report.style import NARROW_WIDTH, gridlines, method_colours, styled, to_svg, trend_limits
from fedguild.score_names import TITLES

Points = Mapping[str, Mapping[str, Sequence[Spread]]]
"""Panel -> line -> the score over the seeds at every value of the figure's axis."""
_APART = 0.035
"""Shift between lines at one value, of the distance between two values, so that their intervals can be told apart."""


def points(table: Table, records: Sequence[CellRecord]) -> Points | None:
    """Returns what the table's figure draws; None where it has none, or a cell that it needs has no record."""
    if table.figure is None:
        return None
    scored: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if table.score in record.scores:
            scored.setdefault((record.row, record.column), []).append(record.scores[table.score])
    places = {
        panel: {line: table.figure.cells(panel, line) for line in lines} for panel, lines in table.figure.panels.items()
    }
    if any(cell not in scored for lines in places.values() for cells in lines.values() for cell in cells):
        return None
    return {
        panel: {line: [spread(scored[cell]) for cell in cells] for line, cells in lines.items()}
        for panel, lines in places.items()
    }


def description(table: Table, drawn: Points) -> str:
    """Returns a figure in words: every mean with the half width of its 95 % interval, for readers and for a test."""
    assert table.figure is not None
    parts = []
    for panel, lines in drawn.items():
        for line, scores in lines.items():
            values = ", ".join(
                f"{told} at {value}" for told, value in zip(map(_told, scores), table.figure.values, strict=True)
            )
            parts.append(f"{panel}, {line}: {values}." if panel else f"{line}: {values}.")
    return f"The {TITLES[table.score]} score by {table.figure.x}. {' '.join(parts)}"


def svg(name: str, table: Table, drawn: Points) -> str:
    """Returns the figure as the text of an SVG file, as wide as a phone's page.

    Args:
        name: The table's name.
        table: The table.
        drawn: What `points` returned.
    """
    key = name.replace("/", "-")
    with styled(key):
        return f"{to_svg(draw(table, drawn), key, description(table, drawn))}\n"


def draw(table: Table, drawn: Points) -> Figure:
    """Returns the figure, a panel below the other: lines through the means, bars for their 95 % intervals."""
    assert table.figure is not None
    lines = list(next(iter(drawn.values())))
    height = 0.6 + 0.17 * len(lines) + 1.75 * len(drawn)
    figure = Figure(figsize=(NARROW_WIDTH, height), layout="constrained", facecolor="#ffffff")
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    ends = [
        end
        for of_panel in drawn.values()
        for scores in of_panel.values()
        for score in scores
        for end in (score.mean - _reach(score), score.mean + _reach(score))
    ]
    for axes, (title, of_panel) in zip(panels, drawn.items(), strict=True):
        _panel(axes, of_panel)
        axes.set_title(title)
        axes.set_ylim(trend_limits(ends, (0.0, 1.0)))
        axes.set_ylabel(f"{TITLES[table.score]} score")
    panels[-1].set_xticks(range(len(table.figure.values)), table.figure.values)
    panels[-1].set_xlabel(table.figure.x)
    handles, labels = panels[0].get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) < 24 else 1
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, handlelength=1.2)
    return figure


def _panel(axes: Axes, lines: Mapping[str, Sequence[Spread]]) -> None:
    for place, ((line, scores), colour) in enumerate(zip(lines.items(), method_colours(len(lines)), strict=True)):
        shift = _APART * (place - (len(lines) - 1) / 2)
        axes.errorbar(
            [at + shift for at in range(len(scores))],
            [score.mean for score in scores],
            yerr=[_reach(score) for score in scores],
            color=colour,
            label=line,
            linewidth=1.4,
            elinewidth=0.8,
            marker="o",
            markersize=3,
        )
    gridlines(axes)


def _reach(score: Spread) -> float:
    """Half the width of the interval; 0 for one seed, whose interval has no end."""
    reach = half_width(score)
    return reach if math.isfinite(reach) else 0.0


def _told(score: Spread) -> str:
    return f"{score.mean:.3f} ± {half_width(score):.3f}" if score.count > 1 else f"{score.mean:.3f}"
