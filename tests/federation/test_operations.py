"""`fedguild federation run`, `stop`, `revoke` and the round loop, with stand-ins for the programs of Flower."""

from __future__ import annotations

import io
import json
import logging
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fedguild.core.errors import FedGuildError, StoppedError
from fedguild.core.locking import run_lock
from fedguild.federation import SERVER_FOLDER, commands, operations, server_app
from fedguild.federation.audit import AuditLog
from fedguild.federation.flower.gateway import FLEET
from fedguild.federation.project import write_project
from fedguild.federation.revocation import SPENT, Revocations
from fedguild.federation.stopping import stop_is_requested

NODES = [{"node-id": 1, "status": "online"}]
LISTED = json.dumps({"success": True, "nodes": NODES})
LOOP = """
import json, sys
from pathlib import Path
folder, ticket, outcome = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
print("Round 1 of 1.")
if outcome:
    (folder / "state/outcomes").mkdir(parents=True, exist_ok=True)
    (folder / f"state/outcomes/{ticket}.json").write_text(outcome)
sys.exit(int(sys.argv[4]))
"""
ENROLMENT = """
import json, sys
work = json.load(sys.stdin)
with open(sys.argv[3], "a") as asked:
    print(json.dumps(work), file=asked)
for name in [*work.get("register", {}), *work.get("revoke", [])]:
    print(json.dumps({"name": name, "fault": sys.argv[1]}))
print(sys.argv[2], file=sys.stderr)
sys.exit(int(bool(sys.argv[2])))
"""


class Guild:
    """A server's folder, with programs that stand for Flower's."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        write_project(folder, 2, "flame/tiny-tasks", ["federation.clients=2"], shared_data=True)
        self.folder, self.said = folder / "server", list[str]()
        self.state = self.folder / "state"
        self.listed, self.outcome, self.status = LISTED, json.dumps({"status": "done", "rounds": 1}), 0
        self.fault = self.dead = ""
        patch.setattr(operations, "_flwr", lambda *_: subprocess.CompletedProcess([], 0, stdout=self.listed))
        patch.setattr(operations, "OUTCOME_SECONDS", 0.1)
        self.asked = folder / "asked.jsonl"
        patch.setattr(
            commands,
            "enrolment",
            lambda: [sys.executable, "-c", ENROLMENT, self.fault, self.dead, str(self.asked)],
        )
        patch.setattr(commands, "start_run", self._start_run)

    def _start_run(self, folder: Path, ticket: str, *, stream: bool, round: int | None) -> list[str]:
        return [sys.executable, "-c", LOOP, str(folder), ticket, self.outcome, str(self.status)]

    def run(self, **options: Any) -> dict[str, Any]:
        return operations.run_federation(self.folder, self.said.append, **options)


@pytest.fixture
def guild(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guild:
    return Guild(tmp_path / "guild", monkeypatch)


def test_a_run_registers_the_keys_and_returns_its_outcome(guild: Guild) -> None:
    assert guild.run() == {"status": "done", "rounds": 1}
    seal = f"The audit log's seal is {AuditLog(guild.state).seal}: note it on another machine."
    assert guild.said == ["client-000 is registered.", "client-001 is registered.", "Round 1 of 1.", seal]
    guild.said.clear()
    guild.run()
    assert guild.said == ["Round 1 of 1.", seal]


def test_a_run_that_failed_says_why(guild: Guild) -> None:
    guild.outcome = json.dumps({"status": "failed", "message": "no quorum", "hint": "Wait."})
    with pytest.raises(FedGuildError, match="The run stopped: no quorum") as caught:
        guild.run()
    assert caught.value.hint == "Wait."


def test_a_run_without_an_outcome_is_one_that_was_killed(guild: Guild) -> None:
    guild.outcome = ""
    with pytest.raises(FedGuildError, match="ended without reporting an outcome"):
        guild.run()


def test_a_detached_run_is_left_alone(guild: Guild) -> None:
    assert guild.run(detach=True)["status"] == "started"
    guild.status = 1
    with pytest.raises(FedGuildError, match="Flower did not start the run"):
        guild.run(detach=True)


def test_a_run_that_has_begun_is_resumed_unless_a_fresh_one_is_wanted(guild: Guild) -> None:
    run = guild.state / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "checkpoints" / "round-00003.checkpoint").touch()
    with pytest.raises(FedGuildError, match="already holds a run"):
        guild.run(fresh=True)
    guild.run()
    guild.run(round=1)
    assert [line for line in guild.said if line.startswith("Resuming")] == [
        "Resuming after round 3.",
        "Resuming after round 1.",
    ]


def test_a_run_in_progress_is_named_and_can_be_stopped(guild: Guild, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not operations.stop_federation(guild.folder, guild.said.append)
    assert guild.said == ["No run is in progress."]
    with run_lock(guild.state / "run"):
        with pytest.raises(FedGuildError, match="is already in progress: process"):
            guild.run()
        assert "process" in operations.status_of(guild.folder).running
        with pytest.raises(FedGuildError, match=r"has not stopped within 0\.1 s"):
            operations.stop_federation(guild.folder, guild.said.append, wait_seconds=0.1)
        assert stop_is_requested(guild.state)
        assert operations.status_of(guild.folder).stopping
        held = iter([operations.holder(guild.state / "run"), None])
        monkeypatch.setattr(operations, "holder", lambda _: next(held))
        assert operations.stop_federation(guild.folder, guild.said.append)
    assert guild.said[-1].startswith("Stopped after round 0;")


def test_the_server_must_be_up(guild: Guild) -> None:
    for guild.listed in ("", json.dumps({"success": False})):
        with pytest.raises(FedGuildError, match=r"Nothing answers at 127\.0\.0\.1"):
            guild.run()
        assert not operations.status_of(guild.folder).up
    guild.listed = f"Loading.\n{LISTED}"
    assert operations.status_of(guild.folder).nodes == NODES


def test_the_status_names_who_was_refused_and_was_not_accepted_after_that(guild: Guild) -> None:
    audit = AuditLog(guild.state)

    def refused() -> list[tuple[str, str]]:
        return [(one["name"], one["reason"]) for one in operations.status_of(guild.folder).refused]

    audit.append("refused", node="1", name="client-000", reason="a run before")
    audit.append("started", run="r")
    for node, reason in (("1", "too old"), ("2", "its limits"), ("3", "too old"), ("3", "too new")):
        audit.append("refused", node=node, name=f"client-00{node}", reason=reason)
    assert refused() == [("client-001", "too old"), ("client-002", "its limits"), ("client-003", "too new")]
    audit.append("accepted", node="2", name="client-002")
    audit.append("joined", client=1, node="1")
    audit.append("joined", client=3, node="7")  # its other key is still refused
    assert refused() == [("client-003", "too new")]
    audit.path.write_bytes(audit.path.read_bytes().replace(b"too new", b"too odd"))
    assert refused() == []
    assert "is not what was written" in operations.status_of(guild.folder).audit_fault


def test_a_program_of_flowers_that_hangs_is_ended_with_a_message(guild: Guild, monkeypatch: pytest.MonkeyPatch) -> None:
    guild.run()
    slow = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(commands, "enrolment", lambda: slow)
    monkeypatch.setattr(operations, "ENROLMENT_SECONDS", 0.1)
    with pytest.raises(FedGuildError, match=r"did not answer within 0\.1 s"):
        operations.revoke(guild.folder, "client-001")
    monkeypatch.undo()
    monkeypatch.setattr(operations, "FLOWER_SECONDS", 0.1)
    monkeypatch.setattr(commands, "list_nodes", lambda: slow)
    with pytest.raises(FedGuildError, match=r"did not answer within 0\.1 s"):
        operations.status_of(guild.folder)


@pytest.mark.parametrize(
    ("host", "opens", "told"),
    [
        ("127.0.0.1", None, "https://127.0.0.1:9443, to this machine alone: /v1/fleet/, which needs a registered key;"),
        ("0.0.0.0", "fleet", "https://0.0.0.0:9443, to whoever reaches this machine: /v1/fleet/, which needs"),
        ("::", "fleet", "https://[::]:9443, to whoever reaches this machine: /v1/fleet/, which needs"),
    ],
)
def test_a_server_says_what_it_opens_as_it_starts(host, opens, told, guild, monkeypatch):
    path = guild.folder / "server.yaml"
    settings = {**yaml.safe_load(path.read_text()), "host": host, "opens": opens, "port": 9443, "control_port": 9444}
    path.write_text(yaml.safe_dump(settings))
    for program in ("superlink", "server_executor", "gateway"):
        monkeypatch.setattr(commands, program, lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(operations, "server_faults", lambda *_: iter(()))
    monkeypatch.setattr(operations, "_is_listening", lambda *_: True)
    monkeypatch.setattr(operations, "watch", lambda *_, **__: None)
    operations.run_server(guild.folder, guild.said.append)
    opened = [line for line in guild.said if line.startswith("Open at ")]
    assert len(opened) == 2
    assert told in opened[0]
    assert opened[1].startswith("Open at https://127.0.0.1:9444, to this machine alone: Flower's control and runtime")
    assert FLEET.fullmatch(operations.FLEET_PATH.encode())


def test_a_key_that_flower_refuses_is_named(guild: Guild) -> None:
    guild.fault = "not a public key"
    with pytest.raises(FedGuildError, match=r"Flower refuses the key .*client-000\.pub: not a public key"):
        guild.run()
    guild.fault = ""
    guild.run()
    guild.dead = "connection refused"
    (guild.folder / "nodes" / "client-002.pub").write_bytes((guild.folder / "nodes" / "client-001.pub").read_bytes())
    with pytest.raises(FedGuildError, match=r"Flower's server did not answer: connection refused"):
        guild.run()


def test_a_revoked_client_is_out_and_a_new_key_lets_it_in_again(guild: Guild) -> None:
    guild.run()
    with pytest.raises(FedGuildError, match="No key is registered for client-007") as caught:
        operations.revoke(guild.folder, "client-007")
    assert "client-000, client-001" in caught.value.hint
    key = guild.folder / "nodes" / "client-001.pub"
    written = key.read_bytes()
    guild.fault = "the database is locked"
    with pytest.raises(FedGuildError, match="still lets in client-001: the database is locked"):
        operations.revoke(guild.folder, "client-001")
    assert "client-001" in Revocations(guild.state).names()
    assert [path.name.split("-2")[0] for path in (key.parent / "revoked").iterdir()] == ["client-001"]
    guild.fault = ""
    key.write_bytes(written)
    guild.run()
    assert "client-001" not in Revocations(guild.state).names()
    assert operations.revoke(guild.folder, "client-001").startswith("client-001 is out;")


def test_a_key_that_was_revoked_while_the_server_was_down_is_shut_out_when_it_starts(guild: Guild) -> None:
    """Also if the client's new key is there by then: the old one goes first."""
    guild.run()
    guild.dead = "connection refused"
    written = (guild.folder / "nodes" / "client-001.pub").read_bytes()
    for _ in range(2):  # the command can be repeated
        with pytest.raises(FedGuildError, match=r"nothing from client-001 any more, .*refused") as caught:
            operations.revoke(guild.folder, "client-001")
        assert "when it starts" in caught.value.hint
    guild.dead = ""
    (guild.folder / "nodes" / "client-001.pub").write_bytes(written)
    guild.asked.unlink()
    guild.run()
    revoked, registered = [json.loads(line) for line in guild.asked.read_text().splitlines()]
    assert revoked == {"revoke": ["client-001"]}
    assert list(registered["register"]) == ["client-001"]
    guild.asked.unlink()
    guild.run()
    assert not guild.asked.exists(), "all is known by now"


def test_a_key_that_is_no_longer_in_the_folder_is_shut_out_when_the_server_starts(guild: Guild) -> None:
    """One that was replaced, before the other is let in; and one that was removed."""
    guild.run()
    replaced, removed = (guild.folder / "nodes" / f"client-00{client}.pub" for client in (0, 1))
    for key in (replaced, removed):
        key.unlink()
    with pytest.raises(FedGuildError, match="has no key, but client-000, client-001 were registered"):
        guild.run()
    replaced.write_text("the organisation's own")
    guild.asked.unlink()
    guild.run()
    for client in ("client-000", "client-001"):
        assert f"{client} is shut out: its key was replaced or removed." in guild.said
    assert [entry["client"] for entry in AuditLog(guild.state).read() if entry["event"] == "revoked"] == [
        "client-000",
        "client-001",
    ]
    out, let_in = [json.loads(line) for line in guild.asked.read_text().splitlines()]
    assert out == {"revoke": ["client-000", "client-001"]}
    assert list(let_in["register"]) == ["client-000"]
    assert not Revocations(guild.state).names()
    guild.asked.unlink()
    guild.run()
    assert not guild.asked.exists(), "all is known by now"


def test_a_server_starts_whose_clients_were_all_revoked_while_it_was_down(guild: Guild) -> None:
    guild.run()
    for client in (0, 1):
        Revocations(guild.state).add(f"client-00{client}")
        (guild.folder / "nodes" / f"client-00{client}.pub").unlink()
    guild.run()
    assert json.loads(guild.asked.read_text().splitlines()[-1]) == {"revoke": ["client-000", "client-001"]}


def test_a_key_that_flower_has_had_before_stops_nobody_else(guild: Guild) -> None:
    guild.fault = SPENT
    guild.run()
    assert [line for line in guild.said if "stays out" in line] == [
        f"client-00{client} stays out: {SPENT}." for client in (0, 1)
    ]


def test_two_revocations_at_once_lose_none(tmp_path: Path) -> None:
    names = [f"client-{number:03d}" for number in range(40)]
    with ThreadPoolExecutor(8) as several:
        list(several.map(lambda name: Revocations(tmp_path).add(name), names))
    assert Revocations(tmp_path).names() == set(names)


def test_a_run_whose_output_breaks_off_is_waited_for(guild: Guild, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process goes on: it holds the run, and writes the outcome when it ends."""
    outcome, guild.outcome = guild.outcome, ""
    holders = iter([None, "process 1", None, "process 1", None])  # idle; trains, between, delivers, has let go

    def holder(run: Path) -> str | None:
        answer = next(holders, "")
        if answer == "":
            (path,) = tickets
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(outcome)
        return answer or None

    tickets: list[Path] = []
    start = guild._start_run

    def start_run(folder: Path, ticket: str, **options: Any) -> list[str]:
        tickets.append(guild.state / "outcomes" / f"{ticket}.json")
        return start(folder, ticket, **options)

    monkeypatch.setattr(commands, "start_run", start_run)
    monkeypatch.setattr(operations, "holder", holder)
    monkeypatch.setattr(operations, "OUTCOME_SECONDS", 5)
    assert guild.run() == {"status": "done", "rounds": 1}
    assert [line for line in guild.said if "the run goes on" in line] == [guild.said[-2]]


def test_ctrl_c_asks_the_run_to_stop_and_a_second_one_does_not_wait(guild: Guild) -> None:
    class Output:
        """Lines between which the user presses Ctrl-C."""

        def __init__(self, *lines: str | type[BaseException]) -> None:
            self.lines = list(lines)

        def __iter__(self) -> Output:
            return self

        def __next__(self) -> str:
            if not self.lines:
                raise StopIteration
            line = self.lines.pop(0)
            if isinstance(line, str):
                return line
            raise line

    def follow(*lines: str | type[BaseException]) -> None:
        run: Any = SimpleNamespace(stdout=Output(*lines), terminate=lambda: guild.said.append("terminated"))
        operations._follow(run, guild.said.append, guild.state, None)

    guild.state.mkdir(exist_ok=True)
    follow("\x1b[92mRound 1.\x1b[0m\n", KeyboardInterrupt, "Stopped.\n")
    assert stop_is_requested(guild.state)
    assert [guild.said[0], guild.said[-1]] == ["Round 1.", "Stopped."]
    with pytest.raises(KeyboardInterrupt):
        follow(KeyboardInterrupt, KeyboardInterrupt)
    assert guild.said[-1] == "terminated"


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        (
            lambda progress: progress.evaluated({"large": 0.5}, "accuracy"),
            {"status": "done", "folder": "run", "rounds": 2, "mean": 0.5},
        ),
        (StoppedError("stopped", "Go on."), {"status": "stopped", "message": "stopped", "hint": "Go on."}),
        (FedGuildError("no quorum", "Wait."), {"status": "failed", "message": "no quorum", "hint": "Wait."}),
        (ValueError("broken"), {"status": "failed", "message": "ValueError: broken", "hint": ""}),
    ],
)
def test_the_round_loop_leaves_its_outcome(ends, outcome, guild, monkeypatch, capsys):
    asked = []

    def serve(transport: object, settings: object, folder: Path, *, progress: Any, round: int | None) -> Any:
        asked.append(round)
        progress.stage("Loading")
        progress.round_started(1, 2)
        progress.step(1, 2, 0.5)
        if isinstance(ends, Exception):
            raise ends
        ends(progress)
        return SimpleNamespace(folder="run", rounds=2, mean=0.5)

    monkeypatch.setattr("fedguild.federation.serving.serve", serve)
    monkeypatch.setattr(server_app, "_before_sigterm", lambda action: None)
    monkeypatch.setenv(SERVER_FOLDER, str(guild.folder))
    failed = outcome["status"] == "failed"
    if failed:
        with pytest.raises(type(ends)):  # type: ignore[arg-type]
            server_app.main(None, {"ticket": "7", "round": 1})  # type: ignore[arg-type]
    else:
        server_app.main(None, {"ticket": "7", "round": -1})  # type: ignore[arg-type]
    assert asked == [1 if failed else None]
    assert json.loads((guild.state / "outcomes" / "7.json").read_text()) == outcome
    logged = _logged_by_flower(ends) if failed else False
    assert logged == isinstance(ends, ValueError), "a traceback is printed for a fault of the program alone"
    printed = capsys.readouterr().out
    assert printed.startswith("Loading.\nRound 1 of 2.\n")
    assert ("Accuracy: large 0.500." in printed) == (outcome["status"] == "done")


def _logged_by_flower(error: BaseException) -> bool:
    """Logs an error as Flower does when its app ends by it; returns whether anything is written."""
    stream, logger = io.StringIO(), logging.getLogger("flwr")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        logger.error("ServerApp raised an exception", exc_info=error)
    finally:
        logger.removeHandler(handler)
        logger.filters.clear()
    return "raised an exception" in stream.getvalue()


PROGRAM = """
import signal, sys, threading
from fedguild.federation.server_app import _before_sigterm
def flowers(number, frame):
    print("the handler from before", number, flush=True)
    sys.exit(7)
{before}
_before_sigterm(lambda: print("last words", flush=True))
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("before", "said", "status"),
    [
        ("signal.signal(signal.SIGTERM, flowers)", "last words\nthe handler from before 15\n", 7),
        ("", "last words\n", -signal.SIGTERM),
    ],
)
def test_last_words_come_before_flowers_own_handler(before: str, said: str, status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == (said, status), ended.stderr
