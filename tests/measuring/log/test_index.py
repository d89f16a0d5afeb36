"""The index of a folder's runs: what it says of each, what its filters hide, and where it looks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedguild.core.errors import CheckpointError
from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.folder import load_run
from fedguild.measuring.log.index import RunSummary, find_runs
from fedguild.report.html import write_index
from fedguild.report.tables import run_table
from tests.report.runs import write_run
from tests.report.test_html import parsed


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with two finished runs and one that failed, at two depths."""
    write_run(tmp_path / "flame <1>")
    (tmp_path / "flame <1>" / "report.html").write_text("report")
    write_run(tmp_path / "grid/fedit/seed-3", name="fedit", method="fedit", seed=3, rounds=2)
    failed = write_run(tmp_path / "personal", name="own", method="fedamole", personal=True)
    ActivityLog(failed).append("failed", reason="disk full")
    return tmp_path


def test_every_run_below_a_folder_is_found_and_nothing_inside_one(runs: Path) -> None:
    (runs / ".hidden").mkdir()
    write_run(runs / ".hidden/run")
    write_run(runs / "flame <1>/inside")
    names = [folder.relative_to(runs).as_posix() for folder in find_runs(runs)]
    assert names == ["flame <1>", "grid/fedit/seed-3", "personal"]


def test_a_summary_is_that_of_the_tables(runs: Path) -> None:
    run = RunSummary(runs / "flame <1>")
    table = run_table(load_run(runs / "flame <1>"))
    assert run.score == pytest.approx(table.mean)
    assert run.before == pytest.approx(table.mean_before)
    assert (run.method, run.data, run.number_of_clients, run.round, run.planned_rounds) == ("flame", "tasks", 8, 6, 6)
    assert (run.how.word, run.has_report, run.seconds) == ("finished", True, pytest.approx(6 * 4.6))
    own = RunSummary(runs / "personal")
    assert own.score == pytest.approx(run_table(load_run(runs / "personal")).mtal)
    assert (own.how.word, own.how.reason) == ("failed", "disk full")
    assert (run.metric, own.metric) == ("exact match", "score")  # the personal run's log does not say


def test_a_summary_follows_a_run(runs: Path) -> None:
    summary = RunSummary(runs / "personal")
    assert not summary.refresh()
    ActivityLog(runs / "personal").append("begun", pid=1)
    assert summary.refresh()
    assert summary.how.word == "finished"


def test_the_page_filters_and_leads_to_the_reports(runs: Path) -> None:
    path = write_index(runs)
    page = path.read_text()
    parser = parsed(page)
    assert path.name == "index.html"
    assert parser.loads == ["flame%20%3C1%3E/report.html"]
    assert not {"script", "link", "img", "iframe"} & set(parser.tags)
    assert "flame &lt;1&gt;" in page
    rows = re.findall(r'<tr data-method="(\d)" data-data="(\d)" data-model="(\d)" data-status="(\d)">', page)
    assert rows == [("2", "0", "0", "1"), ("1", "0", "0", "1"), ("0", "0", "0", "0")]
    assert re.findall(r'<option value="\d">(\w+)</option>', page)[:3] == ["fedamole", "fedit", "flame"]
    hides = 'body:has(#method option[value="2"]:checked) tr[data-method]:not([data-method="2"]) { display: none; }'
    assert hides in page
    assert "3 runs" in page


def test_the_page_leads_to_the_pages_of_comparisons_and_sweeps(runs: Path) -> None:
    assert '<p class="pages">' not in write_index(runs).read_text()
    for place in ("comparison.html", "grid/comparison.html", "grid/fedit/sweep.html", "personal/sweep.html"):
        (runs / place).write_text("page")
    page = write_index(runs).read_text()
    assert parsed(page).loads == [
        *("./comparison.html", "grid/comparison.html", "grid/fedit/sweep.html"),
        "flame%20%3C1%3E/report.html",
    ]
    assert f">Comparison {runs.name}</a></span>" in page
    assert ">Sweep fedit</a> <small>grid/fedit</small></span>" in page


def test_a_folder_without_runs_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no run in"):
        write_index(tmp_path)
