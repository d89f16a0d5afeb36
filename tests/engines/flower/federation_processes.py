"""A federation of real processes on 127.0.0.1, for tests: started as a user starts it, ended for certain."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import yaml

from fedguild.config import Config
from fedguild.federation.project import write_project

FAST = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
START_SECONDS = 120.0
RUN_SECONDS = 420.0


class Started:
    """A `fedguild` command that stays, and what it says."""

    def __init__(self, arguments: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedguild", *arguments],
                env={**os.environ, **FAST, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    def end(self) -> None:
        """Ends it as Ctrl-C does, and whatever it leaves behind."""
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            for member in family:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
        self.process.kill()
        self.process.wait()


class FederationProcesses:
    """The folders and processes of a federation.

    Args:
        folder: Where; new.
        config: What it runs.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        self.ports = free_ports(1 + config.federation.clients)
        path = folder.parent / f"{folder.name}.yaml"
        path.write_text(config.resolved_yaml())
        write_project(folder, config.federation.clients, str(path), address=f"127.0.0.1:{self.ports[0]}")
        for index in range(config.federation.clients):
            self.change_site(index, port=self.ports[1 + index], accept={"max_steps": 10000})
        path = folder / "server" / "server.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "deliver": False}))
        self.server: Started | None = None
        self.clients: dict[int, Started] = {}

    @property
    def run_folder(self) -> Path:
        return self.folder / "server" / "state" / "run"

    def site(self, index: int) -> Path:
        return self.folder / f"client-{index:03d}"

    def change_site(self, index: int, **changes: object) -> None:
        path = self.site(index) / "site.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))

    def set_run(self, config: Config) -> None:
        """Puts another config into the server's folder; the run before is moved away."""
        if self.run_folder.exists():
            self.run_folder.rename(self.run_folder.with_name(f"run-{time.monotonic_ns()}"))
        (self.folder / "server" / "run.yaml").write_text(config.resolved_yaml())

    def start_server(self) -> None:
        self.server = Started(["federation", "server", str(self.folder / "server")], self.folder / "server.out")
        mark = self.server.said().count("Ready.")
        wait_for(lambda: self.server is not None and self.server.said().count("Ready.") > mark, self.server)

    def start_client(self, index: int, environment: Mapping[str, str] | None = None) -> Started:
        command = ["federation", "client", str(self.site(index))]
        started = Started(command, self.folder / f"client-{index}.out", environment)
        self.clients[index] = started
        return started

    def begin_run(self) -> Started:
        return Started(["federation", "run", str(self.folder / "server")], self.folder / "run.out")

    def run(self) -> str:
        """Runs to the end; returns what was said."""
        started = self.begin_run()
        try:
            status = started.process.wait(RUN_SECONDS)
        finally:
            started.end()
        assert status == 0, started.said()[-3000:]
        return started.said()

    def trainer_says(self, index: int) -> str:
        path = self.site(index) / "work" / "trainer.log"
        return path.read_text() if path.is_file() else ""

    def trainer_pid(self, index: int) -> int:
        return int(json.loads((self.site(index) / "work" / "trainer.json").read_text())["pid"])

    def pid_of(self, started: Started, program: str) -> int:
        """Returns the process of one of Flower's programs below a command."""
        family = psutil.Process(started.process.pid).children(recursive=True)
        return next(one.pid for one in family if any(program in word for word in one.cmdline()))

    def end(self) -> None:
        for started in [*self.clients.values(), *([self.server] if self.server else [])]:
            started.end()


@contextmanager
def running(folder: Path, config: Config) -> Iterator[FederationProcesses]:
    """Yields a federation whose server and clients are up."""
    guild = FederationProcesses(folder, config)
    try:
        guild.start_server()
        for index in range(config.federation.clients):
            guild.start_client(index)
        yield guild
    finally:
        guild.end()


def wait_for(condition: Callable[[], bool], started: Started | None = None, seconds: float = START_SECONDS) -> None:
    """Waits until something is so; fails where it takes too long or a process has ended."""
    due = time.monotonic() + seconds
    while not condition():
        said = started.said()[-2000:] if started else ""
        assert time.monotonic() < due, f"not within {seconds:g} s\n{said}"
        assert started is None or started.process.poll() is None, said
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Returns ports of 127.0.0.1 that nobody listens on."""
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [door.getsockname()[1] for door in doors]
    for door in doors:
        door.close()
    return ports
