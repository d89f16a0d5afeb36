"""Figures of the papers' tables: the score over the columns or the rows, as lines with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedguild.config.table import ROUNDS, Table, TableFigure
from fedguild.core.score_names import TITLES
from fedguild.measuring.log.folder import Run
from fedguild.measuring.scores.statistics import Spread, half_width, spread
from fedguild.report.observations import observed_means
from fedguild.report.style import (
    MUTED,
    NARROW_WIDTH,
    Svg,
    gridlines,
    key_at,
    method_colours,
    styled,
    to_svg,
    trend_limits,
)
from fedguild.report.tables import run_table

Panels = Mapping[str, Mapping[str, Sequence[Spread]]]
"""Panel -> line -> what is drawn over the seeds at every value of the figure's axis."""
_BARS = "bars are the means' 95 % intervals over the seeds"
_APART = 0.035
"""Shift between lines at one value, of the distance between two values, so that their intervals can be told apart."""
_FITS_A_PANEL = 24
"""Letters of what lines have that fit beside one panel; more stand beside all of them."""


@dataclass(frozen=True)
class CellScores:
    """The data that figures need of the run of a table's cell.

    Attributes:
        row: The cell's row.
        column: The cell's column.
        seed: The run's seed.
        scores: Budget or summary -> score.
        observations: Figure, `figure / column` or `figure / row` -> round -> its mean.
        nats: Budget -> its loss in nats per token, where perplexity was measured.
    """

    row: str
    column: str
    seed: int
    scores: Mapping[str, float]
    observations: Mapping[str, Mapping[int, float]]
    nats: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, row: str, column: str) -> CellScores:
        found = run_table(run)
        measured = {one.budget.name: one.metrics["perplexity"] for one in found.rows if "perplexity" in one.metrics}
        nats = {name: math.log(value) for name, value in measured.items() if math.isfinite(value)}
        return cls(row, column, run.seed, found.scores, observed_means(run), nats)


@dataclass(frozen=True)
class Drawing:
    """The content of a figure.

    Attributes:
        y: The quantity drawn, as a noun phrase.
        x: What varies along the horizontal axis, as a noun phrase.
        values: The values of the horizontal axis.
        panels: The lines.
        digits: Format of a value in words.
        bounds: The smallest and largest possible value.
        are_differences: Whether values are differences, taken seed by seed; then a line is drawn at zero.
    """

    y: str
    x: str
    values: tuple[str, ...]
    panels: Panels
    digits: str = ".3f"
    bounds: tuple[float, float] = (0.0, 1.0)
    are_differences: bool = False

    @property
    def says(self) -> str:
        """What is drawn, as the beginning of a sentence."""
        return f"The {self.y} by {self.x}{', paired by seed' if self.are_differences else ''}"

    @property
    def caption(self) -> str:
        """What is drawn, and the meaning of the bars, if there are any."""
        several = any(one.count > 1 for lines in self.panels.values() for line in lines.values() for one in line)
        return f"{self.says}; {_BARS if several else 'one seed, so that there is no interval'}."


def drawings(table: Table, records: Sequence[CellScores]) -> dict[str, Drawing]:
    """Returns a table's figures by file name suffix; that of the scores is empty.

    A figure is left out if a cell has no record, or not what the figure draws.
    """
    found = {end: of_scores(table, figure, records) for end, figure in table.drawn_scores.items()}
    found[ROUNDS] = over_rounds(table, records)
    return {end: drawing for end, drawing in found.items() if drawing is not None}


def of_scores(table: Table, figure: TableFigure, records: Sequence[CellScores]) -> Drawing | None:
    """Returns a figure of the table's scores; None if a cell that it needs has no record."""
    scored: dict[tuple[str, str, str], dict[int, float]] = {}
    for record in records:
        for score, value in (record.nats if figure.nats else record.scores).items():
            scored.setdefault((record.row, record.column, score), {})[record.seed] = value
    drawn = [figure.scores.get(value, table.score) for value in figure.values]
    panels: dict[str, dict[str, list[Spread]]] = {}
    for panel, lines in figure.panels.items():
        less = [scored.get((*cell, score)) for cell, score in zip(figure.subtracted(panel), drawn, strict=False)]
        for line in lines:
            found = [scored.get((*cell, score)) for cell, score in zip(figure.cells(panel, line), drawn, strict=True)]
            points = [_paired(*pair) for pair in zip(found, less, strict=True)] if less else found
            if not all(points):
                return None
            panels.setdefault(panel, {})[line] = [spread(list(point.values())) for point in points if point]
    y = "score" if figure.scores else f"{TITLES[table.score]} score"
    y, most = ("nats per token", math.inf) if figure.nats else (y, 1.0)
    if figure.minus:
        return Drawing(f"gain in {y}", figure.x, figure.values, panels, "+.3f", (-most, most), are_differences=True)
    return Drawing(y, figure.x, figure.values, panels, bounds=(0.0, most))


def _paired(found: Mapping[int, float] | None, less: Mapping[int, float] | None) -> dict[int, float] | None:
    """Returns the differences of two cells by seed, for the seeds of both; None if one has no record."""
    if found is None or less is None:
        return None
    return {seed: value - less[seed] for seed, value in found.items() if seed in less}


def over_rounds(table: Table, records: Sequence[CellScores]) -> Drawing | None:
    """Returns the figure of what the method reported in each recorded round.

    None if the table has none, a cell that it needs has no record, or records differ in their rounds.
    """
    if table.rounds is None:
        return None
    name = table.rounds.figure
    reported: dict[tuple[str, str], list[Mapping[int, float]]] = {}
    for record in records:
        reported.setdefault((record.row, record.column), []).append(record.observations.get(name, {}))
    places = {
        panel: {line: table.rounds.cell(panel, line) for line in lines} for panel, lines in table.rounds.panels.items()
    }
    needed = [reported.get(cell, [{}]) for lines in places.values() for cell in lines.values()]
    rounds = {tuple(sorted(seed)) for seeds in needed for seed in seeds}
    if len(rounds) != 1 or rounds == {()}:
        return None
    (numbers,) = rounds
    panels = {
        panel: {
            line: [spread([seed[number] for seed in reported[cell]]) for number in numbers]
            for line, cell in lines.items()
        }
        for panel, lines in places.items()
    }
    return Drawing(table.rounds.label or name, "round", tuple(map(str, numbers)), panels, ".3g", (-math.inf, math.inf))


def description(drawing: Drawing) -> str:
    """Returns a figure in words: every mean with the half width of its 95 % interval, for readers and for a test."""
    parts = []
    for panel, lines in drawing.panels.items():
        for line, spreads in lines.items():
            values = ", ".join(
                f"{_told(one, drawing.digits)} at {value}" for one, value in zip(spreads, drawing.values, strict=True)
            )
            parts.append(f"{panel}, {line}: {values}." if panel else f"{line}: {values}.")
    return f"{drawing.says}. {' '.join(parts)}"


def for_page(table: Table, records: Sequence[CellScores]) -> dict[str, Callable[[float], Svg]]:
    """Returns a table's figures for an HTML page: caption -> function of a width in inches."""
    return {
        drawing.caption: partial(_at_width, f"table-{end or 'scores'}", drawing)
        for end, drawing in drawings(table, records).items()
    }


def _at_width(key: str, drawing: Drawing, width: float) -> Svg:
    return svg(key_at(key, width), drawing, width)


def svg(name: str, drawing: Drawing, width: float = NARROW_WIDTH) -> Svg:
    """Returns the figure as an `<svg>` element, by default as wide as a phone's page.

    Args:
        name: Its name, unique among all figures.
        width: In inches.
    """
    with styled(name):
        return to_svg(draw(drawing, width), name, description(drawing))


def draw(drawing: Drawing, width: float = NARROW_WIDTH) -> Figure:
    """Returns the figure, panels one below the other: lines through the means, bars for their 95 % intervals.

    A line has the same colour in all panels.
    """
    drawn = drawing.panels
    lines = list(dict.fromkeys(line for of_panel in drawn.values() for line in of_panel))
    colours = dict(zip(lines, method_colours(len(lines)), strict=True))
    height = 0.6 + 0.17 * len(lines) + 1.75 * len(drawn)
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="#ffffff")
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    ends = [
        end
        for of_panel in drawn.values()
        for scores in of_panel.values()
        for score in scores
        for end in (score.mean - _reach(score), score.mean + _reach(score))
    ]
    short = len(drawing.y) <= _FITS_A_PANEL
    if not short:
        figure.supylabel("\n".join(wrap(drawing.y, 40)), fontsize=panels[0].yaxis.label.get_size(), color=MUTED)
    for axes, (title, of_panel) in zip(panels, drawn.items(), strict=True):
        _panel(axes, of_panel, colours)
        axes.set_title(title)
        axes.set_ylim(trend_limits([*ends, 0.0] if drawing.are_differences else ends, drawing.bounds))
        if drawing.are_differences:
            axes.axhline(0.0, color=MUTED, linewidth=0.8, zorder=1)
        axes.set_ylabel(drawing.y if short else "")
    panels[-1].set_xticks(range(len(drawing.values)), drawing.values)
    panels[-1].set_xlabel(drawing.x)
    handles = {line: handle for axes in panels for handle, line in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = 2 if max(map(len, lines)) < 24 else 1
    figure.legend(
        [handles[line] for line in lines],
        lines,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        handlelength=1.2,
    )
    return figure


def _panel(axes: Axes, lines: Mapping[str, Sequence[Spread]], colours: Mapping[str, str]) -> None:
    for place, (line, scores) in enumerate(lines.items()):
        shift = _APART * (place - (len(lines) - 1) / 2)
        axes.errorbar(
            [at + shift for at in range(len(scores))],
            [score.mean for score in scores],
            yerr=[_reach(score) for score in scores],
            color=colours[line],
            label=line,
            linewidth=1.4,
            elinewidth=0.8,
            marker="o",
            markersize=3,
        )
    gridlines(axes)


def _reach(score: Spread) -> float:
    """Half the width of the interval; 0 for one seed, whose interval is unbounded."""
    reach = half_width(score)
    return reach if math.isfinite(reach) else 0.0


def _told(score: Spread, digits: str) -> str:
    return (
        f"{score.mean:{digits}} ± {half_width(score):{digits.removeprefix('+')}}"
        if score.count > 1
        else f"{score.mean:{digits}}"
    )
