from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest

from fedguild.measuring.log.folder import Run
from fedguild.report import comparison_figures, figures
from fedguild.report.comparison import ComparisonTable, compare
from fedguild.report.costs import Cost
from fedguild.report.style import NARROW_WIDTH

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    """Parses the figure, which fails on anything but well-formed XML, and returns what it says."""
    return ["".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def bubbles(svg: str) -> int:
    root = ElementTree.fromstring(svg)
    group = next(node for node in root.iter(f"{SVG}g") if "PathCollection" in node.get("id", ""))
    return len(list(group.iter(f"{SVG}use"))) or len(list(group.iter(f"{SVG}path")))


def test_a_dollar_in_a_name_is_a_dollar() -> None:
    svg = figures.partition_bubbles(["from $5 to $10", "$\\foo$"], np.ones((2, 2), int), ["first", "second"])
    assert {"from $5 to $10", "$\\foo$"} <= set(texts(svg))


def test_score_curves_name_each_line_with_its_last_score() -> None:
    svg = figures.score_curves({"b1": [(0, 0.1), (1, 0.7)], "b<2>": [(0, 0.1), (1, 0.69)]}, "test")
    said = " ".join(texts(svg))
    assert "0.700" in said
    assert "b<2>" in said
    assert "test score" in said


def test_heat_maps_of_the_mean_and_all_layers() -> None:
    frequency = np.random.default_rng(0).random((3, 5, 7))
    mean = figures.expert_heat_map(frequency, ["a", "b", "c"])
    assert {"a", "b", "c", "expert", "client"} <= set(texts(mean))
    assert "mean over layers" in mean.split(">", 1)[0]
    assert mean.count("<image") > 0
    every = figures.expert_heat_maps_by_layer(frequency)
    assert texts(every) == [f"Layer {layer}" for layer in range(5)]
    assert every.count("<image") == 5


def test_partition_draws_a_circle_per_nonzero_cell_and_the_totals() -> None:
    counts = np.array([[3, 0, 5], [0, 2, 0]])
    svg = figures.partition_bubbles(["x", "y", "z"], counts, ["first", "second"])
    assert bubbles(svg) == 3
    assert {"x", "y", "z", "first", "second", "8", "2", "total"} <= set(texts(svg))


def test_cost_bars_say_every_amount() -> None:
    cost = Cost(training_flops=2e12, upload_bytes=3e6, download_bytes=0, peak_memory_bytes=None, seconds=61.0)
    said = texts(figures.cost_bars({"b1": cost}))
    assert {"b1", "2.00 TFLOP", "3.00 MB", "1 min 01 s"} <= set(said)
    assert said.count("–") == 2


@pytest.fixture(scope="module")
def table(runs: dict[str, list[Run]]) -> ComparisonTable:
    return compare(runs)


@pytest.fixture(scope="module")
def scatter_figure(table: ComparisonTable, runs: dict[str, list[Run]]) -> str:
    return comparison_figures.cost_against_score(table, runs)


def test_comparison_figures_name_the_methods_and_budgets(table, runs, scatter_figure):
    bars = texts(comparison_figures.score_bars(table))
    mean = table.row("flame").spread("b4")
    assert mean is not None
    assert f"{mean.mean:.2f}" in bars
    assert {"flame", "fedit-ranks", "mean"} <= set(bars)
    scatter = texts(scatter_figure)
    assert scatter.count("b4") == 4
    assert "bytes sent per client" in scatter
    rounds = texts(comparison_figures.curves_by_column(table, runs))
    assert "b4, 1 expert" in rounds


def test_figures_repeat_exactly_share_no_id_and_leave_matplotlib_alone() -> None:
    before = dict(matplotlib.rcParams)
    curves = {"b1": [(0, 0.1), (1, 0.7)]}
    first, second = (figures.score_curves(curves, "test") for _ in range(2))
    assert first == second
    other = figures.expert_heat_map(np.ones((1, 1, 2)), ["0"])
    ids = [{node.get("id") for node in ElementTree.fromstring(svg).iter()} - {None} for svg in (first, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert dict(matplotlib.rcParams) == before


def width_of(svg: str) -> float:
    return float(re.search(r'style="width: (\d+)px"', svg)[1])  # type: ignore[index]


NARROW = {
    "heat map": lambda: figures.expert_heat_map(
        np.ones((3, 2, 64)), ["b1 · 0", "b2 · 1", "b3 · 2"], width=NARROW_WIDTH
    ),
    "layers": lambda: figures.expert_heat_maps_by_layer(np.ones((3, 5, 8)), NARROW_WIDTH),
    "partition": lambda: figures.partition_bubbles(
        [f"a long label of number {i}" for i in range(70)], np.ones((2, 70), dtype=int), ["0", "1"], NARROW_WIDTH
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_figure_is_as_wide_as_a_phone_and_has_ids_of_its_own(name: str) -> None:
    svg = NARROW[name]()
    assert width_of(svg) == pytest.approx(96 * NARROW_WIDTH, abs=1)
    ids = {node.get("id") for node in ElementTree.fromstring(svg).iter()} - {None}
    assert all("-narrow-" in each for each in ids)


def test_a_clients_four_models_have_a_mark_each():
    names = ("before training", "own model", "as trained", "as received")
    scores = {name: {"0": 0.1 * place, "1": None} for place, name in enumerate(names)}
    drawn = figures.client_dots(scores, "test")
    assert [drawn.count(name) for name in names] == [2, 2, 2, 2], "in the description and in the legend"
