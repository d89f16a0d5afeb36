from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import fedguild
from fedguild.config import ShippedTable
from fedguild.core.errors import CheckpointError
from fedguild.measuring.log.folder import load_run
from fedguild.measuring.log.records import EvaluationRecord, ObservationRecord, RunLog
from fedguild.measuring.scores.statistics import half_width, spread
from fedguild.report.html import write_report
from fedguild.report.style import INK, following, text_on
from fedguild.report.tables import run_table
from fedguild.runs.api.launch import Launch
from fedguild.runs.api.run_grid import RunGrid
from tests.report.runs import write_run

VOID = {"meta", "br", "img", "link", "hr"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of order, and collects what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def assert_self_contained(page: str) -> None:
    parser = parsed(page)
    assert all(load.startswith(("#", "data:")) for load in parser.loads)
    assert not {"script", "link", "iframe", "img"} & set(parser.tags)
    assert not re.search(r"@import|url\((?!#)", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_page_of_a_run(run_folder: Path, run_page: Path) -> None:
    assert run_page == run_folder / "report.html"
    page = run_page.read_text()
    assert_self_contained(page)
    table = run_table(load_run(run_folder))
    assert f"After 6 rounds, flame scores {table.mean:.3f}" in page
    assert page.count('<div class="on-narrow"><svg') == 6
    assert page.count("<svg") == 7 + 6  # what a client costs is bars of the page's own on a narrow one
    for heading in (
        "Scores by budget",
        "Scores by client",
        "Expert use by client",
        "Data by client",
        "<h2>Costs</h2>",
        "Rejected",
    ):
        assert heading in page
    assert "One upload was not aggregated" in page
    assert "values that are &lt;NaN&gt;" in page
    assert "temperature: 2.0" in page
    assert "packages.torch" in page


def test_the_page_of_a_run_in_which_every_client_has_a_model_of_its_own(personal_page: Path) -> None:
    page = personal_page.read_text()
    assert_self_contained(page)
    for text in ("Scores by client", "As received", "what the server would send it", "Observations of the method"):
        assert text in page
    assert "Scores by budget" not in page
    assert "Utilisation entropy, in nats, over the rounds." in page
    assert "Load, over the rounds. A line for each of 16; the thick one is their mean." in page
    assert "Relevance, after round 6: a row for each of 16, a column for each of 8." in page
    assert "4 more" not in page
    assert page.count("<svg") == 9 + page.count('<div class="on-narrow"><svg') == 9 + 8


def test_the_page_of_a_comparison(comparison_page: Path) -> None:
    assert comparison_page.parts[-2:] == ("out", "comparison.html")
    page = comparison_page.read_text()
    assert "Scores over the rounds: mean over the seeds" in page
    assert_self_contained(page)
    assert "<h1>Ranks &amp; experts</h1>" in page
    assert "At the smallest budget, b4 (1 active expert), flame scores" in page
    assert "386 GFLOP trained" in page
    assert "3 seeds (0, 1, 2)" in page
    assert "Within a column every method runs with the same active experts" in page
    assert "Read with care" not in page
    assert page.count("<svg") == 4 + 4
    assert page.count('<div class="on-narrow"><svg') == 4


TABLE = {
    "preset": "flame/tiny-tasks",
    "reference": "flame",
    "rows": {"flame": {}, "even": {"settings": {"method": {"temperature": 0}}}},
    "columns": {f"alpha-{alpha}": {"settings": {"data": {"partition": {"alpha": alpha}}}} for alpha in (5, 1)},
}
FIGURE = {"x": "alpha", "values": ["5", "1"], "panels": {"": {"as published": "flame @ alpha-{x}"}}}


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., fedguild.Comparison]:
    """Compares the rows of that table with figures or without, by runs that are written by hand."""

    def complete(launch: Launch, grid: RunGrid) -> None:
        for cell in grid.cells:
            final = {"b1": 0.5 + 0.1 * cell.config.data.partition.alpha / 5}
            write_run(cell.folder, name=cell.config.name, seed=cell.config.seed, final=final, rounds=1, layers=1)
            reported = ObservationRecord(round=1, name="drift", rows=["layer 0"], values=[[0.5 + cell.config.seed]])
            RunLog(cell.folder).append(reported)

    def compare(drawn: dict[str, object], rows: Sequence[str] = ()) -> fedguild.Comparison:
        path = tmp_path / "table.yaml"
        path.write_text(yaml.safe_dump(TABLE | drawn, sort_keys=False))
        monkeypatch.setattr("fedguild.runs.api.comparing.tables", lambda: (ShippedTable("small/one", "Small.", path),))
        monkeypatch.setattr(Launch, "complete", complete)
        return fedguild.compare("small/one", seeds=[0, 1], rows=rows, output=tmp_path / "runs")

    return compare


def test_the_pages_of_a_table_have_its_figure_of_the_comparisons_own_runs(compared, monkeypatch):
    """On the page of every column, though it is of all; its points are the means over two seeds."""
    for name in ("score_bars", "curves_by_column", "cost_against_score"):  # which other tests draw
        monkeypatch.setattr(f"fedguild.report.comparison_figures.{name}", lambda *_: "<svg></svg>")
    comparison = compared({"figure": FIGURE})
    told = []
    for value in FIGURE["values"]:
        folders = [comparison.folder / f"alpha-{value}" / "flame" / f"seed-{seed}" for seed in (0, 1)]
        mean = spread([load_run(folder).scored("budget", 1)["b1"].score for folder in folders])
        told.append(f"{mean.mean:.3f} ± {half_width(mean):.3f} at {value}")
    assert list(comparison.pages) == ["alpha-5", "alpha-1"]
    for path in comparison.pages.values():
        page = path.read_text()
        assert_self_contained(page)
        assert page.count(f'aria-label="The mean score by alpha. as published: {", ".join(told)}."') == 2
        assert "The mean score by alpha; bars are the means&#39; 95 % intervals over the seeds.</figcaption>" in page


def test_colours_of_figures_follow_the_page_but_for_text_on_a_heat_map() -> None:
    drawn = '<style></style><svg><path style="fill: {}"/></svg>'
    assert 'style="fill: var(--ink)"' in following(drawn.format(INK))
    page = following(drawn.format("#0072b2"))
    assert 'style="fill: var(--c-0072b2)"' in page
    assert page.count("--c-0072b2: #") == 2, "one for a light page and one for a dark one"
    for colour in (text_on(0.0), text_on(1.0)):
        assert following(drawn.format(colour)) == drawn.format(colour), "its field is the same on a dark page"


def test_names_in_the_config_cannot_inject_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=1, layers=1, clients=2)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"name": "<script>alert(1)</script>"}))
    assert_self_contained(write_report(folder).read_text())


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: begun\nmethod: flame\n")
    RunLog(tmp_path).append(EvaluationRecord(round=0, scope="budget", name="all", split="test", score=0.2))
    page = write_report(tmp_path).read_text()
    assert_self_contained(page)
    assert "Before training, flame scores 0.200." in page
    assert "<h2>Costs</h2>" not in page


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        write_report(tmp_path)


def test_the_figures_of_a_page_follow_its_colours(run_page: Path) -> None:
    page = run_page.read_text()
    drawn = "".join(re.findall(r"<svg\b.*?</svg>", page, flags=re.DOTALL))
    assert not re.search(r"(?:fill|stroke): ?#", drawn)
    used = set(re.findall(r"var\((--[\w-]+)\)", drawn))
    assert {"--ink", "--muted"} < used
    style = page.split("<style>")[1].split("</style>")[0]
    light, dark = style.rsplit("@media screen and (prefers-color-scheme: dark)", 1)
    for name in used:
        assert f"{name}: #" in light
    for name in (name for name in used if name.startswith("--c-")):
        assert f"{name}: #" in dark


def test_the_values_of_figures_are_tables_too(run_folder: Path, run_page: Path) -> None:
    run = load_run(run_folder)
    page = run_page.read_text()
    assert "Test exact match by round" in page
    for number, score in run.curve("budget", "b4"):
        assert re.search(rf'<th scope="row">{number}</th>\s*(?:<td>[\d.]+</td>\s*){{3}}<td>{score:.3f}</td>', page)
    counts = [re.findall(r'<th scope="row">b1 · 0</th>(.*?)</tr>', page, flags=re.DOTALL)]
    assert any(re.findall(r"<td>(\d+)</td>", row) == list(map(str, run.partition.counts[0])) for row in counts[0])
