"""Operations behind `fedguild federation`: what they start, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedguild.core.errors import FedGuildError
from fedguild.federation import operations
from fedguild.federation.processes import Child

RUN = """
import sys
from pathlib import Path
from fedguild.federation import commands, operations
program = "import time; print('up', flush=True); time.sleep(600)"
operations._nodes = lambda environment: []
operations.register_keys = lambda *arguments: []
commands.start_run = lambda *arguments, **named: [sys.executable, "-c", program]
operations.run_federation(Path(sys.argv[1]), lambda line: print(line, flush=True))
"""


def test_sigkill_of_the_command_that_follows_a_run_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("port: 9443\n")
    with subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        family = psutil.Process(parent.pid).children(recursive=True)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        _, alive = psutil.wait_procs(family, timeout=20)
        for member in alive:
            member.kill()
        assert family
        assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]


def test_a_server_is_not_up_while_one_of_its_programs_is_gone(tmp_path: Path) -> None:
    """Also if it is another one than the one that is waited for."""

    def child(name: str, program: str) -> Child:
        started = Child(name, [sys.executable, "-c", program], dict(os.environ), tmp_path / f"{name}.log", tmp_path)
        started.start()
        return started

    server, executor = child("server", "import time; time.sleep(600)"), child("executor", "raise SystemExit(3)")
    try:
        with pytest.raises(FedGuildError, match="The executor ended with status 3"):
            operations._wait_until(server, [server, executor], lambda: executor.exit_status() is not None)
    finally:
        server.terminate()
        executor.terminate()
