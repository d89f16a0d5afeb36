"""Child processes: started, watched, restarted and terminated."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from fedguild.core.errors import FedGuildError
from fedguild.federation import processes
from fedguild.federation.processes import Child, watch

SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
BEGETS = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "


def child(program: str, folder: Path, name: str = "helper") -> Child:
    return Child(name, [sys.executable, "-c", program], dict(os.environ), folder / f"{name}.log", folder)


def interrupt_when(condition: object, seconds: float = 20.0) -> threading.Thread:
    """Sends Ctrl-C to this process as soon as something is so."""

    def wait() -> None:
        due = time.monotonic() + seconds
        while not condition() and time.monotonic() < due:  # type: ignore[operator]
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_an_end_takes_the_childs_children_along(tmp_path: Path) -> None:
    started = child(BEGETS + SLEEPS, tmp_path)
    started.start()
    due = time.monotonic() + 20
    while "up" not in started.log_tail() and time.monotonic() < due:
        time.sleep(0.02)
    family = psutil.Process(started.pid).children(recursive=True)
    assert len(family) == 1
    started.terminate()
    psutil.wait_procs(family, timeout=5)
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in family)
    assert started.exit_status() is not None


def test_the_end_of_a_log_is_shown_without_colours(tmp_path: Path) -> None:
    coloured = child("print('\\x1b[92mINFO \\x1b[0m: up')", tmp_path)
    coloured.start()
    while coloured.exit_status() is None:
        time.sleep(0.01)
    assert "\x1b[92m" in coloured.log.read_text()
    assert coloured.log_tail() == "\n  INFO : up"


def test_what_is_killed_is_started_again_and_ctrl_c_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "WATCH_SECONDS", 0.02)
    started, lines, pids = child(SLEEPS, tmp_path), [], []
    started.start()
    pids.append(started.pid)
    os.kill(started.pid, signal.SIGKILL)
    thread = interrupt_when(lambda: started.pid != pids[0])
    watch([started], lines.append, restart=True)
    thread.join()
    assert started.pid != pids[0]
    assert started.exit_status() is not None
    assert "The helper ended with status -9; it will be restarted in 1 s." in lines[0]


def test_pauses_double_until_a_life_was_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    started = child("pass", tmp_path)

    def start() -> None:
        started._restart_at, started._started = None, now[0]

    monkeypatch.setattr(started, "start", start)
    pauses = []
    for life in (0, 0, 0, 0, 0, 0, 0, 61):
        now[0] += life
        pauses.append(started.restart())
        now[0] += 100.0 if pauses[-1] is None else pauses[-1]
        assert started.restart() is None
    assert pauses == [1, 2, 4, 8, 10, 10, 10, 1]


@pytest.mark.parametrize(("status", "restart"), [(0, False), (3, False), (2, True)])
def test_an_end_that_restarting_does_not_mend_is_an_error(status: int, restart: bool, tmp_path: Path) -> None:
    started = child(f"import sys; print('the reason'); sys.exit({status})", tmp_path)
    other = child(SLEEPS, tmp_path, "other")
    for process in (started, other):
        process.start()
    with pytest.raises(FedGuildError, match=f"The helper ended with status {status}.\n  the reason"):
        watch([started, other], lambda line: None, restart=restart)
    assert other.exit_status() is not None
