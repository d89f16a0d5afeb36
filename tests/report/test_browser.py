"""The written pages in a real browser: nothing is cut or wider than the page, on a wide one and on a phone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedguild.measuring.log.folder import load_run
from fedguild.report.html import write_index, write_sweep
from fedguild.report.sweep import tabulate
from tests.report.watch.browser import CUT, RIGHT

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
    for page, title in [(run_page, "Score"), (personal_page, "Own model"), (comparison_page, "Mean")]:
        browser.open(page.as_uri())
        browser.wait_for(f"location.href === '{page.as_uri()}' && document.readyState === 'complete'")
        assert browser.value(RIGHT.format(title=title)) <= 390, "the mean is seen without scrolling"
    assert browser.problems == []
