"""kill -9 of every kind of process of a federation, many times at random moments: the bits of a run without a kill."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fedguild.core.layout import CHECKPOINTS
from fedguild.core.locking import holder
from fedguild.federation.audit import AuditLog
from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.records import RoundRecord, RunLog
from fedguild.model.info import ModelInfo
from fedguild.runs import experiment
from fedguild.runs.setup import Experiment, make_engine
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Engine, Task, Wait
from fedguild.server.method import Method
from tests.federation.flower.federation_processes import START_SECONDS, Command, FederationProcesses
from tests.federation.flower.loopback_federation import QUICK, small_config
from tests.federation.flower.test_processes_long import ONE_PARTITION, assert_same_results
from tests.runs.runs import save_model

SEED = 14
KILLS_OF_A_KIND = 5
ROUNDS = 16
BURSTS = 6
SPARE_ROUNDS = 5
"""Rounds after the last burst, in some of which it still goes on."""
LIMIT_SECONDS = 2400
LONGEST_DELAY_SECONDS = 6.0
GONE_SECONDS = 30.0
"""What a killed parent had started is gone after this long, on a machine that does other work too."""
MARK = "FEDGUILD_TEST_OF_KILLS"
"""Environment variable by which every process of the federation is found, whoever its parent is by now."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT_SECONDS + 300)]

SERVER_PROGRAMS = {
    "superlink": "flower-superlink",
    "gateway": "fedguild.federation.flower.gateway",
    "server executor": "fedguild.federation.server_executor",
    "round loop": "flwr-serverapp",
}
CLIENT_PROGRAMS = {
    "node": "flower-supernode",
    "trainer": "trainer",
    "client executor": "fedguild.federation.client_executor",
}
KINDS = ("server", *SERVER_PROGRAMS, "run", "client", *CLIENT_PROGRAMS)
ENDS_SERVER = {"server", "superlink", "gateway", "server executor"}
ENDS_RUN = {*ENDS_SERVER, "round loop", "run"}
SELDOM = {"round loop": 8, "run": 8, "gateway": 3, "superlink": 3}
"""What is started late is there for less of the time -> so many times as likely as others, while it is there."""


@dataclass(frozen=True)
class Kill:
    """A process that was killed."""

    kind: str
    owner: Command
    at: float
    left: Sequence[psutil.Process]


@dataclass
class Operators:
    """Those who start again what does not start again by itself, at once and however often."""

    federation: FederationProcesses
    run: Command | None = None
    done: bool = False
    kills: list[Kill] = field(default_factory=list)
    began: dict[Command, float] = field(default_factory=dict)
    met: dict[Command, Command | None] = field(default_factory=dict)
    """The server that a command met when it began, which a kill may have been ending."""
    _starts: int = 0

    def server_is_ready(self) -> bool:
        server = self.federation.server
        return server is not None and server.process.poll() is None and "Ready." in server.output()

    def last_round(self) -> int:
        names = [path.stem for path in (self.federation.run_folder / CHECKPOINTS).glob("round-*.checkpoint")]
        return max((int(name.removeprefix("round-")) for name in names), default=0)

    def tend(self) -> None:
        """Starts again what a user would; fails if something ended that nobody killed, or did not end with its parent.

        The run needs a server that is ready, and is not started while its round loop goes on without the command.
        """
        federation = self.federation
        if federation.server is None or federation.server.process.poll() is not None:
            if federation.server is not None:
                self._require_kill(federation.server, ENDS_SERVER)
            federation.server = self._start("server", "server", federation.folder / "server")
        for index in range(len(federation.ports) - 2):
            client = federation.clients.get(index)
            if client is None or client.process.poll() is not None:
                if client is not None:
                    self._require_kill(client, {"client"})
                federation.clients[index] = self._start("client", f"client-{index}", federation.site(index))
        if self.run is not None and (status := self.run.process.poll()) is not None:
            if status == 0:
                self.done = True
            elif not any(words in " ".join(self.run.output().split()) for words in ("in progress", "is in use by")):
                self._require_kill(self.run, ENDS_RUN, any_owner=True)
        ended = self.run is None or self.run.process.poll() is not None
        if not self.done and ended and self.server_is_ready() and holder(federation.run_folder) is None:
            self.run = self._start("run", "run", federation.folder / "server")
        late = [(kill.kind, alive(kill.left)) for kill in self.kills if time.monotonic() - kill.at > GONE_SECONDS]
        assert not [each for each in late if each[1]], late

    def kill(self, left: Counter[str], draw: random.Random) -> str:
        """Kills a process of a kind that is left to be killed, as soon as there is one; returns the kind.

        Of those that run now, the kinds that are seldom there are the likelier ones.
        """
        deadline = time.monotonic() + 2 * START_SECONDS
        while time.monotonic() < deadline and not self.done:
            self.tend()
            running = [kind for kind in sorted(left.elements()) for _ in range(SELDOM.get(kind, 1))]
            while running:
                kind, client = draw.choice(running), draw.randrange(len(self.federation.clients))
                if self._kill_one(kind, client):
                    return kind
                running = [each for each in running if each != kind]
            time.sleep(0.05)
        raise AssertionError(f"none of {dict(left)} to kill\n{self.outputs()}")

    def _kill_one(self, kind: str, client: int) -> bool:
        """Kills the process of a kind, if there is one now."""
        owner = self._owner(kind, client)
        if owner is not None and (victim := self._process(kind, owner)) is not None:
            with suppress(psutil.NoSuchProcess):
                family = victim.children(recursive=True)
                victim.send_signal(signal.SIGKILL)
                self.kills.append(Kill(kind, owner, time.monotonic(), family))
                return True
        return False

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.done:
            self.tend()
            time.sleep(0.1)

    def outputs(self) -> str:
        commands = [self.federation.server, self.run, *self.federation.clients.values()]
        return "\n".join(f"{each.log.name}: {each.output()[-1500:]}" for each in commands if each is not None)

    def _start(self, word: str, name: str, folder: Path) -> Command:
        self._starts += 1
        log = self.federation.folder / "out" / f"{self._starts:04d}-{name}.out"
        log.parent.mkdir(exist_ok=True)
        command = Command(["federation", word, str(folder)], log)
        self.began[command], self.met[command] = time.monotonic(), self.federation.server
        return command

    def _owner(self, kind: str, client: int) -> Command | None:
        if kind == "run":
            return self.run
        return self.federation.server if kind in {"server", *SERVER_PROGRAMS} else self.federation.clients[client]

    def _process(self, kind: str, owner: Command) -> psutil.Process | None:
        """Returns the process of a kind that belongs to a command; None if it does not run now."""
        if owner.process.poll() is not None:
            return None
        if kind in ("server", "client", "run"):
            return psutil.Process(owner.process.pid)
        program = {**SERVER_PROGRAMS, **CLIENT_PROGRAMS}[kind]
        with suppress(psutil.NoSuchProcess):
            for member in psutil.Process(owner.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if any(word.rpartition("/")[2] == program for word in member.cmdline()) and alive([member]):
                        return member
        return None

    def _require_kill(self, command: Command, kinds: set[str], *, any_owner: bool = False) -> None:
        causes = [
            kill.kind
            for kill in self.kills
            if kill.kind in kinds
            and (
                kill.owner is command
                or (any_owner and kill.at > self.began[command] - LONGEST_DELAY_SECONDS)
                or (any_owner and kill.kind in ENDS_SERVER and kill.owner is self.met[command])
            )
        ]
        assert causes, f"ended with status {command.process.poll()} although nobody killed it\n{command.output()}"


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    running = []
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def marked(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder):
                found.append(process)
    return alive(found)


@contextmanager
def operated(federation: FederationProcesses) -> Iterator[Operators]:
    operators = Operators(federation)
    try:
        yield operators
    finally:
        federation.terminate()
        if operators.run is not None:
            operators.run.terminate()


def test_fifty_kills_of_all_kinds_of_processes_change_no_bit(tmp_path, monkeypatch, capfd):
    """Quorum is all, and whoever is missing is waited for: nobody is left out, so the run is that of `local`.

    There the same clients are asked again in the same rounds: the server sums an upload when it comes, and a sum's
    last bits depend on the order.

    The kills come in bursts, each after a random round, so that some hit what is just being started again. All kinds
    are killed equally often, in random order.
    """
    draw = random.Random(SEED)
    config = small_config(
        save_model(tmp_path / "model"),
        *QUICK,
        *ONE_PARTITION,
        f"federation.rounds={ROUNDS}",
        "federation.quorum=1.0",
        "federation.retries=30",
        "training.steps=20",
        "evaluation.every=4",
        base="fedit/tiny-tasks",
    )
    federation = FederationProcesses(tmp_path / "federation", config)
    path = federation.folder / "server" / "server.yaml"
    waits = {"reconnect_seconds": 600, "wait_seconds": 600, "patience": None}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **waits}))
    left = Counter(dict.fromkeys(KINDS, KILLS_OF_A_KIND))
    bursts = draw.sample(range(ROUNDS - SPARE_ROUNDS), BURSTS)
    rounds_before = sorted(draw.choice(bursts) for _ in left.elements())
    monkeypatch.setenv(MARK, str(tmp_path))
    started = time.monotonic()
    deadline = started + LIMIT_SECONDS
    with operated(federation) as operators:

        def say(what: str) -> None:
            with capfd.disabled():
                print(f"{time.monotonic() - started:6.1f} s, round {operators.last_round():2d}: {what}", flush=True)

        for round_before in rounds_before:
            while operators.last_round() < round_before:
                operators.wait(0.2)
                assert time.monotonic() < deadline, operators.outputs()
            operators.wait(draw.uniform(0, LONGEST_DELAY_SECONDS))
            kind = operators.kill(left, draw)
            left[kind] -= 1
            say(f"{len(operators.kills)}. {kind}")
        while not operators.done:
            operators.wait(1)
            assert time.monotonic() < deadline, operators.outputs()
        say(f"complete, {operators.run.output().splitlines()[-1]}" if operators.run else "")
        counts = Counter(kill.kind for kill in operators.kills)
        say(f"{counts.total()} kills: {dict(counts)}")
        assert counts.total() >= 50
        assert min(counts[kind] for kind in KINDS) >= 3
        assert_none_left([process for kill in operators.kills for process in kill.left])
        commands = [each for each in [federation.server, *federation.clients.values()] if each is not None]
        families = [psutil.Process(each.process.pid) for each in commands]
        families += [member for parent in families for member in parent.children(recursive=True)]
        assert_none_left([process for process in marked(tmp_path) if process not in families])
    assert_nobody_is_blamed(federation, config.federation.rounds)
    assert_none_left(marked(tmp_path))
    for port in federation.ports:
        with socket.create_server(("127.0.0.1", port)):
            pass

    def make(run: Experiment) -> tuple[Engine, Any]:
        engine, scorer = make_engine(run)
        return Failing(engine, asked_in(federation.run_folder)), scorer

    monkeypatch.setattr("fedguild.runs.experiment.make_engine", make)
    experiment.run(config, tmp_path / "local")
    assert_same_results(federation, tmp_path / "local")


class Failing:
    """An engine whose clients fail as often as they were asked again in another run.

    Args:
        asked: Round -> the clients that each attempt asked.
    """

    def __init__(self, engine: Engine, asked: Mapping[int, Sequence[Sequence[int]]]) -> None:
        self.engine, self.asked, self.attempts = engine, asked, Counter[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        round = tasks[0].round
        self.attempts[round] += 1
        failing = {client for again in self.asked[round][self.attempts[round] :] for client in again}
        for task in tasks:
            if task.client.index in failing:
                yield Delivery(task, None, method.plan(model, task.client.budget), failure="it was killed")
        yield from self.engine.train(method, model, [t for t in tasks if t.client.index not in failing], terms)


def asked_in(run: Path) -> dict[int, list[list[int]]]:
    """Returns round -> the clients that each attempt of its last, complete try asked."""
    asked: dict[int, list[list[int]]] = {}
    for line in ActivityLog(run).path.read_text("utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "asked":
            asked[event["round"]] = [*asked.get(event["round"], [])[: event["attempt"]], event["clients"]]
    return asked


def assert_none_left(processes: Sequence[psutil.Process]) -> None:
    """All have ended, or soon do."""
    _, left = psutil.wait_procs(processes, timeout=GONE_SECONDS)
    assert not alive(left)


def assert_nobody_is_blamed(federation: FederationProcesses, rounds: int) -> None:
    """Every round has every client's upload, and no client was turned away."""
    records = [record for record in RunLog(federation.run_folder).read() if isinstance(record, RoundRecord)]
    assert [record.round for record in records] == list(range(1, rounds + 1))
    assert [record.rejected for record in records] == [[]] * rounds
    audit = AuditLog(federation.folder / "server" / "state").read()
    assert not [entry for entry in audit if entry["event"] in ("refused", "revoked", "foreign")]
