"""`/healthz` and `/metrics` of a server and a site."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.federation.monitoring import Monitor, ServerFigures, SiteFigures
from fedguild.federation.operations import monitored
from fedguild.federation.site import MonitorSettings
from fedguild.measuring.log.activity import ActivityLog
from tests.federation.test_processes import SLEEPS, child
from tests.report.watch.folders import federation

parser = pytest.importorskip("prometheus_client.parser")
HERE = MonitorSettings(port=0)


def samples(monitor: Monitor) -> dict[tuple[str, ...], float]:
    """Returns (name, its labels' values ...) -> value of everything at `/metrics`."""
    text = urlopen(f"{monitor.url}/metrics").read().decode()
    families = parser.text_string_to_metric_families(text)
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Monitor]:
    processes = [child(SLEEPS, tmp_path, name) for name in ("trainer", "node")]
    for each in processes:
        each.start()
    monitor = Monitor(HERE, processes, tmp_path, SiteFigures(tmp_path), {})
    yield monitor
    monitor.end()
    for each in processes:
        each.terminate()


def test_a_site_is_healthy_while_all_of_its_processes_run(site: Monitor) -> None:
    assert json.load(urlopen(f"{site.url}/healthz")) == {"status": "ok", "processes": {"trainer": True, "node": True}}
    trainer = site.children[0]
    os.kill(trainer.pid, signal.SIGKILL)
    while trainer.exit_status() is None:
        time.sleep(0.01)
    with pytest.raises(HTTPError) as failing:
        urlopen(f"{site.url}/healthz")
    assert failing.value.code == 503
    assert json.load(failing.value) == {"status": "failing", "processes": {"trainer": False, "node": True}}
    assert samples(site)["fedguild_process_up", "trainer"] == 0
    trainer.start()
    found = samples(site)
    assert found["fedguild_process_up", "trainer"] == 1
    assert (found["fedguild_process_restarts_total", "trainer"], found["fedguild_process_restarts_total", "node"]) == (
        1,
        0,
    )


def test_a_site_counts_the_requests_that_it_was_sent(site: Monitor, tmp_path: Path) -> None:
    assert samples(site)["fedguild_last_request_timestamp_seconds",] == 0
    log, told = ActivityLog(tmp_path), {"run": "0" * 32, "round": 1, "seconds": 0.5, "received_bytes": 7}
    for outcome in ("answered", "failed", "answered"):
        log.append("request", kind="train", outcome=outcome, sent_bytes=100, **told)
    log.append("request", kind="<another>", outcome="answered", sent_bytes=100, **told)
    found = samples(site)
    assert found["fedguild_requests_total", "train", "answered"] == 2
    assert found["fedguild_requests_total", "train", "failed"] == 1
    assert found["fedguild_sent_bytes_total",] == 300
    assert abs(found["fedguild_last_request_timestamp_seconds",] - time.time()) < 60
    assert not any("another" in name for key in found for name in key)


def test_a_server_shows_its_clients_and_the_run(tmp_path: Path) -> None:
    state = federation(tmp_path) / "state"
    monitor = Monitor(HERE, [], state, ServerFigures(state), {})
    try:
        found = samples(monitor)
    finally:
        monitor.end()
    keys = {key[1]: value for key, value in found.items() if key[0] == "fedguild_clients"}
    assert keys == {"joined": 3, "revoked": 1}
    assert found["fedguild_clients_online",] == 2
    assert (found["fedguild_rounds_complete",], found["fedguild_rounds_planned",]) == (6, 12)
    assert found["fedguild_round_seconds",] == pytest.approx(4.6)
    assert found["fedguild_uploads_rejected_total",] == 1
    assert found["fedguild_upload_bytes_total",] == 6 * 8 * (52_000 * 20 + 2_113)
    assert found["fedguild_run_in_progress",] == 1


@pytest.mark.parametrize("ending", [None, "ended", "stopped"])
def test_without_a_run_no_client_is_said_to_be_online(ending: str | None, tmp_path: Path) -> None:
    """Without an ending, its process was killed; after one, a client comes back for its model."""
    state = federation(tmp_path) / "state"
    monitor = Monitor(HERE, [], state, ServerFigures(state), {})
    try:
        assert samples(monitor)["fedguild_clients_online",] == 2
        if ending is not None:
            ActivityLog(state / "run").append(ending)
            ActivityLog(state / "run").append("online", clients=["client-001"])
        (state / "run" / ".lock.json").unlink()
        found = samples(monitor)
    finally:
        monitor.end()
    assert found["fedguild_run_in_progress",] == 0
    assert ("fedguild_clients_online",) not in found


def test_the_ends_of_certificates_are_told(tmp_path: Path) -> None:
    key, name = Ed25519PrivateKey.generate(), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    end = datetime(2031, 5, 6, tzinfo=UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, datetime(2026, 5, 6, tzinfo=UTC), end)
    (tmp_path / "ca.pem").write_bytes(builder.sign(key, None).public_bytes(Encoding.PEM))
    given = {"authority": tmp_path / "ca.pem", "server": tmp_path / "absent.pem"}
    monitor = Monitor(HERE, [], tmp_path, SiteFigures(tmp_path), given)
    try:
        found = samples(monitor)
    finally:
        monitor.end()
    ends = {key[1]: value for key, value in found.items() if key[0] == "fedguild_certificate_end_timestamp_seconds"}
    assert ends == {"authority": end.timestamp(), "server": 0}


def test_it_listens_on_this_machine_and_only_where_a_port_is_set(tmp_path: Path) -> None:
    said: list[str] = []
    with monitored(MonitorSettings(), [], tmp_path, said.append, SiteFigures, {}):
        assert said == []
    with monitored(HERE, [], tmp_path, said.append, SiteFigures, {}):
        assert said[0].startswith("http://127.0.0.1:")
        taken = MonitorSettings(port=int(said[0].split(":")[2].split("/")[0]))
        with pytest.raises(FedGuildError, match="The monitor cannot listen at ") as refused:
            Monitor(taken, [], tmp_path, SiteFigures(tmp_path), {})
    assert refused.value.hint == "Set another monitor.port."


def test_without_prometheus_client_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="prometheus-client is not installed") as refused:
        Monitor(HERE, [], tmp_path, SiteFigures(tmp_path), {})
    assert refused.value.hint == "pip install 'fedguild[metrics]'"
