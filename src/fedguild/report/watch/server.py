"""The page's server: local, read-only, standard library only.

It listens on 127.0.0.1, answers GET and HEAD, and refuses requests under another host's name (DNS rebinding) or from
another site's page. The address contains a secret, because other users of the machine may not read the run's folder. A
request names a run by its number, never by a path.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
import time
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import fedguild
from fedguild.core.errors import FedGuildError
from fedguild.measuring.log.index import REPORT_FILE
from fedguild.report.watch.following import Follower, StateOf, no_server
from fedguild.report.watch.grid_view import GridView

LOOPBACK = "127.0.0.1"
STREAMS = 32
"""Pages that may be open at the same time."""
PING_SECONDS = 10.0
UNUSED_SECONDS = 60.0
"""A cell's run is followed for this long after its page was closed."""
GOODBYE_SECONDS = 2.0
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_FILES = {
    "page.js": ("report/watch/page/page.js", "text/javascript; charset=utf-8"),
    "page.css": ("report/watch/page/page.css", "text/css; charset=utf-8"),
    "style.css": ("report/templates/style.css", "text/css; charset=utf-8"),
    "icon.svg": ("report/watch/page/icon.svg", "image/svg+xml"),
}
"""Name in the address -> the package's file and its type."""
_PLACE = re.compile(r"(?:run/(?P<number>\d{1,6})/)?(?P<name>[a-z.]*)|page/(?P<page>\d{1,6})")


class WatchServer(ThreadingHTTPServer):
    """Serves the page of a folder.

    Args:
        folder: A run, a comparison, a federation's server folder or a folder of runs; it need not exist yet.
        port: The port; 0 for any that is free.
        state_of: Returns the run's state folder if a folder is a federation's server folder.

    Raises:
        FedGuildError: the port is taken.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, port: int = 0, state_of: StateOf = no_server) -> None:
        self.follower = Follower(folder, state_of=state_of)
        self._cells: dict[int, Follower] = {}
        self._guard = threading.Lock()
        self._key = secrets.token_urlsafe(12)
        self.streams: dict[int, Follower] = {}
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise FedGuildError(
                f"Port {port} of {LOOPBACK} cannot be used: {error.strerror or error}.", "Choose another with --port."
            ) from error

    @property
    def hosts(self) -> frozenset[str]:
        """The accepted values of the header `Host`."""
        return frozenset(f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost"))

    @property
    def base(self) -> str:
        """The path below which everything is served."""
        return f"/{self._key}/"

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}{self.base}"

    def begin(self) -> None:
        """Starts the follower and a thread that serves."""
        self.follower.start()
        threading.Thread(target=self.serve_forever, args=(0.05,), name="watch", daemon=True).start()

    def end(self) -> None:
        """Gives open pages a moment to receive what they lack, then stops."""
        self.follower.refresh()
        self.follower.stop()
        for cell in list(self._cells.values()):
            cell.refresh()
            cell.stop()
        deadline = time.monotonic() + GOODBYE_SECONDS
        while self.streams and time.monotonic() < deadline:
            time.sleep(0.02)
        self.shutdown()
        self.server_close()

    def follower_of(self, number: int | None) -> Follower | None:
        """Returns the follower of the folder, or of the run with a number in it; None if there is no such run."""
        if number is None:
            return self.follower
        view = self.follower.view
        if not isinstance(view, GridView) or number >= len(view.folders):
            return None
        with self._guard:
            for other, cell in list(self._cells.items()):
                if time.monotonic() - cell.used > UNUSED_SECONDS and cell not in list(self.streams.values()):
                    self._cells.pop(other).stop()
            if number not in self._cells:
                self._cells[number] = Follower(view.folders[number])
                self._cells[number].start()
            self._cells[number].used = time.monotonic()
            return self._cells[number]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stays silent: a page that is closed breaks its connection."""


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version = f"FedGuild/{fedguild.__version__}"
    sys_version = ""
    timeout = 60.0

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _refuse_method(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"Only GET and HEAD.\n", headers={"Allow": "GET, HEAD"})
        self.close_connection = True

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Stays silent: the terminal belongs to the run."""

    def _answer(self, *, body: bool) -> None:
        server = self.server
        self._body = body
        if self.headers.get_all("Host", []) != [self.headers.get("Host")] or self.headers["Host"] not in server.hosts:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"This server answers to 127.0.0.1 and localhost alone.\n")
            return
        if not self._may_ask():
            self._send(HTTPStatus.FORBIDDEN, b"Another site's page may not ask.\n")
            return
        path = self.path.partition("?")[0]
        found = _PLACE.fullmatch(path.removeprefix(server.base))
        if not path.startswith(server.base) or found is None:
            self._send(HTTPStatus.NOT_FOUND, b"There is nothing here.\n")
            return
        if found["page"] is not None:
            self._group_page(int(found["page"]))
            return
        number = None if found["number"] is None else int(found["number"])
        name = found["name"]
        if name in _FILES and number is None:
            source, kind = _FILES[name]
            self._send(HTTPStatus.OK, _package_file(source), kind)
            return
        follower = server.follower_of(number) if name in ("", "state", "events", "report") else None
        if follower is None:
            self._send(HTTPStatus.NOT_FOUND, b"There is nothing here.\n")
        elif name == "state":
            self._send(HTTPStatus.OK, _json(follower.board.since()), "application/json")
        elif name == "events":
            self._stream(follower)
        elif name == "report":
            self._report(follower)
        else:
            page = _package_file("report/watch/page/index.html").replace(b"{base}", server.base.encode())
            self._send(HTTPStatus.OK, page, "text/html; charset=utf-8")

    def _may_ask(self) -> bool:
        """Refuses requests from other sites. A link to the page, which a user follows, may be anywhere."""
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        if origin is not None and origin.removeprefix("http://") not in self.server.hosts:
            return False
        is_link = self.headers.get("Sec-Fetch-Mode") == "navigate" and self.headers.get("Sec-Fetch-Dest") == "document"
        return site in ("none", "same-origin") or is_link

    def _report(self, follower: Follower) -> None:
        self._written(getattr(follower.view, "folder", follower.folder) / REPORT_FILE)

    def _group_page(self, number: int) -> None:
        """Sends the page of a comparison or sweep by its number."""
        view = self.server.follower.view
        if not isinstance(view, GridView) or number >= len(view.pages):
            self._send(HTTPStatus.NOT_FOUND, b"There is nothing here.\n")
            return
        page = view.pages[number]
        self._written(view.folder / page.place / page.file)

    def _written(self, path: Path) -> None:
        """Sends a page that a run has written, without permission to run scripts."""
        try:
            content = path.read_bytes()
        except OSError:
            self._send(HTTPStatus.NOT_FOUND, b"There is no report yet.\n")
            return
        self._send(HTTPStatus.OK, content, "text/html; charset=utf-8", {"Content-Security-Policy": _REPORT_POLICY})

    def _stream(self, follower: Follower) -> None:
        """Sends what the page has not seen, then every change as it comes, until either side closes."""
        if len(self.server.streams) >= STREAMS:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, b"Too many pages are open.\n")
            return
        epoch, version = _last_event(self.headers.get("Last-Event-ID", ""))
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self._send_headers({"Content-Type": "text/event-stream; charset=utf-8", "Connection": "close"})
        if not self._body:
            return
        board, stream = follower.board, id(self)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.streams[stream] = follower
        try:
            self.wfile.write(b"retry: 1000\n\n")
            while True:
                closed = board.closed
                change = board.since(epoch, version)
                if change["reset"] or change["version"] != version:
                    epoch, version = change["epoch"], change["version"]
                    self.wfile.write(b"id: %d-%d\ndata: %s\n\n" % (epoch, version, _json(change)))
                    self.wfile.flush()
                follower.used = time.monotonic()
                if closed:
                    return
                if not board.wait(version, PING_SECONDS):
                    self.wfile.write(b": still here\n\n")
                    self.wfile.flush()
        except OSError:
            return
        finally:
            self.server.streams.pop(stream, None)

    def _send(
        self,
        status: HTTPStatus,
        content: bytes,
        kind: str = "text/plain; charset=utf-8",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self._send_headers({"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})})
        if getattr(self, "_body", True):
            self.wfile.write(content)

    def _send_headers(self, headers: dict[str, str]) -> None:
        for name, value in {"Content-Security-Policy": _CONTENT_SECURITY_POLICY, **_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _last_event(identifier: str) -> tuple[int, int]:
    """Returns the epoch and version that a page has; those of an empty page if it names none."""
    found = re.fullmatch(r"(\d{1,9})-(\d{1,12})", identifier)
    return (int(found[1]), int(found[2])) if found else (-1, 0)


@cache
def _package_file(name: str) -> bytes:
    return files("fedguild").joinpath(name).read_bytes()
