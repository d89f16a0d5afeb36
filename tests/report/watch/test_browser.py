"""A machine without a Chromium: its browser tests are skipped and said to be, or fail where they are required."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import conftest
from tests.report.watch import browser


def test_without_a_chromium_a_test_is_skipped_or_fails_if_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "CHROMIUM", None)
    monkeypatch.delenv("FEDGUILD_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Chromium"):
        browser.require_chromium()
    monkeypatch.setenv("FEDGUILD_BROWSER", "required")
    with pytest.raises(pytest.fail.Exception, match="FEDGUILD_BROWSER=required, but no Chromium is on the PATH"):
        browser.require_chromium()
    monkeypatch.setattr(browser, "CHROMIUM", "/usr/bin/chromium")
    browser.require_chromium()


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["Skipped: no Chromium", "Skipped: no Chromium", "Skipped: needs openssl"], ["no Chromium (2)"]),
        (["Skipped: needs openssl"], []),
    ],
)
def test_the_summary_says_that_browser_tests_were_skipped(reasons: list[str], said: list[str]) -> None:
    lines: list[str] = []
    skipped = [SimpleNamespace(longrepr=("tests/conftest.py", 1, reason)) for reason in reasons]
    reporter = SimpleNamespace(stats={"skipped": skipped}, write_line=lambda text, **_: lines.append(text))
    conftest.pytest_terminal_summary(reporter)  # type: ignore[arg-type]
    assert lines == [f"browser tests skipped: {each}" for each in said]
