"""Nobody is orphaned: what a process started ends with it, also when it is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fedguild.federation import watchdog
from fedguild.federation.processes import Child

PARENT = """
import os, sys, time
from pathlib import Path
from fedguild.federation import processes, watchdog
if sys.argv[2] == "portable":
    processes.dying_with_parent = lambda: None
program = '''
import socket, subprocess, sys, time
listener = socket.create_server(("127.0.0.1", 0))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[listener.fileno()])
print(listener.getsockname()[1], flush=True)
time.sleep(600)
'''
folder = Path(sys.argv[1])
child = processes.Child("helper", [sys.executable, "-c", program], dict(os.environ), folder / "helper.log", folder)
child.start()
while not child.log_tail():
    time.sleep(0.01)
print(child.log_tail().strip(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["linux", "portable"])
def test_sigkill_of_a_parent_leaves_no_process_and_no_port(way: str, tmp_path: Path) -> None:
    """Neither the child nor what it started, which has the port open, too; with the kernel's signal and without."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), way], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == 3, "a child, its own child, and the watchdog"
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        _, alive = psutil.wait_procs(family, timeout=20)
        for member in alive:
            member.kill()
        assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]
    with socket.create_server(("127.0.0.1", port)):
        pass


LOOP = """
import subprocess, sys, time
program = '''
import sys, time
from pathlib import Path
from fedguild.federation.watchdog import end_with_ancestors
end_with_ancestors(["flower-superlink", "flower-superexec"], lambda program: Path(sys.argv[1]).write_text(program))
print("watching", flush=True)
time.sleep(600)
'''
between = "import subprocess, sys; subprocess.Popen(sys.argv[1:-1], start_new_session=True).wait()"
loop = [sys.executable, "-c", program, sys.argv[1]]
subprocess.Popen([sys.executable, "-c", between, *loop, "flower-superexec"]).wait()
"""


def test_a_loop_in_a_session_of_its_own_ends_with_its_ancestors(tmp_path: Path) -> None:
    """The first of them is killed; the one between, which stays, is not what the loop waits for."""
    said = tmp_path / "said"
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, str(said), "flower-superlink"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "watching\n"
        family = psutil.Process(server.pid).children(recursive=True)
        assert len(family) == 2
        os.kill(server.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=20)
        for member in alive:
            member.kill()
        assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]
    assert said.read_text() == "flower-superlink"


class Ancestor:
    """A process that is alive for a while."""

    def __init__(self, *words: str, looks: int = 10**9, status: str = "running") -> None:
        self.words, self.looks, self.state = list(words), looks, status

    def cmdline(self) -> list[str]:
        if not self.words:
            raise psutil.AccessDenied
        return self.words

    def is_running(self) -> bool:
        self.looks -= 1
        return self.looks > 0

    def status(self) -> str:
        return self.state


@pytest.mark.parametrize("gone", [{"looks": 3}, {"status": psutil.STATUS_ZOMBIE}])
def test_the_ancestor_that_ended_is_named(gone: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with other programs, or of which nothing may be known, do not count."""
    family = [Ancestor(), Ancestor("/bin/bash", looks=1), Ancestor("/opt/flower-superlink", "--insecure", **gone)]
    ended, said = threading.Event(), []
    monkeypatch.setattr(watchdog, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(watchdog.psutil, "Process", lambda: SimpleNamespace(parents=lambda: family))

    def exit(status: int) -> None:
        ended.set()
        threading.Event().wait()  # never to return, as the real one

    monkeypatch.setattr(watchdog.os, "_exit", exit)
    watchdog.end_with_ancestors(["flower-superlink", "flower-superexec"], said.append)
    assert ended.wait(20)
    assert said == ["flower-superlink"]


def test_a_watchdog_that_is_dismissed_leaves_the_group_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as process:
        watchdog.Watchdog(process.pid).dismiss()
        assert process.poll() is None
        process.kill()


def test_what_a_child_writes_only_its_user_can_read(tmp_path: Path) -> None:
    program = "open('made', 'w').close(); import os; os.mkdir('folder'); print('up')"
    child = Child(
        "helper", [sys.executable, "-c", program], dict(os.environ), tmp_path / "logs" / "helper.log", tmp_path
    )
    child.start()
    try:
        assert child._process is not None
        child._process.wait(20)
    finally:
        child.terminate()
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"logs": 0o700, "helper.log": 0o600, "made": 0o600, "folder": 0o700}
