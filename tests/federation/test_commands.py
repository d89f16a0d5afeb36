"""The commands that start a federation's programs: complete, and with no secret in them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedguild.federation import commands, operations
from fedguild.federation.checks import Fault
from fedguild.federation.project import write_project
from fedguild.federation.site import load_server, load_site

pytest.importorskip("flwr")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def guild(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation") / "guild"
    write_project(folder, 2, "fedit/tiny-tasks", address="127.0.0.1:9443", shared_data=True)
    return folder


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_a_servers_programs(guild: Path) -> None:
    folder = guild / "server"
    settings = load_server(folder)
    assert commands.server_environment(folder, settings)["NO_COLOR"] == "1"
    server = commands.superlink(folder, settings)
    assert Path(server[0]).name == "flower-superlink"
    assert Path(option(server, "--ssl-ca-certfile")) == folder / "certificates" / "ca.pem"
    assert not [word for word in server if word.startswith("0.0.0.0")]
    gateway = commands.gateway(folder, settings)
    assert option(gateway, "--port") == "9443"
    assert option(gateway, "--server").endswith(f"127.0.0.1:{settings.control_port}")
    executor = commands.server_executor(folder, settings)
    secret = folder / "state" / "flower" / commands.SECRET
    assert str(secret) in executor
    assert secret.stat().st_mode & 0o077 == 0
    said = secret.read_bytes().hex()
    assert not [word for word in [*server, *gateway, *executor] if said in word], "everybody can read a command line"


def test_a_run_is_started_with_its_ticket(guild: Path) -> None:
    command = commands.start_run(guild / "server", "t1", stream=False, round=3)
    assert Path(command[0]).name == "flwr"
    assert any('ticket="t1"' in word and "round=3" in word for word in command)
    assert "--stream" not in command
    assert "--stream" in commands.start_run(guild / "server", "t1")
    assert commands.list_nodes()[-2:] == ["--format", "json"]
    assert commands.enrolment()[1:3] == ["-m", "fedguild.federation.flower.enrolment"]


class Child:
    """A process that is only noted."""

    started: list[str] = []  # noqa: RUF012
    ended: list[str] = []  # noqa: RUF012
    broken = ""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path, folder: Path) -> None:
        self.name, self.command = name, command

    def start(self) -> None:
        if self.name == self.broken:
            raise OSError(self.name)
        self.started.append(self.name)

    def terminate(self) -> None:
        self.ended.append(self.name)


@pytest.mark.parametrize("broken", ["", "executor"])
def test_a_clients_programs_are_started_and_ended(broken: str, guild: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the reverse order, also those before one that does not start."""
    said: list[str] = []
    own = type("Own", (Child,), {"started": [], "ended": [], "broken": broken})
    fault = Fault("a message.", "a hint.", fatal=False)
    monkeypatch.setattr(operations, "Child", own)
    monkeypatch.setattr(operations, "site_faults", lambda folder, site: iter([fault]))

    def watch(started: list[Child], echo: Callable[[str], None], **how: object) -> None:
        assert how["restart"]

    monkeypatch.setattr(operations, "watch", watch)
    site = guild / "client-001"
    if broken:
        with pytest.raises(OSError, match=broken):
            operations.run_client(site, said.append)
    else:
        operations.run_client(site, said.append)
        assert said == [
            "a message. a hint.",
            f"Client 1 of 127.0.0.1:9443 is up; its logs are in {site / load_site(site).work}. Ctrl-C stops it.",
        ]
    names = ["trainer", "node"] if broken else ["trainer", "node", "executor"]
    assert own.started == names
    assert own.ended == names[::-1]


def test_a_site_finds_the_files_of_the_config_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "chat.jinja"):
        Path(name).write_text("{}")
    settings = ("data.dataset=instructions", "data.train=[a.jsonl, b.jsonl]", "data.chat_template=chat.jinja")
    write_project(tmp_path / "guild", 1, "fedit/tiny-tasks", settings, shared_data=True)
    folder = tmp_path / "guild" / "client-000"
    data = load_site(folder).data
    assert [(folder / name).resolve() for name in data.train] == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert (folder / data.chat_template).read_text() == "{}"
    template = "data.chat_template='{% for message in messages %}\n{{ message.content }}{% endfor %}'"
    given = [*settings[:1], "data.train=owner/name", template]
    write_project(tmp_path / "text", 1, "fedit/tiny-tasks", given, shared_data=True)
    data = load_site(tmp_path / "text" / "client-000").data
    assert (data.train, "{{ message.content }}" in str(data.chat_template)) == ("owner/name", True)
