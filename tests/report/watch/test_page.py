"""The page in a real browser: what it shows, at both widths and in both colour schemes, and how it follows."""

from __future__ import annotations

from pathlib import Path

from fedguild.federation.site import server_state
from fedguild.measuring.log.activity import ActivityLog
from fedguild.report.html import write_index
from fedguild.report.watch.server import WatchServer
from tests.report.runs import write_run
from tests.report.watch.browser import CUT, RIGHT, Browser
from tests.report.watch.folders import comparison, federation, live_run, one_more_round

SCALED = """
[...document.querySelectorAll('svg')].map((one) => [one.viewBox.baseVal.width, one.parentNode.clientWidth])
  .filter(([drawn, shown]) => drawn !== shown)
"""
"""The charts that are not drawn at the width at which they are shown, so that their text is too small or too large."""


def test_charts_of_a_finished_run_are_drawn_at_the_width_at_which_they_are_shown(
    browser: Browser, tmp_path: Path
) -> None:
    sizes = [(1, 1), (2, 5), (20, 30)]
    servers = [WatchServer(write_run(tmp_path / f"{n}-{r}", clients=n, rounds=r)) for n, r in sizes]
    try:
        for server in servers:
            server.begin()
            browser.show(1280)
            browser.open(server.url)
            browser.wait_for(f"location.href === '{server.url}' && document.querySelectorAll('svg').length === 4")
            for width in (1280, 390, 768, 1920):
                browser.show(width)
                browser.wait_for(f"innerWidth === {width} && !waiting && {SCALED.strip()}.length === 0")
                assert browser.value(CUT) == 0, (server.follower.folder, width)
        assert browser.problems == []
    finally:
        browser.open("about:blank")
        for server in servers:
            server.end()


def test_the_page_follows_a_run_at_both_widths_in_both_schemes(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    server = WatchServer(folder, state_of=server_state)
    server.begin()
    try:
        browser.show(1280)
        browser.open(server.url)
        browser.wait_for("at('standing').textContent.startsWith('WaitingNothing in')")
        live_run(folder)
        browser.wait_for("at('standing').textContent.startsWith('Running')")
        browser.wait_for("document.querySelectorAll('#client-table tbody tr').length === 8")
        assert browser.value("document.title") == "flame 6/12 · FedGuild"
        assert "4 of 20, loss 1.250" in browser.value("at('round').textContent")
        assert browser.value("document.querySelectorAll('#scores .chart path').length") == 4
        assert browser.value("at('log').querySelector('b')") is None
        assert "<b>something</b>" in browser.value("at('log').textContent")
        one_more_round(folder, 7)
        ActivityLog(folder).append("message", text="Round 7 is over")
        browser.wait_for("document.title.startsWith('flame 7/12') && at('log').textContent.includes('Round 7 is over')")
        colours = set()
        for width in (1280, 390):
            for dark in (False, True):
                browser.show(width, dark=dark)
                browser.wait_for(f"innerWidth === {width} && !waiting")
                assert browser.screenshot(tmp_path / f"{width}-{dark}.png").stat().st_size > 10_000
                assert browser.value("document.documentElement.scrollWidth") <= width
                assert browser.value(CUT) == 0
                assert browser.value(SCALED) == []
                colours.add(browser.value("getComputedStyle(document.documentElement).backgroundColor"))
        assert len(colours) == 2
        browser.value("at('find').value = 'b3'; at('find').dispatchEvent(new Event('input')); 0")
        browser.wait_for("document.querySelectorAll('#client-table tbody tr').length === 2")
        (folder / ".lock.json").unlink()
        ActivityLog(folder).append("ended")
        browser.wait_for("at('standing').textContent.startsWith('Finished')")
        assert browser.problems == []
    finally:
        server.end()
    browser.wait_for("at('link').textContent.startsWith('connection lost')")


def test_a_comparison_and_a_federation_have_their_tables(browser: Browser, tmp_path: Path) -> None:
    grid, guild = (
        WatchServer(comparison(tmp_path / "grid")),
        WatchServer(federation(tmp_path / "guild"), state_of=server_state),
    )
    for server in (grid, guild):
        server.begin()
    try:
        browser.show(390)
        browser.open(grid.url)
        browser.wait_for("document.querySelectorAll('.cell').length === 4")
        words = browser.value("[...document.querySelectorAll('.cell .word')].map((one) => one.textContent).join(' ')")
        assert words == "finished 6/12 failed waiting"
        assert browser.value(CUT) == 0
        assert browser.value(RIGHT.format(title="Mean")) <= 390
        caption = browser.value("document.querySelector('#grid caption').textContent")
        assert caption.startswith("Each cell: the exact match so far")
        links = (
            "[...document.querySelectorAll('#grid a.written')].map((one) => one.href.split('/').slice(-3).join('/'))"
        )
        assert browser.value(links) == ["run/0/report"]
        (tmp_path / "grid/comparison.html").write_text("<!doctype html><h1>The comparison</h1>")
        browser.wait_for("document.querySelector('.summary a').textContent === 'Page of the comparison'")
        assert browser.value("fetch(document.querySelector('.summary a').href).then((answer) => answer.text())") == (
            "<!doctype html><h1>The comparison</h1>"
        )
        browser.value("document.querySelectorAll('.cell')[1].click()")
        browser.wait_for("location.pathname.includes('/run/1/') && document.title.startsWith('flame 6/12')")
        browser.open(guild.url)
        browser.wait_for("document.querySelectorAll('#client-table tbody tr').length === 8")
        text = browser.value("document.querySelectorAll('#client-table tbody tr')[3].textContent")
        assert "gone" in text
        heads = "[...document.querySelectorAll('#client-table thead th')].map((one) => one.textContent)"
        assert "Exact match" in browser.value(heads)
        assert "its key was revoked" in text
        assert browser.value("document.querySelector('#client-table thead').textContent").startswith(
            "ClientStateKeyConnectedLast contact"
        )
        assert browser.problems == []
    finally:
        grid.end()
        guild.end()


def test_the_index_filters_without_a_script(browser: Browser, tmp_path: Path) -> None:
    comparison(tmp_path)
    browser.show(1280)
    browser.open(write_index(tmp_path).as_uri())
    visible = "[...document.querySelectorAll('tbody tr')].filter((row) => row.offsetHeight).length"
    browser.wait_for(f"{visible} === 3")
    browser.value("document.getElementById('method').value = '0'")
    browser.wait_for(f"{visible} === 1")
    assert "fedit" in browser.value(
        "[...document.querySelectorAll('tbody tr')].find((row) => row.offsetHeight).innerText"
    )
    browser.value("document.querySelector('button').click()")
    browser.wait_for(f"{visible} === 3")
