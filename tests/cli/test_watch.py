"""watch, and --watch beside other commands: what is opened, and that it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from fedguild.cli import watch
from tests.cli.conftest import Invoke
from tests.report.runs import write_run
from tests.report.watch.folders import federation


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
    assert "does not exist yet" not in result.stderr
    assert "runs/flmae does not exist yet; the page waits for it." in invoke("watch", "runs/flmae").stderr


RUN = ("run", "flame/tiny-tasks", "--output", "out")
WATCHED = [
    (RUN, "out", "run"),
    (("resume", "out"), "out", "run"),
    (("compare", "flame/tiny-tasks", "--seeds", "0", "--output", "grid"), "grid", "grid"),
    (("compare", "flame/tiny-tasks", "--seeds", "0"), "runs/compare", "grid"),
    (("sweep", "flame/tiny-tasks", "method.rank=4,8", "--seeds", "0", "--output", "grid"), "grid", "grid"),
    (("sweep", "flame/tiny-tasks", "method.rank=4,8", "--seeds", "0"), "runs/sweep-flame-tiny-tasks", "grid"),
]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("arguments", "folder", "kind"), WATCHED)
def test_a_command_is_watched_until_it_ends(invoke, experiment, opened, monkeypatch, arguments, folder, kind):
    if arguments[0] == "resume":
        invoke(*RUN)
    seen: list[dict[str, Any]] = []
    for name in ("run", "resume"):
        monkeypatch.setattr(experiment, name, _looking(getattr(experiment, name), opened, seen))
    monkeypatch.setattr(watch.threading, "Thread", _AtOnce)
    assert opened == []
    result = invoke(*arguments, "--watch")
    assert result.exit_code == 0, result.output
    assert f"Watching {folder}: {opened[0]}" in result.stderr
    assert {facts["folder"] for facts in seen} == {folder}
    assert {facts["kind"] for facts in seen} <= {kind, "waiting"}
    with pytest.raises(OSError, match="refused"):
        urlopen(opened[0], timeout=5)


def test_a_federation_is_watched_until_its_run_ends(invoke, opened, tmp_path, monkeypatch):
    seen: list[dict[str, Any]] = []

    def run_federation(*_: object, **__: object) -> dict[str, object]:
        return {"status": "finished", "folder": "union/server/state/run"}

    federation(tmp_path / "union/server")
    looking = _looking(run_federation, opened, seen)
    monkeypatch.setattr("fedguild.federation.operations.run_federation", looking)
    monkeypatch.setattr(watch.threading, "Thread", _AtOnce)
    result = invoke("federation", "run", "union/server", "--watch")
    assert result.exit_code == 0, result.output
    assert result.stdout == "union/server/state/run\n"
    assert [facts["kind"] for facts in seen] == ["federation"]
    with pytest.raises(OSError, match="refused"):
        urlopen(opened[0], timeout=5)


def _looking(work: Callable[..., Any], opened: list[str], seen: list[dict[str, Any]]) -> Callable[..., Any]:
    def watched(*arguments: object, **more: object) -> Any:
        (address,) = opened
        assert urlopen(address, timeout=10).status == 200
        seen.append(json.load(urlopen(f"{address}state", timeout=10))["parts"]["page"]["facts"])
        return work(*arguments, **more)

    return watched


class _AtOnce(threading.Thread):
    """A thread whose work is done when `start` returns, if it is to open the browser."""

    def start(self) -> None:
        opens = bool(self._args) and str(self._args[0]).startswith("http")  # type: ignore[attr-defined]
        super().start()
        if opens:
            self.join()


def test_without_a_display_no_browser_takes_over_the_terminal(opened, monkeypatch):
    monkeypatch.setattr(watch.sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    watch._open("http://127.0.0.1:1/")
    assert opened == []
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    watch._open("http://127.0.0.1:1/")
    assert opened == ["http://127.0.0.1:1/"]


def test_report_of_a_folder_of_runs_is_its_index(invoke: Invoke, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", rounds=1)
    result = invoke("report", "runs")
    assert (result.exit_code, result.stdout) == (0, "runs/index.html\n")
    result = invoke("report", ".")
    assert (result.exit_code, result.stdout) == (0, "index.html\n")
