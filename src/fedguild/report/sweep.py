"""A sweep: every combination of some settings over several seeds, the best of them, and its page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedguild.core.errors import ConfigError
from fedguild.core.score_names import MEAN, MTAL, POOLED, RECEIVED, TRAINED
from fedguild.measuring.log.folder import Run
from fedguild.measuring.scores.statistics import Spread, interval, paired_difference
from fedguild.report import units
from fedguild.report.comparison import MethodRow, compare
from fedguild.report.grid import Cell, Grid
from fedguild.report.style import (
    FULL_WIDTH,
    HEAT,
    INK,
    MUTED,
    Svg,
    gridlines,
    key_at,
    styled,
    text_on,
    tilt_if_long,
    to_svg,
)

_SCORES = {
    MEAN: "mean over the budgets",
    MTAL: "mean over the clients' own models",
    TRAINED: "mean over the clients' models as trained",
    RECEIVED: "mean over the clients' models as received",
    POOLED: "mean over the clients' models on all data",
}


@dataclass(frozen=True)
class Setting:
    """A combination of the swept settings.

    Attributes:
        label: Its name, also that of its runs.
        values: Key -> value as it was given.
        diverged: The seeds with which its training diverged.
    """

    label: str
    values: Mapping[str, str]
    row: MethodRow
    diverged: tuple[int, ...] = ()

    def scores(self, of: str) -> Mapping[int, float]:
        return self.row.scores.get(of, {})

    @property
    def title(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items())


@dataclass(frozen=True)
class SweepTable:
    """The settings of a sweep with their scores.

    Attributes:
        keys: The swept keys, in the order given.
        settings: The combinations, the last key changing fastest.
        score: Name of the score that chooses.
        split: The split of the score, `validation` or `test`.
        round: The last evaluated round.
        warnings: Reasons why the sweep may be unfair, one sentence each.
        metric: What the score is, in words; `score` where that is not recorded.
    """

    keys: tuple[str, ...]
    settings: tuple[Setting, ...]
    score: str
    split: str
    seeds: tuple[int, ...]
    round: int
    warnings: tuple[str, ...]
    metric: str = "score"

    @property
    def best(self) -> Setting:
        """The setting with the highest mean over the seeds, the first in a tie; never one that diverged."""
        return max(self.settings, key=self._mean)

    @property
    def by_validation(self) -> bool:
        """Whether validation examples chose the best, so that its test score is unbiased."""
        return self.split == "validation"

    def spread(self, setting: Setting) -> Spread | None:
        return setting.row.spread(self.score)

    def below_best(self, setting: Setting) -> Spread | None:
        """Returns the seedwise difference to the best setting, over the seeds that both have; None without one."""
        best = self.best
        return None if setting is best else paired_difference(setting.scores(self.score), best.scores(self.score))

    def is_close(self, setting: Setting) -> bool:
        """Whether the 95 % interval of the difference to the best includes 0."""
        difference = None if setting.diverged else self.below_best(setting)
        return difference is not None and difference.count > 1 and interval(difference)[1] >= 0

    def to_json(self) -> dict[str, Any]:
        return {
            "keys": list(self.keys),
            "score": self.score,
            "metric": self.metric,
            "split": self.split,
            "seeds": list(self.seeds),
            "round": self.round,
            "best": dict(self.best.values),
            "settings": [
                {
                    "label": one.label,
                    "values": dict(one.values),
                    "diverged": list(one.diverged),
                    "by_seed": {str(seed): value for seed, value in one.scores(self.score).items()},
                    **(asdict(spread) if (spread := self.spread(one)) else {}),
                    "cost": asdict(one.row.cost) if one.row.cost else None,
                    "run_seconds": one.row.run_seconds,
                }
                for one in self.settings
            ],
            "warnings": list(self.warnings),
        }

    def grid(self) -> Grid:
        """Returns settings × score and costs; the best in bold."""
        score = f"{self.split.capitalize()} {self.metric}"
        header = [*(Cell(key) for key in self.keys), Cell(score, "mean ± sample deviation"), Cell("Seeds")]
        header += [Cell("Against the best", "95 % interval"), Cell("Upload", "per client"), Cell("Whole run")]
        body = []
        for one in self.settings:
            best, spread, difference = one is self.best, self.spread(one), self.below_best(one)
            cells = [Cell(one.values[key], strong=best) for key in self.keys]
            cells += [Cell(units.score_spread(spread), strong=best), Cell(str(spread.count if spread else 0))]
            note = "not distinguishable" if self.is_close(one) else ""
            note = f"seed {', '.join(map(str, one.diverged))}" if one.diverged else note
            against = "diverged" if one.diverged else "best" if best else units.difference(difference)
            cells += [Cell(against, note, strong=best)]
            cells += [Cell(units.byte_count(one.row.cost.upload_bytes if one.row.cost else None))]
            body.append((*cells, Cell(units.duration(one.row.run_seconds))))
        what = f"{score} ({_SCORES.get(self.score, self.score)}) after round {self.round}"
        return Grid(f"{what}, over {units.count_of(len(self.seeds), 'seed')}", tuple(header), tuple(body))

    def sentences(self) -> list[str]:
        """Returns which setting is best, by which score, and how certain that is."""
        best, spread = self.best, self.spread(self.best)
        whose = f"{self.split} {self.metric} ({_SCORES.get(self.score, self.score)})"
        said = [f"By the {whose}, {best.title} is best: {units.score_spread(spread)}."]
        close = [one.title for one in self.settings if self.is_close(one)]
        if spread is not None and spread.count < 2:
            said.append("With one seed nothing is known of the spread.")
        elif close:
            said.append(f"These seeds cannot tell it from {units.count_of(len(close), 'other setting')}.")
        diverged = [one.title for one in self.settings if one.diverged]
        if diverged:
            said.append(f"{units.count_of(len(diverged), 'setting')} diverged: {'; '.join(diverged)}.")
        if self.by_validation:
            run = f"{best.label}/seed-{self.seeds[0]}"
            said.append(
                f"No test example had a part in the choice: `fedguild evaluate` on {run} of the sweep's folder gives "
                "the test score."
            )
        else:
            said.append(
                "There are no validation scores: the test score of a setting that it chose is optimistic. Hold out "
                "validation examples (data.split.validation) and set evaluation.split=validation."
            )
        return said

    def figure(self, width: float = FULL_WIDTH) -> Svg:
        """Returns a line over one swept key's values, or a heat map over two.

        Args:
            width: The width of the page's text in inches; the figure is no wider.
        """
        if len(self.keys) == 1:
            return self._line(width)
        return self._heat_map(width)

    def _mean(self, setting: Setting) -> float:
        spread = self.spread(setting)
        return -math.inf if spread is None or setting.diverged else spread.mean

    def _line(self, width: float) -> Svg:
        (key,), ids = self.keys, key_at("sweep", width)
        with styled(ids):
            figure = Figure(figsize=(min(6.4, width), 3.2), layout="constrained")
            axes = figure.subplots()
            places = range(len(self.settings))
            spreads = [self.spread(one) for one in self.settings]
            means = [math.nan if (mean := self._mean(one)) == -math.inf else mean for one in self.settings]
            bars = [spread.std if spread else 0.0 for spread in spreads]
            axes.errorbar(places, means, bars, color="#0072b2", marker="o", markersize=5, linewidth=1.4, capsize=3)
            at = self.settings.index(self.best)
            axes.scatter([at], [means[at]], s=110, facecolors="none", edgecolors=INK, linewidths=1.4, zorder=4)
            axes.set_xticks(places, [one.values[key] for one in self.settings])
            tilt_if_long(axes, min(6.4, width))
            axes.set(xlabel=key, ylabel=f"{self.split} {self.metric}")
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
            gridlines(axes)
            return to_svg(figure, ids, f"Line chart: {self.split} {self.metric} by {key}; best: {self.best.title}.")

    def _heat_map(self, width: float) -> Svg:
        (down, across), ids = self.keys, key_at("sweep", width)
        rows = list(dict.fromkeys(one.values[down] for one in self.settings))
        columns = list(dict.fromkeys(one.values[across] for one in self.settings))
        means = np.full((len(rows), len(columns)), np.nan)
        for one in self.settings:
            place = (rows.index(one.values[down]), columns.index(one.values[across]))
            means[place] = np.nan if (mean := self._mean(one)) == -math.inf else mean
        wide, natural = width == FULL_WIDTH, 1.6 + 1.05 * len(columns)
        printed = min(natural, width) >= 0.6 * natural  # else the columns are narrower than their scores
        with styled(ids):
            size = (min(natural, width), 1.2 + 0.55 * len(rows) + (0 if wide else 0.5))
            figure = Figure(figsize=size, layout="constrained")
            axes = figure.subplots()
            image = axes.imshow(means, cmap=HEAT, aspect="auto")
            low, high = np.nanmin(means), np.nanmax(means)
            for (row, column), mean in np.ndenumerate(means):
                if np.isnan(mean):
                    continue
                best = (rows[row], columns[column]) == (self.best.values[down], self.best.values[across])
                text = (" " if wide else "\n").join([f"{mean:.3f}"] * printed + ["★"] * best)
                colour = text_on((mean - low) / (high - low) if high > low else 0.0)
                weight = "bold" if best else None
                axes.text(column, row, text, ha="center", va="center", color=colour, fontweight=weight)
            axes.set_xticks(range(len(columns)), columns)
            axes.set_yticks(range(len(rows)), rows)
            tilt_if_long(axes, min(natural, width))
            axes.set(xlabel=across, ylabel=down)
            axes.tick_params(length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
            bar = figure.colorbar(image, ax=axes, shrink=0.9, location="right" if wide else "bottom")
            bar.set_label(f"{self.split} {self.metric}", color=MUTED)
            bar.outline.set_visible(False)
            about = f"Heat map: mean {self.split} {self.metric} by {down} and {across}; best: {self.best.title}."
            return to_svg(figure, ids, about)


def tabulate(
    keys: Sequence[str],
    values: Mapping[str, Mapping[str, str]],
    runs: Mapping[str, Sequence[Run]],
    diverged: Mapping[str, Sequence[int]] | None = None,
) -> SweepTable:
    """Returns the table of a sweep.

    Args:
        values: Label -> key -> value.
        runs: Label -> the setting's finished runs, one per seed; some may have none.
        diverged: Label -> the seeds with which its training diverged.

    Raises:
        ConfigError: no run has a score.
    """
    table = compare({label: members for label, members in runs.items() if members})
    name = next((name for name in _SCORES if any(name in row.scores for row in table.rows)), None)
    if name is None:
        raise ConfigError("The runs of the sweep have no score.", "See `evaluation` in the settings.")
    rows = {row.label: row for row in table.rows}
    settings = tuple(
        Setting(
            label,
            values[label],
            rows.get(label) or MethodRow(label, {}, {}, None, 0.0),
            tuple((diverged or {}).get(label, ())),
        )
        for label in runs
    )
    warnings = tuple(warning for warning in table.warnings if not warning.startswith("Budget"))
    return SweepTable(tuple(keys), settings, name, table.split, table.seeds, table.round, warnings, table.metric)
