"""Faults of a federation that are found before it starts."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fedguild.core.errors import ConfigError
from fedguild.federation import checks
from fedguild.federation.project import write_project
from fedguild.federation.site import ServerSettings, load_server, load_site
from tests.ports import free_ports
from tests.runs.runs import says

pytest.importorskip("cryptography")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation") / "federation"
    port, _control_port, node_port = free_ports(3)
    write_project(folder, 2, "fedit/tiny-tasks", address=f"127.0.0.1:{port}", shared_data=True)
    site = folder / "client-000" / "site.yaml"
    site.write_text(site.read_text().replace("port: 9094", f"port: {node_port}"))
    return folder


@pytest.fixture
def copy(federation: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(federation, tmp_path / "federation"))


def faults_of_server(folder: Path) -> list[checks.Fault]:
    return list(checks.server_faults(folder / "server", load_server(folder / "server")))


def faults_of_site(folder: Path) -> list[checks.Fault]:
    return list(checks.site_faults(folder / "client-000", load_site(folder / "client-000")))


@contextmanager
def answering(certificates: Path, port: int) -> Iterator[None]:
    """An HTTPS server with a folder's certificate."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", port), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def certificates_again(folder: Path, days: int = 397) -> None:
    script = (folder / "make.sh").read_text().replace("-days 397", f"-days {days}")
    subprocess.run(["sh", "-c", script], cwd=folder, check=True, capture_output=True)


def test_a_new_federation_has_no_fault(federation: Path) -> None:
    assert not faults_of_server(federation)
    (fault,) = faults_of_site(federation)
    says(fault.message, "Nothing answers at 127.0.0.1:")
    assert not fault.fatal


def test_a_client_that_reaches_its_server_has_no_fault(federation: Path) -> None:
    with answering(federation / "server/certificates", load_server(federation / "server").port):
        assert not faults_of_site(federation)


def test_a_missing_certificate(copy: Path) -> None:
    (copy / "server/certificates/server.pem").unlink()
    (fault,) = faults_of_server(copy)
    says(fault.message, "certificates/server.pem is missing")
    assert fault.fatal


def test_a_certificate_of_another_authority(copy: Path) -> None:
    before = (copy / "server/certificates/ca.pem").read_bytes()
    for file in ("ca.pem", "ca.key"):
        (copy / "server/certificates" / file).unlink()
    certificates_again(copy / "server/certificates")
    with answering(copy / "server/certificates", load_server(copy / "server").port):
        (fault,) = faults_of_site(copy)
    says(fault.message, "was signed by an authority other than")
    assert fault.fatal
    (copy / "server/certificates/ca.pem").write_bytes(before)
    (fault,) = faults_of_server(copy)
    says(fault.message, "was not signed by the authority")


def test_a_certificate_that_expired(copy: Path) -> None:
    certificates_again(copy / "server/certificates", days=-1)
    (fault,) = faults_of_server(copy)
    says(fault.message, "The server's certificate", "expired on")


def test_a_certificate_is_renewed_by_the_authority_that_the_sites_know(copy: Path) -> None:
    folder = copy / "server/certificates"
    before = {name: (folder / name).read_bytes() for name in ("ca.pem", "ca.key", "server.pem")}
    certificates_again(folder, days=29)
    (fault,) = faults_of_server(copy)
    says(fault.message + fault.hint, "The server's certificate", "expires on", "in 28 days", "sh make.sh")
    assert not fault.fatal
    certificates_again(folder)
    assert not faults_of_server(copy)
    assert {name for name, content in before.items() if (folder / name).read_bytes() == content} == {"ca.pem", "ca.key"}
    with answering(folder, load_server(copy / "server").port):
        assert not faults_of_site(copy)


def test_a_second_authority_is_not_made_in_place_of_one_whose_key_is_kept_apart(copy: Path) -> None:
    folder = copy / "server/certificates"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "ca.key").rename(copy / "ca.key")
    generate = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout"]
    for key in (None, subprocess.run(generate, capture_output=True, check=True).stdout):
        if key is not None:
            (folder / "ca.key").write_bytes(key)
        done = subprocess.run(["sh", "make.sh"], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "ca.key is not that of ca.pem" in done.stderr
    (copy / "ca.key").replace(folder / "ca.key")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_certificate_with_another_key(copy: Path) -> None:
    shutil.copy(copy / "server/certificates/ca.key", copy / "server/certificates/server.key")
    (fault,) = faults_of_server(copy)
    says(fault.message, "is not the key of")


def test_a_certificate_that_the_servers_own_programs_do_not_trust(copy: Path) -> None:
    folder = copy / "server" / "certificates"
    script = (folder / "make.sh").read_text().replace(",IP:127.0.0.1", "").replace("kind=IP", "kind=DNS")
    subprocess.run(["sh", "-c", script], cwd=folder, check=True, capture_output=True)
    (fault,) = faults_of_server(copy)
    says(fault.message + fault.hint, "is not for 127.0.0.1", "subjectAltName")


def test_something_that_is_no_certificate(copy: Path) -> None:
    (copy / "client-000/ca.pem").write_text("hello")
    assert all("is not a certificate in PEM form" in fault.message for fault in faults_of_site(copy))


def test_a_missing_key_and_one_that_others_can_read(copy: Path) -> None:
    (copy / "client-000/node.key").chmod(0o644)
    says(faults_of_site(copy)[0].message, "Other users of this machine can read the private key")
    (copy / "client-000/node.key").unlink()
    fault = faults_of_site(copy)[0]
    says(fault.message + fault.hint, "node.key is missing", "fedguild federation key")


def test_a_port_that_is_taken(federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "FREED_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", load_server(federation / "server").port)):
        (fault,) = faults_of_server(federation)
    says(fault.message + fault.hint, "Cannot listen on port", "port in server.yaml")


def test_fewer_keys_than_clients(copy: Path) -> None:
    (copy / "server/nodes/client-001.pub").unlink()
    (fault,) = faults_of_server(copy)
    says(fault.message, "has 1 public key(s), but the run has 2 clients")
    assert not fault.fatal


def test_a_run_that_cannot_be_read(copy: Path) -> None:
    (copy / "server/run.yaml").write_text("metod: fedit\n")
    says(faults_of_server(copy)[0].message, "unknown key 'metod'")


@pytest.mark.parametrize(("seconds", "faulty"), [(0, False), (-250, False), (6, True), (-400, True)])
def test_a_clock_that_is_off(seconds: int, faulty: bool) -> None:
    now = datetime.now(UTC)
    assert bool(list(checks.clock_faults(now, now + timedelta(seconds=seconds)))) is faulty


@pytest.mark.parametrize(
    ("host", "opens", "faulty"),
    [("127.0.0.1", None, False), ("localhost", None, False), ("0.0.0.0", None, True), ("0.0.0.0", "fleet", False)],
)
def test_an_address_that_others_reach_needs_a_word(host: str, opens: str | None, faulty: bool) -> None:
    port, control_port = free_ports(2)
    settings = ServerSettings.model_validate({"host": host, "opens": opens, "port": port, "control_port": control_port})
    faults = list(checks.listening_faults(settings))
    assert [fault.fatal for fault in faults] == [True] * faulty
    if faulty:
        says(faults[0].message, f"host in server.yaml is {host}", "interface for clients (/v1/fleet/")
        says(faults[0].hint, "write `opens: fleet`")


def test_one_port_for_clients_and_for_control(copy: Path) -> None:
    path = copy / "server" / "server.yaml"
    port = load_server(copy / "server").port
    path.write_text(path.read_text().replace(f"control_port: {port + 1}", f"control_port: {port}"))
    (fault,) = faults_of_server(copy)
    says(fault.message, f"port and control_port in server.yaml are both {port}")


def test_a_port_that_is_about_to_be_free_is_waited_for(federation: Path) -> None:
    """The processes of a parent that was killed hold its ports for a moment."""
    listener = socket.create_server(("127.0.0.1", load_server(federation / "server").port))
    closing = threading.Timer(0.5, listener.close)
    closing.start()
    try:
        assert not faults_of_server(federation)
    finally:
        closing.join()


@pytest.mark.parametrize("version", ["1.41.0", "1.42.0", "1.42.7"])
def test_versions_of_flower_that_are_supported(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "installed", lambda _: version)
    assert not list(checks.version_faults())


@pytest.mark.parametrize("version", [None, "1.40.0", "1.410.0", "1.43.0", "2.41.0"])
def test_another_version_of_flower(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "installed", lambda _: version)
    (fault,) = checks.version_faults()
    says(fault.hint, "pip install 'fedguild[flower]'")


def test_all_faults_are_named_at_once(copy: Path) -> None:
    (copy / "server/certificates/server.pem").unlink()
    (copy / "server/run.yaml").unlink()
    with pytest.raises(ConfigError) as caught:
        checks.require_none(iter(faults_of_server(copy)))
    says(caught.value.message, "server.pem is missing", "run.yaml")


def test_a_federation_that_a_method_does_not_suit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        write_project(tmp_path / "federation", 1, "fedamole/tiny-tasks", shared_data=True)
    says(str(raised.value), "method.clients_per_expert", "1 client")
    assert not (tmp_path / "federation").exists()
