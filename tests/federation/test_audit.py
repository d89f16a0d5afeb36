"""The audit log, and chained lines."""

from __future__ import annotations

import errno
import io
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.federation import audit
from fedguild.federation.audit import AuditLog


def test_entries_come_back_in_order_and_only_their_user_can_read_them(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "state")
    assert log.read() == []
    log.append("joined", client=0, examples=5)
    AuditLog(tmp_path / "state").append("revoked", client="client-000", why="é\n\x1b")
    first, second = log.read()
    assert (first["event"], first["client"], first["examples"]) == ("joined", 0, 5)
    assert (second["event"], second["why"]) == ("revoked", "é\n\x1b")
    assert first["time"] <= second["time"]
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert log.path.parent.stat().st_mode & 0o777 == 0o700
    assert len(log.path.read_text("utf-8").splitlines()) == 2


def test_an_entry_costs_the_same_however_long_the_log_is(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for number in range(3):
        log.extend("round", [{"round": number, "rejected": {"2": "x" * 300}}] * 4000)
    log.path.open("ab").write(b'{"torn')
    tracemalloc.start()
    log.append("ended", why="y" * 200_000)
    log.append("ended")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5e6 < log.path.stat().st_size / 3
    assert len(log.read()) == 12002


def test_several_writers_make_one_chain(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: AuditLog(tmp_path).append("round", round=number), range(40)))
    assert sorted(entry["round"] for entry in AuditLog(tmp_path).read()) == list(range(40))


def test_many_entries_at_once_are_one_chain_with_those_before_and_after(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.extend("registered", [])
    assert not log.path.exists()
    log.append("started")
    log.extend("registered", [{"client": f"client-{index:03d}"} for index in range(3)])
    log.append("ended")
    entries = log.read()
    assert [entry["event"] for entry in entries] == ["started", *["registered"] * 3, "ended"]
    assert [entry["client"] for entry in entries[1:4]] == ["client-000", "client-001", "client-002"]


def test_an_entry_cut_by_a_kill_is_dropped_by_the_next(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.append("joined", client=0)
    with open(log.path, "ab") as stream:
        stream.write(b'{"time":"20')
    assert len(log.read()) == 1
    log.append("joined", client=1)
    assert [entry["client"] for entry in log.read()] == [0, 1]


class _Short(io.FileIO):
    """A file on a disk that takes 40 bytes more."""

    def write(self, content: bytes) -> int:  # type: ignore[override]
        return super().write(content[:40])


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("short", [True, False])
def test_a_full_disk_leaves_what_was_written(short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path)
    log.append("round", round=1)
    before = log.path.read_bytes()
    with monkeypatch.context() as patch:
        if short:
            patch.setattr(audit, "open", lambda file, mode, buffering: _Short(file, mode), raising=False)
        else:
            patch.setattr(os, "fsync", full)
        with pytest.raises(FedGuildError, match="No space left on device"):
            log.append("revoked", client="client-000")
    assert log.path.read_bytes() == before
    log.append("round", round=2)
    assert [entry["round"] for entry in log.read()] == [1, 2]


def test_a_full_disk_does_not_hide_what_ended_a_run(olmoe_folder, tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    from fedguild.federation import serving
    from tests.federation.flower.loopback_federation import QUICK, grid_of, serve_on, small_config

    def fails(*_: object) -> None:
        monkeypatch.setattr(os, "fsync", full)
        raise FedGuildError("the run's own error")

    monkeypatch.setattr(serving, "prepare_remote", fails)
    with pytest.raises(FedGuildError, match="the run's own error"):
        serve_on(grid_of([]), small_config(olmoe_folder, *QUICK), tmp_path)


@pytest.mark.parametrize("edit", ["change", "remove", "move", "repeat"])
def test_an_edit_is_found(edit: str, tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for client in range(4):
        log.append("joined", client=client)
    lines = log.path.read_bytes().splitlines(keepends=True)
    edited = {
        "change": [lines[0], lines[1].replace(b'"client":1', b'"client":7'), *lines[2:]],
        "remove": [lines[0], *lines[2:]],
        "move": [lines[0], lines[2], lines[1], lines[3]],
        "repeat": [lines[0], lines[0], *lines[1:]],
    }[edit]
    log.path.write_bytes(b"".join(edited))
    with pytest.raises(CheckpointError, match="line 2 is not what was written"):
        log.read()
