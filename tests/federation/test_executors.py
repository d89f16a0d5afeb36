"""The programs that run FedGuild's app, and no other, on the server and on a client."""

from __future__ import annotations

import hashlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedguild.federation import client_executor, commands, server_executor, templates
from fedguild.federation.audit import AuditLog
from fedguild.federation.flower import bundle
from fedguild.federation.flower.tasks import AGENT_APP, CLIENT_APP, SERVER_APP, Task

TRUSTED = hashlib.sha256(bundle.build(templates.APP)).hexdigest()


class EndedError(Exception):
    """Stands for the signal that ends an executor."""


@dataclass
class Source:
    """Tasks that a test gives out, and what became of them."""

    given: list[Task | None]
    address: str = "127.0.0.1:9"
    authority: Path = Path("ca.pem")
    kept: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def forever(self, *types: str) -> Iterator[Task | None]:
        yield from self.given
        raise EndedError

    def keep(self, task: Task) -> None:
        self.kept.append(task.token)

    def fail(self, task: Task, reason: str) -> None:
        self.failed.append((task.token, reason))


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The server's round loop: a program that says that it ran, and with a token `bad` fails."""
    said = tmp_path / "said"
    program = (
        f"import sys, time; token = open(sys.argv[1]).read(); open({str(said)!r}, 'a').write(token + ' '); "
        "time.sleep(600 if token == 'long' else 0); sys.exit(token == 'bad')"
    )
    monkeypatch.setattr(
        commands, "server_app", lambda address, authority, file, parent: [sys.executable, "-c", program, str(file)]
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return said


def serve(source: Source, monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    monkeypatch.setattr(server_executor, "TaskSource", lambda *_: source)
    with pytest.raises(EndedError):
        server_executor.main("127.0.0.1:9", str(state / "flower" / "secret"), "ca.pem", str(state))
    assert not list((state / "flower").iterdir()), "the token stays"


def until(said: Path, text: str) -> Iterator[None]:
    while not (said.exists() and text in said.read_text()):
        yield None


def test_only_the_round_loop_of_fedguilds_app_is_started(loop, monkeypatch, tmp_path):
    class Given(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Task | None]:
            yield Task(SERVER_APP, "f" * 64, "foreign")
            yield Task(AGENT_APP, TRUSTED, "agent")
            yield Task(SERVER_APP, TRUSTED, "good")
            yield from until(loop, "good")

    left = tmp_path / "flower" / "left.token"
    left.parent.mkdir()
    left.touch()
    source = Source(Given())
    serve(source, monkeypatch, tmp_path)
    assert loop.read_text() == "good "
    reason = "This server runs FedGuild's app only."
    assert source.failed == [("foreign", reason), ("agent", reason)]
    assert [entry["app"] for entry in AuditLog(tmp_path).read()] == ["f" * 64, TRUSTED]


def test_a_loop_that_fails_ends_its_run_and_one_that_lasts_is_kept_and_ended(loop, monkeypatch, tmp_path):
    monkeypatch.setattr(server_executor, "HEARTBEAT_SECONDS", 0.0)
    source = Source([])

    class Given(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Task | None]:
            yield Task(SERVER_APP, TRUSTED, "long")
            yield Task(SERVER_APP, TRUSTED, "bad")
            while not source.failed:
                yield None
            yield from until(loop, "long")

    source.given = Given()
    started: list[server_executor._Loop] = []
    start = server_executor._Loop.start
    monkeypatch.setattr(server_executor._Loop, "start", lambda *given: started.append(start(*given)) or started[-1])
    serve(source, monkeypatch, tmp_path)
    assert source.failed == [("bad", "The round loop ended with status 1.")]
    assert "long" in source.kept
    assert [loop.process.returncode for loop in started] == [-signal.SIGTERM, 1]


def take_all(source: Source, answer: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(client_executor, "TaskSource", lambda *_: source)
    monkeypatch.setattr(client_executor, "answer", answer)
    with pytest.raises(EndedError):
        client_executor.main("127.0.0.1:9", "secret")
    for thread in set(threading.enumerate()) - before:
        thread.join()


def test_a_client_says_what_it_refused_and_goes_on_after_an_error(monkeypatch, capsys):
    source = Source([Task(CLIENT_APP, "", "foreign"), None, Task(CLIENT_APP, "", "lost"), Task(CLIENT_APP, "", "good")])
    answered = []

    def answer(given: object, task: Task, app: object, refusal: Callable[[bytes], str]) -> str:
        assert (given, app) == (source, client_executor.app)
        if task.token == "lost":
            raise RuntimeError("the node was \x1b[31mrestarted")
        answered.append(task.token)
        return refusal(b"PK") if task.token == "foreign" else refusal(bundle.build(templates.APP))

    take_all(source, answer, monkeypatch)
    assert sorted(answered) == ["foreign", "good"]
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [
        "A message was given up: RuntimeError: the node was [31mrestarted",
        "Refused an app that is not FedGuild's: it cannot be read (BadZipFile).",
    ]


def test_a_message_whose_rest_never_comes_keeps_no_other_from_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's node leaves such a message behind when a run ends while it receives one of its messages."""
    next_was_answered = threading.Event()

    class Given(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Task | None]:
            yield Task(CLIENT_APP, "", "of a run that has ended")
            yield Task(CLIENT_APP, "", "of the next run")
            assert next_was_answered.wait(30), "the executor waits for the first message"

    def answer(given: object, task: Task, app: object, refusal: object) -> str:
        if task.token == "of the next run":
            next_was_answered.set()
        assert next_was_answered.wait(60)
        return ""

    take_all(Source(Given()), answer, monkeypatch)
