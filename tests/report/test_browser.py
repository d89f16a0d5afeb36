"""The written pages in a real browser: nothing is cut or wider than the page, on a wide one and on a phone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.folder import load_run
from fedguild.measuring.log.records import EvaluationRecord, ObservationRecord, RunLog
from fedguild.measuring.log.samples import Sample, write_samples
from fedguild.report.html import write_comparison, write_index, write_report, write_sweep
from fedguild.report.sweep import tabulate
from fedguild.report.watch.server import WatchServer
from tests.report.runs import write_run
from tests.report.watch.browser import CUT, RIGHT, Browser

SHOWN = "[...document.querySelectorAll('svg.figure')].filter((one) => one.getBoundingClientRect().width)"
SMALL = f"{SHOWN}.filter((one) => one.getBoundingClientRect().width < one.viewBox.baseVal.width * 96 / 72 - 1).length"
"""Number of figures that are shown smaller than they were drawn, so that their text is small."""
CLIPPED = f"""
{SHOWN}.flatMap((figure) => {{
  const whole = figure.getBoundingClientRect();
  return [...figure.querySelectorAll('text')].filter((text) => {{
    const box = text.getBoundingClientRect();
    return box.left < whole.left - 1 || box.right > whole.right + 1 || box.top < whole.top - 1 ||
      box.bottom > whole.bottom + 1;
  }}).map((text) => text.textContent);
}})
"""
"""The texts of figures that reach beyond their figure."""


SCRIPT = "</style><img src=x onerror='ran=1'><script>ran=1</script>"
"""What somebody else may have written into a name, a label, a text or a model's answer."""


def hostile_run(folder: Path) -> Path:
    """A run that has `SCRIPT` wherever a text of others reaches a page."""
    write_run(folder, rounds=1, clients=2, layers=1, experts=2, rejected=[(1, 1, SCRIPT)])
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"name": SCRIPT, "method": {"name": SCRIPT, SCRIPT: SCRIPT}, "model": {"path": SCRIPT}}
    config["data"] |= {"dataset": SCRIPT}
    config["federation"]["budgets"][0]["name"] = SCRIPT
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(json.dumps({SCRIPT: SCRIPT}))
    partition = json.loads((folder / "partition.json").read_text())
    (folder / "partition.json").write_text(json.dumps(partition | {"labels": [SCRIPT, *partition["labels"][1:]]}))
    scored: dict[str, Any] = {"scope": "budget", "name": SCRIPT, "split": "test", "score": 0.5}
    scored["by_task"] = {SCRIPT: 0.5, "b": 0.5}
    seen = ObservationRecord(round=1, name=SCRIPT, rows=[SCRIPT], values=[[1.0]], unit=SCRIPT)
    RunLog(folder).append(*(EvaluationRecord(round=number, **scored) for number in (0, 1)), seen)
    said = dict.fromkeys(("budget", "prompt", "reference", "likeliest", "generated"), SCRIPT)
    write_samples(folder, [Sample(round=0, **said)])
    write_samples(folder, [Sample(round=1, **said)])
    log = ActivityLog(folder)
    log.append("begun")
    log.append("stage", text=SCRIPT)
    log.append("message", text=SCRIPT)
    log.append("round", round=2, rounds=2)
    log.append("asked", round=2, attempt=0, clients=[0, 1])
    log.append("delivered", client=0, reason=SCRIPT, needed=True)
    log.append("answered", client="client-001", kind="train", failure=SCRIPT)
    log.append("failed", reason=SCRIPT)
    return folder


def test_no_script_of_others_runs_on_any_page(browser: Browser, tmp_path: Path) -> None:
    runs = {name: [hostile_run(tmp_path / name)] for name in ("a", "b")}
    by_label = {SCRIPT: runs["a"], f"{SCRIPT} again": runs["b"]}
    pages = [write_report(runs["a"][0]), write_comparison(by_label, tmp_path, title=SCRIPT), write_index(tmp_path)]
    servers = [WatchServer(runs["a"][0]), WatchServer(tmp_path)]
    try:
        for server in servers:
            server.begin()
        for url in [*(page.as_uri() for page in pages), *(server.url for server in servers)]:
            browser.show(1280)
            browser.open(url)
            browser.wait_for(f"location.href === '{url}' && document.readyState === 'complete'")
            browser.wait_for("document.body.textContent.includes('<script>ran=1</script>')")
            browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            assert browser.value("typeof ran") == "undefined", url
            assert browser.value("document.querySelectorAll('img, script:not([src]), [onerror]').length") == 0, url
        assert browser.problems == []
    finally:
        browser.open("about:blank")
        for server in servers:
            server.end()


@pytest.fixture(scope="module")
def sweep_pages(folders: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The page of a sweep of one setting, and of one of two."""
    labels = list(folders)
    runs = {label: [load_run(folder) for folder in folders[label]] for label in labels}
    one = {label: {"training.learning_rate": f"{place}e-3"} for place, label in enumerate(labels)}
    both = {label: {**values, "method.rank": "8"} for label, values in one.items()}
    return [
        write_sweep(tabulate(list(values[labels[0]]), values, runs), folders, tmp_path_factory.mktemp("sweep"), "Sweep")
        for values in (one, both)
    ]


def test_written_pages_fit_a_wide_page_and_a_phone(browser, run_page, personal_page, comparison_page, sweep_pages):
    index = write_index(run_page.parents[1])
    pages = [run_page, personal_page, comparison_page, *sweep_pages, index]
    assert {page.name for page in pages} == {"report.html", "comparison.html", "sweep.html", "index.html"}
    for page in pages:
        browser.show(1280)
        browser.open(page.as_uri())
        browser.wait_for(f"location.href === '{page.as_uri()}' && document.readyState === 'complete'")
        browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        for width in (1280, 390):
            browser.show(width)
            browser.wait_for(f"innerWidth === {width}")
            place = (page.parts[-2:], width)
            assert browser.value("document.documentElement.scrollWidth") <= width, place
            assert browser.value(CUT) == 0, place
            assert browser.value(SMALL) == 0, place
            assert browser.value(CLIPPED) == [], place
            assert browser.value(f"{SHOWN}.length") > 0 or page == index, place
    for page, title in [(run_page, "Exact match"), (personal_page, "Own model"), (comparison_page, "Mean")]:
        browser.open(page.as_uri())
        browser.wait_for(f"location.href === '{page.as_uri()}' && document.readyState === 'complete'")
        assert browser.value(RIGHT.format(title=title)) <= 390, "the mean is seen without scrolling"
    assert browser.problems == []
