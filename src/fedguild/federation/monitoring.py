"""`/healthz` and `/metrics` of a server or a site, over plain HTTP and on loopback by default.

Figures are read from the logs that the processes write (`activity.jsonl`, `audit.jsonl`, `metrics.jsonl`), so a run
pays for them only when they are asked for. They hold no text, no score and no key.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.core.tail import Tail
from fedguild.federation.processes import Child
from fedguild.federation.site import MonitorSettings
from fedguild.measuring.log.activity import ActivityLog
from fedguild.report.watch.board import Board
from fedguild.report.watch.federation_view import FederationView

if TYPE_CHECKING:
    from prometheus_client.core import Metric

KINDS = ("hello", "train", "score", "deliver", "secure")


class Monitor(ThreadingHTTPServer):
    """Answers `/healthz` (200 if every process runs, else 503) and `/metrics` (Prometheus' text format).

    Args:
        settings: Where to listen; its `port` is not None.
        children: The processes to watch.
        folder: The folder whose disk is watched.
        figures: Yields the figures of the server or the site.
        certificates: Name -> a certificate whose end is told, a PEM file.

    Raises:
        ConfigError: prometheus-client is not installed.
        FedGuildError: the port cannot be used.
    """

    daemon_threads = True

    def __init__(
        self,
        settings: MonitorSettings,
        children: Sequence[Child],
        folder: Path,
        figures: Callable[[], Iterator[Metric]],
        certificates: Mapping[str, Path],
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise ConfigError(
                "monitor.port is set, but prometheus-client is not installed.", "pip install 'fedguild[metrics]'"
            ) from error
        assert settings.port is not None
        try:
            super().__init__((settings.host, settings.port), _Handler)
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            raise FedGuildError(
                f"The monitor cannot listen at {where}: {error.strerror or error}.", "Set another monitor.port."
            ) from error
        self.children, self._folder, self._figures, self._certificates = children, folder, figures, certificates
        self._one_at_a_time = threading.Lock()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        threading.Thread(target=self.serve_forever, args=(0.2,), name="monitor", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"

    def running(self) -> dict[str, bool]:
        return {child.name: child.pid > 0 and child.exit_status() is None for child in self.children}

    def describe(self) -> list[Metric]:
        """Returns nothing, so that nothing is read before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._one_at_a_time:
            yield gauge("process_up", "Whether a process runs.", ("process",), self.running())
            starts = {child.name: max(0, child.starts - 1) for child in self.children}
            yield counter("process_restarts", "Restarts of a process.", ("process",), starts)
            free = shutil.disk_usage(self._folder).free
            yield gauge("disk_free_bytes", "Free bytes of the disk with the logs and models.", (), {(): free})
            ends = {name: _end_of(path) for name, path in self._certificates.items()}
            yield gauge("certificate_end_timestamp_seconds", "When a certificate expires.", ("certificate",), ends)
            yield from self._figures()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Monitor
    server_version, sys_version = "FedGuild", ""
    timeout = 10.0

    def do_GET(self) -> None:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        if self.path == "/metrics":
            self._send(HTTPStatus.OK, generate_latest(self.server.registry), CONTENT_TYPE_LATEST)
        elif self.path == "/healthz":
            running = self.server.running()
            whole = all(running.values())
            body = json.dumps({"status": "ok" if whole else "failing", "processes": running}).encode()
            self._send(HTTPStatus.OK if whole else HTTPStatus.SERVICE_UNAVAILABLE, body, "application/json")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"/healthz or /metrics\n", "text/plain")

    def log_message(self, format: str, *args: Any) -> None:
        """Stays silent: a scrape is no event."""

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


def _end_of(certificate: Path) -> float:
    """Returns when a certificate expires, in seconds since 1970; 0 for a file that holds none."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return 0.0


class ServerFigures:
    """The figures of a server, from its state folder."""

    def __init__(self, state: Path) -> None:
        self._view = FederationView(state, Board())

    def __call__(self) -> Iterator[Metric]:
        while self._view.refresh():
            pass
        view, total = self._view, self._view.totals()
        keys = Counter(row.key for row in view.clients.values() if row.key)
        running = view.standing().word == "running"
        seen = [row.online for row in view.clients.values() if row.online is not None] if running else []
        yield gauge("run_in_progress", "Whether a run is in progress.", (), {(): running})
        yield gauge("rounds_planned", "Rounds of the run.", (), {(): view.planned_rounds})
        yield gauge("rounds_complete", "The last complete round.", (), {(): total["round"]})
        yield gauge("round_seconds", "Mean time of the last ten rounds.", (), {(): total["round_seconds"] or 0.0})
        yield gauge("clients", "Clients by the state of their key.", ("key",), keys)
        online = {(): sum(seen)} if seen else {}  # no sample while nothing looks, rather than an old one
        yield gauge("clients_online", "Clients that were connected when the run last looked.", (), online)
        for name, key, meaning in (
            ("upload_bytes", "upload_bytes", "Bytes of the uploads of complete rounds."),
            ("download_bytes", "download_bytes", "Bytes of the downloads of complete rounds."),
            ("uploads_rejected", "rejected", "Uploads that were not aggregated."),
            ("uploads_late", "late", "Uploads of an earlier round."),
        ):
            yield counter(name, meaning, (), {(): total[key]})
        if "epsilon" in total["privacy"]:
            yield gauge("epsilon", "The largest privacy loss of a client.", (), {(): total["privacy"]["epsilon"]})


class SiteFigures:
    """The figures of a site, from the log of the requests that it was sent."""

    def __init__(self, work: Path) -> None:
        self._log = Tail(work / ActivityLog.FILE)
        self._forget()

    def _forget(self) -> None:
        self._requests: Counter[tuple[str, str]] = Counter()
        self._sent, self._last = 0, 0.0

    def __call__(self) -> Iterator[Metric]:
        while True:
            lines, began = self._log.read()
            if began:
                self._forget()
            for line in lines:
                self._take(line)
            if not lines:
                break
        yield counter("requests", "Requests of the server.", ("kind", "outcome"), self._requests)
        yield counter("sent_bytes", "Bytes of the answers.", (), {(): self._sent})
        yield gauge("last_request_timestamp_seconds", "When the last request came; 0: never.", (), {(): self._last})

    def _take(self, line: bytes) -> None:
        try:
            event = from_json(line)
            if event["event"] == "request" and event["kind"] in KINDS:
                self._requests[event["kind"], event["outcome"]] += 1
                self._sent, self._last = self._sent + int(event["sent_bytes"]), float(event["time"])
        except (ValueError, KeyError, TypeError):
            return


def gauge(name: str, meaning: str, labels: Sequence[str], values: Any) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(f"fedguild_{name}", meaning, labels=labels), values)


def counter(name: str, meaning: str, labels: Sequence[str], values: Any) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(f"fedguild_{name}", meaning, labels=labels), values)


def _filled(family: Any, values: Any) -> Metric:
    for key, value in values.items():
        family.add_metric((key,) if isinstance(key, str) else key, float(value))
    found: Metric = family
    return found
