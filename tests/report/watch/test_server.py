"""The page's server over plain HTTP: what it answers, what it refuses, and when a change arrives."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fedguild.core.errors import FedGuildError
from fedguild.federation.site import server_state
from fedguild.measuring.log.activity import ActivityLog
from fedguild.report.watch import following, grid_view
from fedguild.report.watch import server as serving
from fedguild.report.watch.following import Follower
from fedguild.report.watch.server import WatchServer
from tests.report.watch.folders import comparison, live_run, one_more_round


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    running = WatchServer(live_run(tmp_path / "run"))
    running.begin()
    yield running
    running.end()


def ask(
    server: WatchServer,
    path: str = "",
    method: str = "GET",
    *,
    inside: bool = True,
    headers: dict[str, str] | None = None,
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, (server.base if inside else "") + path, headers=headers or {})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


class Stream:
    """The events of a page, as a browser receives them."""

    def __init__(self, server: WatchServer, path: str = "events", known: str = "") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        self._connection.request("GET", server.base + path, headers={"Last-Event-ID": known} if known else {})
        self.answer = self._connection.getresponse()
        self.last = ""

    def next(self) -> dict[str, Any]:
        found = next(self.rest(), None)
        assert found is not None, "the stream has ended"
        return found

    def rest(self) -> Iterator[dict[str, Any]]:
        while line := self.answer.readline().decode():
            if line.startswith("id: "):
                self.last = line[4:].strip()
            if line.startswith("data: "):
                yield dict(json.loads(line[6:]))

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


def test_the_page_and_what_it_loads_come_from_here_alone(server: WatchServer) -> None:
    status, headers, content = ask(server)
    page = content.decode()
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    loads = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(loads) == 4
    for load in loads:
        assert load.startswith(server.base)
        status, headers, _ = ask(server, load, inside=False)
        assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
    for name in ("page.js", "page.css", "style.css"):
        text = ask(server, name)[2].decode()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|innerHTML|eval\(", text)


@pytest.fixture
def polled_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Follower, "start", Follower.refresh)
    monkeypatch.setattr(serving, "PING_SECONDS", 3600.0)


@pytest.mark.usefixtures("polled_by_hand")
def test_the_poll_after_a_change_sends_it(tmp_path: Path) -> None:
    server = WatchServer(live_run(tmp_path / "run"))
    server.begin()
    stream = Stream(server)
    assert stream.next()["reset"]
    ActivityLog(tmp_path / "run").append("message", text="Something new")
    server.follower.refresh()
    change = stream.next()
    assert [row["text"] for row in change["parts"]["log"].values()] == ["Something new"]
    assert set(change["parts"]) == {"log"}
    one_more_round(tmp_path / "run", 7)
    server.follower.refresh()
    assert list(stream.next()["parts"]["rounds"]) == ["7"]
    stream.close()
    server.end()


def test_a_change_waits_less_than_a_second_for_all_pauses_together() -> None:
    script = files("fedguild").joinpath("report/watch/page/page.js").read_text()
    (pause,) = re.findall(r"^const pauseMilliseconds = (\d+);$", script, flags=re.MULTILINE)
    assert script.count("pauseMilliseconds") == 2
    slowest = max(grid_view.SCAN_SECONDS, following.LOOK_SECONDS)
    assert following.POLL_SECONDS + slowest + int(pause) / 1000 < 1


def test_a_page_that_comes_back_gets_what_it_missed(server: WatchServer, tmp_path: Path) -> None:
    stream = Stream(server)
    stream.next()
    known = stream.last
    stream.close()
    one_more_round(tmp_path / "run", 7)
    again = Stream(server, known=known)
    change = again.next()
    assert (change["reset"], list(change["parts"]["rounds"])) == (False, ["7"])
    again.close()
    odd = Stream(server, known="7-<script>")
    assert odd.next()["reset"]
    odd.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(server: WatchServer, method: str) -> None:
    status, headers, _ = ask(server, "state", method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "rebound.example:80"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": "127.0.0.1.rebound.example"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "http://rebound.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}, 200),
    ],
)
def test_other_names_and_other_sites_are_refused(server: WatchServer, headers: dict[str, str], status: int) -> None:
    assert ask(server, "state", headers=headers)[0] == status


def test_without_the_secret_there_is_nothing(server: WatchServer) -> None:
    for path in ("/", "/state", "/events", "/page.js", "/x/state", server.base[:-2] + "/state", server.base[:-1]):
        assert ask(server, path, inside=False)[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        *(
            "../config.yaml",
            "..%2fconfig.yaml",
            "config.yaml",
            "metrics.jsonl",
            ".lock.json",
            "report.html",
            "page.html",
        ),
        *("run/0/", "run/-1/", "run/1e3/state", "run/../state", "run/0/../state", "/etc/passwd", "page.js/", "state/"),
        *("page/0", "page/0/", "page/../config.yaml", "page/config.yaml"),
    ],
)
def test_no_path_leads_to_a_file(server: WatchServer, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_the_report_is_shown_without_scripts(server: WatchServer, tmp_path: Path) -> None:
    assert ask(server, "report")[0] == 404
    (tmp_path / "run/report.html").write_text("<!doctype html><p>report")
    status, headers, content = ask(server, "report")
    assert (status, content) == (200, b"<!doctype html><p>report")
    assert headers.get_all("Content-Security-Policy") == [serving._REPORT_POLICY]
    assert "script-src" not in serving._REPORT_POLICY


def test_a_cell_has_a_page_of_its_own(tmp_path: Path) -> None:
    server = WatchServer(comparison(tmp_path / "grid"))
    server.begin()
    try:
        runs = json.loads(ask(server, "state")[2])["parts"]["runs"]
        number = next(key for key, run in runs.items() if run["word"] == "running")
        assert ask(server, f"run/{number}/")[2] == ask(server)[2]
        cell = json.loads(ask(server, f"run/{number}/state")[2])
        assert cell["parts"]["page"]["now"]["round"] == 7
        finished = next(key for key, run in runs.items() if run["has_report"])
        assert ask(server, f"run/{finished}/report")[0] == 200
        stream = Stream(server, f"run/{number}/events")
        assert stream.next()["parts"]["page"]["facts"]["kind"] == "run"
        stream.close()
        assert ask(server, "run/4/state")[0] == 404
    finally:
        server.end()


def test_the_page_of_a_comparison_is_shown_without_scripts(tmp_path: Path) -> None:
    folder = comparison(tmp_path / "grid")
    server = WatchServer(folder, state_of=server_state)
    server.begin()
    try:
        assert json.loads(ask(server, "state")[2])["parts"]["page"]["facts"]["pages"] == []
        assert ask(server, "page/0")[0] == 404
        (folder / "comparison.html").write_text("<!doctype html><p>comparison")
        server.follower.view._scanned = -1.0
        server.follower.refresh()
        pages = json.loads(ask(server, "state")[2])["parts"]["page"]["facts"]["pages"]
        assert pages == [{"kind": "comparison", "name": "grid", "place": "."}]
        status, headers, content = ask(server, "page/0")
        assert (status, content) == (200, b"<!doctype html><p>comparison")
        assert headers.get_all("Content-Security-Policy") == [serving._REPORT_POLICY]
        assert ask(server, "page/1")[0] == 404
    finally:
        server.end()


def test_an_open_page_gets_the_last_change_before_the_end(tmp_path: Path) -> None:
    """Other changes may come before it, such as of the time that has passed."""
    server = WatchServer(live_run(tmp_path / "run"))
    server.begin()
    stream = Stream(server)
    stream.next()
    (tmp_path / "run/.lock.json").unlink()
    ActivityLog(tmp_path / "run").append("ended")
    server.end()
    pages = [event["parts"].get("page", {}) for event in stream.rest()]
    assert [page["standing"]["word"] for page in pages if "standing" in page][-1] == "finished"
    stream.close()


def test_a_port_that_is_taken_is_named(server: WatchServer, tmp_path: Path) -> None:
    with pytest.raises(FedGuildError, match=f"Port {server.server_port} of 127.0.0.1 cannot be used"):
        WatchServer(tmp_path / "run", server.server_port)


def test_it_listens_on_loopback_alone(server: WatchServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_head_is_get_without_the_content(server: WatchServer) -> None:
    status, headers, content = ask(server, method="HEAD")
    assert (status, content) == (200, b"")
    assert int(headers["Content-Length"]) == len(ask(server)[2])
    assert ask(server, "events", method="HEAD")[::2] == (200, b"")


def test_open_pages_are_limited(server: WatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STREAMS", 1)
    stream = Stream(server)
    stream.next()
    assert ask(server, "events")[0] == 503
    stream.close()
