"""A new federation: what its sites' files hold, and what is refused before anything is written."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from fedguild.config import load_config
from fedguild.core.errors import ConfigError
from fedguild.federation.checks import data_faults
from fedguild.federation.project import write_project
from fedguild.federation.site import load_server, load_site
from fedguild.server.sampling import quorum_count

pytest.importorskip("flwr")


@pytest.fixture(autouse=True)
def no_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spares openssl, and works in the operator's folder."""
    monkeypatch.setattr("fedguild.federation.project._make_certificates", lambda folder: (folder / "ca.pem").touch())
    monkeypatch.setattr("fedguild.federation.project._require_openssl", lambda: None)
    home = tmp_path / "operator"
    home.mkdir()
    monkeypatch.chdir(home)


def test_own_data_is_the_default(tmp_path: Path) -> None:
    config = write_project(tmp_path / "g", 2, "flame/tiny-tasks")
    site = load_site(tmp_path / "g/client-001")
    assert (site.data.dataset, site.data.train, site.data.test) == ("instructions", "data.jsonl", None)
    assert (site.data.shares, site.data.share, site.data.partition.scheme) == (1, 0, "iid")
    assert not load_server(tmp_path / "g/server").server_evaluation
    assert load_config(str(tmp_path / "g/server/run.yaml")).data == config.data
    assert "data.jsonl" in (tmp_path / "g/README.md").read_text()
    (fault,) = data_faults(tmp_path / "g/client-001", site)
    assert (fault.fatal, "data.jsonl does not exist" in fault.message) == (True, True)
    (tmp_path / "g/client-001/data.jsonl").write_text("{}")
    assert data_faults(tmp_path / "g/client-001", site) == []


@pytest.mark.parametrize("port", [443, 1024, 9443, 65533, 65534, 65535])
def test_the_ports_beside_the_address_are_three_that_there_are(port: int, tmp_path: Path) -> None:
    write_project(tmp_path / "g", 1, "fedit/tiny-tasks", address=f"127.0.0.1:{port}")
    server = load_server(tmp_path / "g/server")
    (behind,) = re.findall(r"https://127\.0\.0\.1:(\d+)", (tmp_path / "g/server/nginx.conf").read_text())
    assert len({port, server.control_port, int(behind)}) == 3
    assert all(1 <= each <= 65535 for each in (server.control_port, int(behind)))


@pytest.mark.parametrize(
    ("given", "dataset", "train"),
    [
        (["data.dataset=alpaca"], "alpaca", "data.jsonl"),
        (["data.train=own.json"], "instructions", "own.json"),
        (["data.dataset=dolly", "data.train=data/*.jsonl"], "dolly", "data/*.jsonl"),
        (["data.dataset=alpaca", "data.train={here}/ours.json"], "alpaca", "ours.json"),
        (["data.dataset=alpaca", "data.train=[../a.json, ~/b.json]"], "alpaca", ["a.json", "b.json"]),
    ],
)
def test_a_site_names_its_own_file_and_no_path_of_the_operator(given, dataset, train, tmp_path):
    for name in ("own.json", "ours.json"):
        Path(name).write_text("[]")
    write_project(tmp_path / "g", 1, "fedit/tiny-tasks", [one.format(here=Path.cwd()) for one in given])
    data = load_site(tmp_path / "g/client-000").data
    assert (data.dataset, data.train) == (dataset, train)
    assert str(Path.cwd()) not in (tmp_path / "g/client-000/site.yaml").read_text()


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_site_needs_of_this_machine_is_linked(shared, olmoe_folder, tmp_path):
    shutil.copytree(olmoe_folder, "ours")
    rows = [{"instruction": f"{n}?", "output": str(n)} for n in range(9)]
    for name in ("a.json", "b.json"):
        Path(name).write_text(json.dumps(rows))
    Path("chat.jinja").write_text("{{ messages }}")
    settings = ["model.path=ours", "data.dataset=instructions", "data.train=[a.json, b.json]", "data.test=b.json"]
    settings += ["data.chat_template=chat.jinja", "federation.budgets=[{name: all}]"]
    write_project(tmp_path / "g", 1, "fedit/tiny-tasks", settings, shared_data=shared)
    folder = tmp_path / "g/client-000"
    site, server = load_site(folder), load_config(str(tmp_path / "g/server/run.yaml"))
    assert site.model.path == "model/ours"
    assert (folder / site.model.path / "config.json").read_text() == (olmoe_folder / "config.json").read_text()
    assert server.model.path == str(Path("ours").resolve())
    assert site.data.chat_template == "chat.jinja"
    assert not (folder / "chat.jinja").is_symlink()
    assert "operator" not in (folder / "site.yaml").read_text()
    found = [*site.data.train, site.data.test]
    if not shared:
        assert found == ["a.json", "b.json", "b.json"]
        assert not any((folder / name).exists() for name in found)
        return
    assert found == ["data/train/0/a.json", "data/train/1/b.json", "data/test/b.json"]
    assert all(json.loads((folder / name).read_text()) == rows for name in found)
    assert not any(os.path.isabs(os.readlink(folder / name)) for name in found)


@pytest.mark.parametrize(
    ("clients", "config", "given", "reasons"),
    [
        (2, "fedit/tiny-tasks", ["federation.secure=true"], ["federation.clients", "3 to 2048"]),
        (2, "fedit/olmoe-dolly", ["federation.secure=true"], ["federation.clients", "3 to 2048"]),
        (3, "fedit/olmoe-dolly", ["federation.secure=true", "federation.secure_clients=5"], ["a round has 3 clients"]),
        (3, "flora/olmoe-dolly", ["federation.secure=true"], ["flora does not aggregate securely"]),
        (3, "fedit/olmoe-dolly", ["federation.secure=true", "federation.aggregator=median"], ["needs single uploads"]),
        (3, "flexlora/olmoe-dolly", ["federation.aggregator=median"], ["the aggregate of flexlora is not a mean"]),
        (3, "florist/olmoe-dolly", ["federation.server_step=2"], ["could take a step"]),
        (3, "flame/smollm2-dolly", [], ["needs a mixture-of-experts model"]),
        (3, "fedit/tiny-tasks", ["{dp}"], ["scores of the clients' own models are not public"]),
        (3, "fedmoe/olmoe-dolly", ["{dp}"], ["privacy.unit is client, but fedmoe"]),
        (3, "fedit/tiny-tasks", ["{dp}", "privacy.max_epsilon=0.01", "privacy.public=[scores]"], ["one round costs"]),
        (3, "fedit/tiny-tasks", ["privacy.unit=client", "privacy.target_epsilon=1e-9"], ["No noise multiplier"]),
        (3, "fedit/tiny-tasks", ["federation.byte_limit=1000"], ["round 1 could move", "federation.byte_limit"]),
        (3, "fedit/tiny-tasks", ["evaluation.metrics=[nonsense]"], ["no metric 'nonsense'"]),
        (3, "fedit/tiny-tasks", ["evaluation.metrics=[os:getcwd]"], ["'os:getcwd' is a Python function"]),
        (3, "fedit/tiny-tasks", ["method=antigravity:Fly"], ["'antigravity:Fly' is a Python class", "install it"]),
        (3, "fedit/tiny-tasks", ["callbacks=[nonsense]"], ["no callback 'nonsense'"]),
        (3, "fedit/tiny-tasks", ["data.split.test=0"], ["data.split.test holds none out"]),
        (3, "fedit/tiny-tasks", ["data.train=owner/name"], ["owner/name, the same data", "--shared-data"]),
        (3, "fedit/tiny-tasks", ["model.path=/nowhere/model"], ["There is no model at /nowhere/model"]),
    ],
)
def test_a_run_that_could_not_begin_is_refused_and_nothing_is_written(clients, config, given, reasons, tmp_path):
    noise = ["privacy.unit=client", "privacy.noise_multiplier=1"]
    settings = [each for one in given for each in (noise if one == "{dp}" else [one])]
    with pytest.raises(ConfigError) as raised:
        write_project(tmp_path / "g", clients, config, settings)
    for reason in reasons:
        assert reason in str(raised.value)
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    ("clients", "given", "quorum"),
    [(2, [], 1.0), (3, [], 0.5), (3, ["federation.client_fraction=0.5"], 1.0), (8, [], 0.5)],
)
def test_no_client_is_aggregated_alone_unless_the_operator_says_so(
    clients: int, given: list[str], quorum: float, tmp_path: Path
) -> None:
    config = write_project(tmp_path / "union", clients, "fedit/tiny-tasks", given)
    assert config.federation.quorum == quorum
    assert quorum_count(config.federation.wanted_uploads, quorum) >= 2
    assert load_site(tmp_path / "union/client-000").accept.min_clients == 2
    write_project(tmp_path / "hasty", clients, "fedit/tiny-tasks", [*given, "federation.quorum=0.1"])
    assert load_config(str(tmp_path / "hasty/server/run.yaml")).federation.quorum == 0.1


def test_a_secure_run_needs_no_data_at_the_server(tmp_path: Path) -> None:
    write_project(tmp_path / "g", 3, "fedit/tiny-tasks", ["federation.secure=true"])
    assert not load_server(tmp_path / "g/server").server_evaluation
    assert load_site(tmp_path / "g/client-000").accept.secure


def test_a_new_site_accepts_the_run_that_it_was_written_for(tmp_path: Path) -> None:
    given = ["training.steps=20000", "training.eps=0.01", "federation.rounds=1000"]
    write_project(tmp_path / "g", 2, "fedit/tiny-tasks", given)
    accept = yaml.safe_load((tmp_path / "g/client-000/site.yaml").read_text())["accept"]
    assert (accept["max_steps"], accept["requests_per_run"]) == (20000, 8000)
    assert "sgd" in accept["optimizers"]
