"""watch, and --watch beside other commands: what is opened, and that it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from fedguild.cli import watch
from tests.cli.conftest import FakeExperiment, Invoke
from tests.report.runs import write_run


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that the browser was told to open."""
    addresses: list[str] = []
    monkeypatch.setattr(watch.webbrowser, "open", addresses.append)
    monkeypatch.setenv("DISPLAY", ":0")
    return addresses


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presses Ctrl-C as soon as the page is served."""

    class Pressed:
        def wait(self) -> None:
            raise KeyboardInterrupt

    class Threads:
        Thread: Callable[..., threading.Thread] = staticmethod(threading.Thread)
        Event = Pressed

    monkeypatch.setattr(watch, "threading", Threads)


@pytest.mark.usefixtures("at_once")
def test_watch_says_where_the_page_is_and_ends_with_ctrl_c(invoke: Invoke, opened: list[str], tmp_path: Path) -> None:
    write_run(tmp_path / "runs/flame", rounds=1)
    result = invoke("watch", "runs/flame", "--no-browser")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("Watching runs/flame: http://127.0.0.1:")
    assert opened == []
    with pytest.raises(OSError, match="refused"):
        urlopen(result.stderr.split()[2], timeout=5)


@pytest.mark.usefixtures("at_once")
def test_watch_waits_for_a_run_that_does_not_exist(invoke: Invoke, opened: list[str], tmp_path: Path) -> None:
    result = invoke("watch", "runs/later")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "runs").exists()


def test_a_run_is_watched_until_it_ends(
    invoke: Invoke, experiment: FakeExperiment, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = []
    run = experiment.run

    def watched(*arguments: object, **more: object) -> object:
        (address,) = opened
        answered.append(urlopen(address, timeout=10).status)
        return run(*arguments, **more)

    monkeypatch.setattr(watch.threading, "Thread", _AtOnce)
    monkeypatch.setattr(experiment, "run", watched)
    result = invoke("run", "flame/tiny-tasks", "--output", "out", "--watch")
    assert result.exit_code == 0, result.output
    assert answered == [200]
    with pytest.raises(OSError, match="refused"):
        urlopen(opened[0], timeout=5)


class _AtOnce(threading.Thread):
    """A thread whose work is done when `start` returns, if it is to open the browser."""

    def start(self) -> None:
        opens = bool(self._args) and str(self._args[0]).startswith("http")  # type: ignore[attr-defined]
        super().start()
        if opens:
            self.join()


def test_without_a_display_no_browser_takes_over_the_terminal(
    opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    watch._open("http://127.0.0.1:1/")
    assert opened == []
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    watch._open("http://127.0.0.1:1/")
    assert opened == ["http://127.0.0.1:1/"]


def test_watching_a_detached_run_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("federation", "run", "guild/server", "--watch", "--detach")
    assert result.exit_code == 2
    assert "fedguild watch guild/server" in result.stderr


def test_report_of_a_folder_of_runs_is_its_index(invoke: Invoke, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", rounds=1)
    result = invoke("report", "runs")
    assert (result.exit_code, result.stdout) == (0, "runs/index.html\n")
    result = invoke("report", ".")
    assert (result.exit_code, result.stdout) == (0, "index.html\n")
