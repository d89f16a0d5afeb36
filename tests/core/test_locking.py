"""One process at a time works on a run's folder."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from fedguild.core.errors import CheckpointError, ConfigError, FedGuildError
from fedguild.core.locking import LOCK, holder, run_lock
from fedguild.runs import experiment

HOLDS = """
import sys, time
from pathlib import Path
from fedguild.core.locking import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path):
    """Another process that works on the run's folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_process_learns_who_is_at_work_and_since_when(other, tmp_path: Path) -> None:
    found = holder(tmp_path / "run")
    assert found is not None
    assert found.pid == other.pid
    with pytest.raises(CheckpointError) as caught, run_lock(tmp_path / "run"):
        pytest.fail("two processes hold the lock")
    assert f"is in use by process {other.pid} on " in str(caught.value)
    assert f"since {found.since}" in str(caught.value)
    assert holder(tmp_path / "run") == found, "the refused process left the holder's word alone"


def test_somebody_who_asks_who_is_at_work_keeps_nobody_from_it(tmp_path: Path) -> None:
    """Whoever asks holds the lock for a moment, of which this is a long one."""
    (tmp_path / "run").mkdir()
    asking = FileLock(tmp_path / "run" / LOCK, thread_local=False)
    asking.acquire()
    ending = threading.Timer(0.1, asking.release)
    ending.start()
    with run_lock(tmp_path / "run"):
        assert holder(tmp_path / "run") is not None
    ending.join()


@pytest.mark.parametrize("number", ["ENOLCK", "EOPNOTSUPP", "EIO", "ENOSYS"])
def test_a_file_system_without_locks_is_an_error_with_a_remedy(number, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr("fcntl.flock", flock)
    for _ in range(2):  # no file is left that would say that somebody is at work
        with (
            pytest.raises(FedGuildError, match="cannot be locked for this process") as caught,
            run_lock(tmp_path / "run"),
        ):
            pytest.fail("there is no lock")
        assert os.strerror(getattr(errno, number)) in caught.value.message
    assert holder(tmp_path / "run") is None


@pytest.mark.parametrize("stands", ["folder", "link", "read-only"])
def test_a_lock_that_cannot_be_opened(stands, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run" / LOCK
    if stands == "folder":
        lock.mkdir()
    elif stands == "link":
        lock.symlink_to(tmp_path / "elsewhere")
    else:
        opened = os.open

        def refusing(path, *arguments, **named):
            if str(path) == str(lock):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return opened(path, *arguments, **named)

        monkeypatch.setattr("os.open", refusing)
    with pytest.raises(FedGuildError, match="cannot be locked for this process"), run_lock(tmp_path / "run"):
        pytest.fail("there is no lock")
    assert holder(tmp_path / "run") is None
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_with_a_link_out_of_it_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis.part").touch()
    (tmp_path / "run/activity.jsonl").symlink_to(tmp_path / "thesis.part")
    with pytest.raises(FedGuildError, match="outside of"), run_lock(tmp_path / "run"):
        pytest.fail("it was let in")
    assert holder(tmp_path / "run") is None


def test_what_a_killed_holder_was_writing_is_removed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/..lock.json.abc.part").touch()
    with run_lock(tmp_path / "run"):
        assert [path.name for path in (tmp_path / "run").glob(".*.part")] == []


def test_a_killed_process_releases_the_lock_at_once(other, tmp_path: Path) -> None:
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert holder(tmp_path / "run") is None
    with run_lock(tmp_path / "run"):
        found = holder(tmp_path / "run")
    assert found is not None
    assert found.pid == os.getpid()
    assert holder(tmp_path / "run") is None


def test_a_folder_that_nothing_came_of_is_removed_again(tmp_path: Path) -> None:
    with pytest.raises(KeyError), run_lock(tmp_path / "new" / "run"):
        raise KeyError
    assert not (tmp_path / "new").exists()
    with run_lock(tmp_path / "new" / "run"):
        (tmp_path / "new" / "other").mkdir()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["other"]
    (tmp_path / "there").mkdir()
    with run_lock(tmp_path / "there"):
        pass
    assert (tmp_path / "there").exists()


def test_a_config_with_a_fault_leaves_no_folder_even_if_it_is_killed(tmp_path, monkeypatch):
    """It is refused before the lock, which makes the folder, is taken."""
    from fedguild.config import load_config

    monkeypatch.setattr(experiment, "run_lock", lambda folder: pytest.fail("a folder was made"))
    config = load_config("fedit/tiny-tasks", ["federation.budgets=[{name: all, active_experts: 999}]"])
    with pytest.raises(ConfigError, match="999"):
        experiment.run(config, tmp_path / "run")


@pytest.mark.parametrize(("work", "engine"), [("run", "ray"), ("resume", "local")])
def test_a_run_that_is_being_worked_on_is_neither_begun_nor_resumed(work, engine, other, tmp_path, monkeypatch):
    """Whatever the engine: the lock comes before it is made, and before the model is loaded."""
    from fedguild.config import load_config
    from fedguild.core.files import write_text

    for later in ("make_engine", "prepare"):
        monkeypatch.setattr(experiment, later, lambda *_: pytest.fail("an engine was opened without the lock"))
    config = load_config("fedit/tiny-tasks", [f"federation.engine={{name: {engine}}}"])
    if work == "resume":
        write_text(tmp_path / "run" / "config.yaml", config.resolved_yaml())
    with pytest.raises(CheckpointError, match=f"is in use by process {other.pid}"):
        experiment.run(config, tmp_path / "run") if work == "run" else experiment.resume(tmp_path / "run")
