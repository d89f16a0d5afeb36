"""`fedguild federation`: the files that it writes, and what it says of mistakes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedguild.cli.app import app
from fedguild.config import load_config
from fedguild.federation.audit import AuditLog
from fedguild.federation.operations import Status
from fedguild.federation.site import load_server, load_site

pytest.importorskip("flwr")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def call(*arguments: str) -> tuple[int, str]:
    """Runs `fedguild federation`; returns its status and all that it said."""
    result = CliRunner().invoke(app, ["federation", *arguments])
    return result.exit_code, result.output + (result.stderr or "")


@pytest.fixture(scope="module")
def guild(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation") / "guild"
    assert (
        call("init", str(folder), "--clients", "2", "--config", "flame/tiny-tasks", "--shared-data", "seed=7")[0] == 0
    )
    return folder


def test_init_writes_files_that_load(guild: Path) -> None:
    server, run = load_server(guild / "server"), load_config(str(guild / "server" / "run.yaml"))
    assert (server.port, server.server_evaluation, server.run) == (9443, True, "run.yaml")
    assert (server.host, server.opens, server.control_port) == ("127.0.0.1", None, 9444)
    assert (run.federation.clients, run.federation.engine.name, run.seed) == (2, "flower", 7)
    assert "  # aggregator: none\n" in (guild / "server" / "run.yaml").read_text(), "two have no median"
    for index in range(2):
        site = load_site(guild / f"client-{index:03d}")
        assert (site.client, site.data.shares, site.data.share, site.data.seed) == (index, 2, index, 7)
        assert site.accept.methods == ("flame",)
        assert site.accept.min_steps == (run.training.steps or 1)
        assert site.accept.min_batch == run.training.batch_size * run.training.gradient_accumulation_steps
        assert site.server == "127.0.0.1:9443"


def test_init_keeps_private_keys_private(guild: Path) -> None:
    keys = [guild / "client-000" / "node.key", *(guild / "server" / "certificates").glob("*.key")]
    assert len(keys) == 3
    assert all(key.stat().st_mode & 0o077 == 0 for key in keys)
    assert not list((guild / "server").rglob("node.key"))
    assert (guild / "server/nodes/client-001.pub").read_text() == (guild / "client-001/node.pub").read_text()


def test_init_exposes_the_fleet_path_only(guild: Path) -> None:
    proxy = (guild / "server" / "nginx.conf").read_text()
    assert proxy.count("proxy_pass ") == 1
    assert "location /v1/fleet/ {" in proxy
    assert "return 403;" in proxy
    settings = load_server(guild / "server")
    behind = re.search(r"proxy_pass https://127.0.0.1:(\d+);", proxy)
    assert behind is not None
    assert f"listen {settings.port} ssl;" in proxy
    assert int(behind[1]) not in (settings.port, settings.control_port)


def test_init_puts_the_servers_name_into_its_certificate(tmp_path: Path) -> None:
    from cryptography import x509

    assert call("init", str(tmp_path / "g"), "--clients", "1", "--address", "guild.example.org:1234")[0] == 0
    certificate = x509.load_pem_x509_certificate((tmp_path / "g/server/certificates/server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["guild.example.org", "localhost"]
    assert "${SERVER_NAME:-guild.example.org}" in (tmp_path / "g/server/certificates/make.sh").read_text()
    assert load_site(tmp_path / "g/client-000").server == "guild.example.org:1234"


@pytest.mark.parametrize(("port", "control_port"), [(1234, 1235), (443, 9444), (65535, 9444)])
def test_init_keeps_control_on_a_port_of_its_own(port: int, control_port: int, tmp_path: Path) -> None:
    assert call("init", str(tmp_path / "g"), "--clients", "1", "--address", f"guild.example.org:{port}")[0] == 0
    server = load_server(tmp_path / "g" / "server")
    assert (server.host, server.port, server.control_port) == ("127.0.0.1", port, control_port)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("init", "{here}"), "already exists"),
        (("init", "{new}", "--address", "https://a:1"), "'https://a:1' is not an address"),
        (("init", "{new}", "--address", "a"), "is not an address"),
        (("init", "{new}", "--config", "flme/tiny-tasks"), "neither a preset nor a config file"),
        (("init", "{new}", "sed=1"), "unknown key 'sed'"),
        (("init", "{new}", "federation.clients=5"), "Give --clients 5 instead."),
        (("init", "{new}", "federation.engine.name=local"), "The engine of real clients is flower, not local."),
        (("init", "{new}", "evaluation.pooled=true"), "those never leave the client"),
        (("server", "{new}"), "fedguild federation init"),
        (("client", "{new}"), "fedguild federation init"),
        (("run", "{new}"), "fedguild federation init"),
        (("key", "{here}/there"), "already exists"),
    ],
)
def test_a_mistake_gets_a_message(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "there").write_text("x")
    status, output = call(*(word.format(here=here, new=tmp_path / "new") for word in arguments))
    assert status == 2
    assert said in output


def test_the_example_of_a_key_runs_after_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = re.search(r"fedguild federation key (\S+/\S+)", call("key", "--help")[1])
    assert example is not None
    assert call("init", "union", "--clients", "1")[0] == 0
    assert call("key", example[1])[0] == 0


def test_a_run_without_a_server_says_so(guild: Path) -> None:
    status, output = call("run", str(guild / "server"))
    assert status == 2
    assert "Start the server: `fedguild federation server" in output


def test_status_without_a_server(guild: Path) -> None:
    status, output = call("status", str(guild / "server"), "--json")
    assert status == 0
    assert Status(**json.loads(output)) == Status(up=False)
    status, output = call("status", str(guild / "server"))
    assert "The server does not answer; no run has started." in output
    assert "registered" not in output


def test_status_of_a_server_that_is_up(guild: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    description = {"node": 5, "sizes": {"train": 40}, "budget": "b2"}
    nodes = [{"node-id": 5, "status": "online", "online-at": "2026-01-02"}, {"node-id": 6, "status": "offline"}]
    state = Status(
        up=True,
        nodes=nodes,
        round=3,
        running="process 17",
        stopping=True,
        clients={"1": description},
        refused=[{"name": "client-002", "node": "6", "time": "2026-01-03", "reason": "too old."}],
        audit_fault="Line 3 is not what was written.",
    )
    monkeypatch.setattr("fedguild.federation.operations.status_of", lambda folder: state)
    status, output = call("status", str(guild / "server"))
    assert status == 0
    assert "2 key(s) are registered, 1 client(s) online." in output
    assert "The server is up; round 3 is complete." in output
    assert "A run is stopping: process 17." in output
    assert "client-002 was refused at 2026-01-03: too old.\n" in output
    assert "Who was refused is not known: Line 3 is not what was written." in output
    assert ["client-001", "online", "2026-01-02", "40", "b2"] in [line.split() for line in output.splitlines()]


@pytest.mark.parametrize(("outcome", "status"), [("done", 0), ("stopped", 130)])
def test_run_tells_how_it_ended(guild, monkeypatch, outcome, status, tmp_path):
    asked: list[dict[str, object]] = []

    def run(folder: Path, echo: object, **how: object) -> dict[str, str]:
        asked.append(how)
        return {"status": outcome, "folder": str(tmp_path)}

    monkeypatch.setattr("fedguild.federation.operations.run_federation", run)
    server = str(guild / "server")
    assert call("run", server, "--round", "4") == (status, f"{tmp_path}\n" if outcome == "done" else "")
    assert json.loads(call("run", server, "--json", "--fresh")[1])["status"] == outcome
    assert asked == [{"fresh": False, "detach": False, "round": 4}, {"fresh": True, "detach": False, "round": None}]
    status, said = call("run", server, "--watch", "--detach")
    assert (status, "--watch ends with the command" in said) == (2, True)


@pytest.mark.parametrize("limit", [None, 4096])
def test_the_gateway_takes_its_settings(guild: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    from fedguild.federation.flower import gateway, listening

    served: list[tuple[gateway.Gateway, dict[str, object]]] = []
    monkeypatch.setattr(listening, "serve", lambda app, **how: served.append((app, how)))
    files = guild / "server" / "certificates"
    certificate, key, authority = (str(files / name) for name in ("server.pem", "server.key", "ca.pem"))
    words = ["--host", "127.0.0.1", "--port", "9443", "--certificate", certificate, "--key", key]
    words += ["--authority", authority, "--server", "https://127.0.0.1:9444"]
    more = [] if limit is None else ["--client-bytes", str(limit), "--connections-per-address", "5"]
    monkeypatch.setattr("sys.argv", ["gateway", *words, *more])
    gateway.main()
    ((app, how),) = served
    assert how == {
        "host": "127.0.0.1",
        "port": 9443,
        "certificate": certificate,
        "key": key,
        "header_seconds": 10.0,
        "connections_per_address": None if limit is None else 5,
    }
    assert (app._quota is None) == (limit is None)


def test_init_with_data_of_their_own(tmp_path: Path) -> None:
    status, output = call("init", str(tmp_path / "g"), "data.dataset=alpaca", "data.train=own.json")
    assert status == 0
    assert "Every client reads its own own.json (dataset alpaca) from its folder" in output
    site = load_site(tmp_path / "g" / "client-002")
    assert (site.data.shares, site.data.train) == (1, "own.json")
    assert not load_server(tmp_path / "g" / "server").server_evaluation


def test_settings_lists_both_files() -> None:
    _, output = call("settings")
    assert "accept.min_clients" in output
    assert "wait_seconds" in output


def test_audit_checks_the_chain_and_shows_the_log(guild: Path) -> None:
    path = guild / "server" / load_server(guild / "server").state
    log = AuditLog(path)
    log.append("joined", client=1, node=7)
    log.append("revoked", client=1)
    status, output = call("audit", str(guild / "server"))
    assert status == 0
    assert "joined: client 1, node 7" in output
    assert "2 entries; none was changed, moved or removed before the last." in output
    assert [entry["event"] for entry in json.loads(call("audit", str(guild / "server"), "--json")[1])] == [
        "joined",
        "revoked",
    ]
    noted = log.read()[0]["seal"]
    assert f"The log's seal is {log.seal}: note it" in output
    assert noted not in output
    assert call("audit", str(guild / "server"), "--seal", noted)[0] == 0
    (file,) = path.glob("audit*")
    before = file.read_text()
    for rewritten in ([{"client": 2}, {"client": 1}], []):
        file.unlink()
        log.extend("joined", rewritten)
        assert call("audit", str(guild / "server"))[0] == 0, "the chain alone does not tell"
        status, output = call("audit", str(guild / "server"), "--seal", noted)
        assert status == 2
        assert f"has no entry with the seal {noted}" in output
    file.write_text(before)
    file.write_text(file.read_text().replace('"node":7', '"node":8').replace('"node": 7', '"node": 8'))
    assert call("audit", str(guild / "server"))[0] == 2
    file.unlink()


def test_stop_and_revoke_are_passed_on(guild: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = guild / "server"
    monkeypatch.setattr("fedguild.federation.operations.stop_federation", lambda folder, echo: echo(f"{folder} ends"))
    monkeypatch.setattr("fedguild.federation.operations.revoke", lambda folder, client: f"{client} is out")
    for words, said in (
        (["stop", str(server)], f"{server} ends"),
        (["revoke", str(server), "client-001"], "client-001 is out"),
    ):
        status, output = call(*words)
        assert (status, set(output.splitlines())) == (0, {said})
