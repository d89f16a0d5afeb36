"""Copies of a server's folder, taken while its run goes on."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from fedguild.core.errors import FedGuildError
from fedguild.core.layout import SPOOL, UPLOADS
from fedguild.federation import backup
from fedguild.federation.audit import AuditLog
from fedguild.federation.backup import back_up
from fedguild.federation.flower.adapter import GridTransport
from fedguild.federation.serving import serve
from fedguild.federation.site import ServerSettings
from fedguild.measuring.log.records import RoundRecord, RunLog
from fedguild.server import checkpoint, merge_history
from tests.federation.flower.loopback_federation import QUICK, grid_of, serve_on, small_config, trainers_of

pytest.importorskip("flwr")


def test_a_copy_taken_in_a_round_goes_on_in_the_folders_place(olmoe_folder: Path, tmp_path: Path) -> None:
    extra = ("evaluation.max_examples=2", "training.steps=1", "federation.rounds=4")
    config = small_config(olmoe_folder, *QUICK, *extra, base="fedit/tiny-tasks")
    server, copy = tmp_path / "server", tmp_path / "copy"
    server.mkdir()
    (server / "server.yaml").write_text("run: run.yaml\n")
    trainers = trainers_of(config, tmp_path)
    grid = grid_of(trainers)
    honest = grid.nodes[102].handle

    def handle(message):
        if (message.kind, message.round) == ("train", 3):
            back_up(server, copy)
        return honest(message)

    grid.nodes[102].handle = handle
    serve_on(grid, config, server)
    whole = checkpoint.load(server / "state/run/checkpoints", 4, fingerprint=config.fingerprint()).state
    assert checkpoint.latest(copy / "state/run/checkpoints") == 2
    assert not [path.name for path in copy.rglob("*") if path.name.endswith((".part", ".lock"))]
    assert len(AuditLog(copy / "state").read()) > 0

    shutil.rmtree(server)
    copy.rename(server)
    serve_on(grid_of(trainers), config, server)
    records = [record.round for record in RunLog(server / "state/run").read() if isinstance(record, RoundRecord)]
    assert records == [1, 2, 3, 4]
    again = checkpoint.load(server / "state/run/checkpoints", 4, fingerprint=config.fingerprint()).state
    assert again.tensors.keys() == whole.tensors.keys()
    assert all(again.tensors[name].equal(value) for name, value in whole.tensors.items())


def test_a_run_goes_back_before_what_its_sites_have_folded(olmoe_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(merge_history, "FLOOR", 0)
    extra = ("evaluation.max_examples=2", "training.steps=1", "federation.rounds=8", "federation.save_total_limit=9")
    config = small_config(olmoe_folder, *QUICK, *extra, base="fedex-lora/tiny-tasks")
    trainers, whole = trainers_of(config, tmp_path), tmp_path / "server/state/run/checkpoints"
    serve_on(grid_of(trainers), config, tmp_path / "server")
    assert list(tmp_path.glob("client-*/work/runs/*/merges/folded-*"))
    before = checkpoint.load(whole, 8, fingerprint=config.fingerprint()).state
    settings = ServerSettings(wait_seconds=5, reconnect_seconds=0, deliver=False, server_evaluation=True)
    serve(GridTransport(grid_of(trainers)), settings, tmp_path / "server", round=2, poll_seconds=0.0)
    after = checkpoint.load(whole, 8, fingerprint=config.fingerprint()).state
    assert all(after.tensors[name].equal(value) for name, value in before.tensors.items())


@pytest.fixture
def server(tmp_path: Path) -> Path:
    folder = tmp_path / "server"
    (folder / "state/run/checkpoints").mkdir(parents=True)
    (folder / "server.yaml").write_text("run: run.yaml\n")
    (folder / "state/run/checkpoints/round-00001.checkpoint").write_text("1")
    (folder / "state/run/metrics.jsonl").write_text("{}\n")
    return folder


@pytest.mark.parametrize("rounds", [3, 2 * backup.ATTEMPTS])
def test_a_copy_during_which_a_round_ends_is_taken_again(rounds, server, tmp_path, monkeypatch):
    left, files = list(range(2, 2 + rounds)), backup._files

    def and_a_round_ends(run: Path) -> set[tuple[str, ...]]:
        found = files(run)
        if left:
            (run / f"checkpoints/round-{left.pop(0):05d}.checkpoint").write_text("a later one")
            min((run / "checkpoints").iterdir()).unlink()
        return found

    monkeypatch.setattr(backup, "_files", and_a_round_ends)
    copy = tmp_path / "copy"
    if rounds > 3:
        with pytest.raises(FedGuildError, match="end faster than they can be copied"):
            back_up(server, copy)
        assert [path.name for path in tmp_path.iterdir()] == ["server"]
    else:
        back_up(server, copy)
        assert [path.name for path in (copy / "state/run/checkpoints").iterdir()] == ["round-00004.checkpoint"]
        assert (copy / "state/run/metrics.jsonl").read_text() == "{}\n"


def test_uploads_on_their_way_are_not_copied_and_hold_up_no_copy(server, tmp_path, monkeypatch):
    files = backup._files

    def and_an_upload_comes(run: Path) -> set[tuple[str, ...]]:
        for folder in (UPLOADS, SPOOL):
            (run / folder).mkdir(exist_ok=True)
            (run / folder / f"{len(list((run / folder).iterdir()))}.upload").write_text("of one client")
        return files(run)

    monkeypatch.setattr(backup, "_files", and_an_upload_comes)
    back_up(server, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy/state/run").iterdir()) == ["checkpoints", "metrics.jsonl"]


def test_flowers_database_is_copied_with_what_is_not_in_its_file_yet(server: Path, tmp_path: Path) -> None:
    with sqlite3.connect(server / "state/flower.db") as live:
        live.execute("PRAGMA journal_mode=WAL")
        live.execute("CREATE TABLE nodes (name)")
        live.execute("INSERT INTO nodes VALUES ('client-000')")
        live.commit()
        back_up(server, tmp_path / "copy")
        (database,) = (tmp_path / "copy/state").glob("flower.db*")
        assert sqlite3.connect(database).execute("SELECT * FROM nodes").fetchall() == [("client-000",)]
    assert database.stat().st_mode & 0o777 == 0o600


def test_a_copy_needs_a_new_folder_elsewhere(server: Path, tmp_path: Path) -> None:
    for taken in (server / "copy", tmp_path):
        with pytest.raises(FedGuildError, match="exists, or is in"):
            back_up(server, taken)
