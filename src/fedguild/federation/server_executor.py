"""The program on the server that starts the round loop of a run, if the run is of FedGuild's app.

Flower's interfaces on the server's machine require no key, so anyone who reaches them can start a run of any app. Such
a run is ended before anything of the app is installed or loaded.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from fedguild.core.files import write_text
from fedguild.federation import commands, templates
from fedguild.federation.audit import AuditLog
from fedguild.federation.flower import bundle
from fedguild.federation.flower.tasks import AGENT_APP, HEARTBEAT_SECONDS, SERVER_APP, Task, TaskSource
from fedguild.federation.watchdog import dying_with_parent

END_SECONDS = 5.0


@dataclass
class _Loop:
    """The round loop of a run.

    Attributes:
        token_file: The file with the task's token, which only the user can read.
        process: Its process, which on a busy machine takes longer to start than Flower waits for a sign of life.
        kept: When Flower last received its sign of life, on the monotonic clock.
    """

    task: Task
    token_file: Path
    process: subprocess.Popen[bytes]
    kept: float

    @classmethod
    def start(cls, source: TaskSource, task: Task, folder: Path) -> _Loop:
        """Starts the round loop of a run; it ends with this process."""
        token_file = folder / f"{hashlib.sha256(task.token.encode()).hexdigest()[:16]}.token"
        write_text(token_file, task.token)
        process = subprocess.Popen(
            commands.server_app(source.address, source.authority, token_file, os.getpid()),
            stdin=subprocess.DEVNULL,
            preexec_fn=dying_with_parent(),
        )
        return cls(task, token_file, process, time.monotonic())

    def keep(self, source: TaskSource) -> None:
        """Sends Flower its sign of life from time to time."""
        if time.monotonic() - self.kept >= HEARTBEAT_SECONDS:
            self.kept = time.monotonic()
            with suppress(httpx.HTTPError):
                source.keep(self.task)

    def end(self) -> None:
        """Waits until it has reported its end and released its resources."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.token_file.unlink(missing_ok=True)


def main(address: str, secret: str, authority: str, state: str) -> None:
    """Starts round loops until a signal ends it.

    Args:
        address: Where Flower's server answers, `host:port`.
        authority: The authority's certificate, a PEM file.
    """
    source, audit = TaskSource(address, Path(secret), Path(authority)), AuditLog(Path(state))
    folder = Path(secret).parent
    trusted = hashlib.sha256(bundle.build(templates.APP)).hexdigest()
    loops: list[_Loop] = []
    for left in folder.glob("*.token"):  # Of an executor that was killed.
        left.unlink()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        for task in source.forever(SERVER_APP, AGENT_APP):
            for loop in [loop for loop in loops if loop.process.poll() is not None]:
                loops.remove(loop)
                loop.end()
                if loop.process.returncode:  # It was killed, or else Flower knows already.
                    _fail(source, loop.task, f"The round loop ended with status {loop.process.returncode}.")
            for loop in loops:
                loop.keep(source)
            if task is None:
                continue
            if task.type == SERVER_APP and task.bundle_sha256 == trusted:
                loops.append(_Loop.start(source, task, folder))
            else:
                print(f"Refused a run of another app ({task.bundle_sha256}).", file=sys.stderr, flush=True)
                audit.append("foreign", app=task.bundle_sha256)
                _fail(source, task, "This server runs FedGuild's app only.")
    finally:
        for loop in loops:
            loop.process.terminate()
        for loop in loops:
            loop.end()


def _fail(source: TaskSource, task: Task, reason: str) -> None:
    with suppress(httpx.HTTPError):
        source.fail(task, reason)


if __name__ == "__main__":
    main(*sys.argv[1:])
