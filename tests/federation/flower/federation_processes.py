"""A federation of real processes on 127.0.0.1: started as a user starts it, and terminated for certain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import yaml

from fedguild.config import Config
from fedguild.federation import commands
from fedguild.federation.flower import ipc
from fedguild.federation.flower.message import Message
from fedguild.federation.processes import Child
from fedguild.federation.project import write_project
from fedguild.federation.site import SiteSettings, load_site
from fedguild.federation.trainer_service import TrainerService
from tests.ports import free_ports

FAST = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
START_SECONDS = 120.0
RUN_SECONDS = 420.0
_ONE_TRAINER = threading.Lock()
"""Trainers in threads of this process work one at a time."""


def _heed_ctrl_c() -> None:
    """Undoes what a shell does for its background jobs, in which a test may run: that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """A `fedguild` command in a process of its own, and its output."""

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
                preexec_fn=_heed_ctrl_c,
            )

    def output(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    def terminate(self) -> None:
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
    """The folders and processes of a federation."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        self.ports = free_ports(2 + config.federation.clients)
        path = folder.parent / f"{folder.name}.yaml"
        path.write_text(config.resolved_yaml())
        address = f"127.0.0.1:{self.ports[0]}"
        write_project(folder, config.federation.clients, str(path), address=address, shared_data=True)
        for index in range(config.federation.clients):
            accept = {"max_steps": 10000, "min_scored": 1, "min_clients": 1}
            self.change_site(index, port=self.ports[2 + index], accept=accept)
        path = folder / "server" / "server.yaml"
        settings = {**yaml.safe_load(path.read_text()), "deliver": False, "control_port": self.ports[1]}
        path.write_text(yaml.safe_dump(settings))
        self.server: Command | None = None
        self.clients: dict[int, Command] = {}

    @property
    def run_folder(self) -> Path:
        return self.folder / "server" / "state" / "run"

    def site(self, index: int) -> Path:
        return self.folder / f"client-{index:03d}"

    def change_site(self, index: int, **changes: object) -> None:
        path = self.site(index) / "site.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))

    def set_run(self, config: Config) -> None:
        """Puts another config into the server's folder; an earlier run is moved away."""
        if self.run_folder.exists():
            self.run_folder.rename(self.run_folder.with_name(f"run-{time.monotonic_ns()}"))
        (self.folder / "server" / "run.yaml").write_text(config.resolved_yaml())

    def start_server(self) -> None:
        self.server = Command(["federation", "server", str(self.folder / "server")], self.folder / "server.out")
        mark = self.server.output().count("Ready.")
        wait_for(lambda: self.server is not None and self.server.output().count("Ready.") > mark, self.server)

    def start_client(self, index: int, environment: Mapping[str, str] | None = None) -> Command:
        command = ["federation", "client", str(self.site(index))]
        self.clients[index] = Command(command, self.folder / f"client-{index}.out", environment)
        return self.clients[index]

    def node(self, index: int) -> Child:
        return self._site_child(index, "node", commands.supernode)

    def executor(self, index: int) -> Child:
        return self._site_child(index, "executor", commands.client_executor)

    def _site_child(self, index: int, name: str, command: Callable[[Path, SiteSettings], list[str]]) -> Child:
        folder = self.site(index)
        site = load_site(folder)
        environment = {**commands.site_environment(folder, site), **FAST}
        return Child(name, command(folder, site), environment, folder / site.work / f"{name}.log", folder)

    def start_run(self) -> Command:
        return Command(["federation", "run", str(self.folder / "server")], self.folder / "run.out")

    def run(self) -> str:
        """Runs to the end; returns the output."""
        run = self.start_run()
        try:
            status = run.process.wait(RUN_SECONDS)
        finally:
            run.terminate()
        assert status == 0, run.output()[-3000:]
        return run.output()

    def trainer_log(self, index: int) -> str:
        path = self.site(index) / "work" / "trainer.log"
        return path.read_text() if path.is_file() else ""

    def executor_log(self, index: int) -> str:
        return (self.site(index) / "work" / "executor.log").read_text()

    def trainer_pid(self, index: int) -> int:
        return int(json.loads((self.site(index) / "work" / ipc.ADDRESS_FILE).read_text())["pid"])

    def pid_of(self, command: Command, program: str) -> int:
        family = psutil.Process(command.process.pid).children(recursive=True)
        return next(member.pid for member in family if any(program in word for word in member.cmdline()))

    def terminate(self) -> None:
        for command in [*self.clients.values(), *([self.server] if self.server else [])]:
            command.terminate()


@contextmanager
def running(folder: Path, config: Config) -> Iterator[FederationProcesses]:
    federation = FederationProcesses(folder, config)
    try:
        federation.start_server()
        for index in range(config.federation.clients):
            federation.start_client(index)
        yield federation
    finally:
        federation.terminate()


@contextmanager
def running_cheaply(folder: Path, config: Config) -> Iterator[FederationProcesses]:
    """Yields a federation whose last client is a command, and whose other clients have their trainers in this process.

    A trainer of its own costs as much as five of Flower's messages: it imports torch.
    """
    federation, last = FederationProcesses(folder, config), config.federation.clients - 1
    with ExitStack() as stack:
        stack.callback(federation.terminate)
        federation.start_server()
        for index in range(last):
            stack.enter_context(_trainer_thread(federation.site(index)))
            for child in (federation.node(index), federation.executor(index)):
                stack.callback(child.terminate)
                child.start()
        federation.start_client(last)
        yield federation


@contextmanager
def _trainer_thread(folder: Path) -> Iterator[None]:
    """Runs a site's trainer in a thread of this process."""
    site = load_site(folder)  # its relative paths begin in its folder, where a trainer of its own would run
    model = site.model.model_copy(update={"path": str(folder / site.model.path)})
    service, stopped = TrainerService(site.model_copy(update={"model": model}), folder), threading.Event()

    def handle(message: Message) -> Message:
        with _ONE_TRAINER:
            return service.handle(message)

    thread = threading.Thread(
        target=ipc.serve, args=(service.work, handle), kwargs={"running": lambda: not stopped.is_set()}
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def wait_for(condition: Callable[[], bool], command: Command | None = None, seconds: float = START_SECONDS) -> None:
    """Waits until a condition holds; fails if that takes too long or a command ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        output = command.output()[-2000:] if command else ""
        assert time.monotonic() < deadline, f"not within {seconds:g} s\n{output}"
        assert command is None or command.process.poll() is None, output
        time.sleep(0.05)
