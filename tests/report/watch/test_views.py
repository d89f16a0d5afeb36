"""Views of a folder, read from its files as they grow."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fedguild.federation.audit import AuditLog
from fedguild.federation.site import server_state
from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.index import is_run
from fedguild.measuring.log.records import PrivacyRecord, RoundRecord, RunLog, StrayUpload
from fedguild.report.watch.board import Board
from fedguild.report.watch.federation_view import FederationView
from fedguild.report.watch.following import Follower
from fedguild.report.watch.grid_view import SCAN_SECONDS, GridView
from fedguild.report.watch.run_view import RunView
from tests.report.runs import write_run
from tests.report.watch.folders import comparison, federation, hold, live_run, one_more_round


def parts_of(view: RunView | GridView) -> dict[str, dict[str, Any]]:
    while view.refresh():
        pass
    return dict(view.board.since()["parts"])


def view(folder: Path) -> RunView:
    return RunView(folder, Board())


def test_a_live_run_is_shown_as_it_stands(tmp_path: Path) -> None:
    parts = parts_of(view(live_run(tmp_path / "run")))
    page, clients = parts["page"], parts["clients"]
    assert page["standing"]["word"] == "running"
    assert (page["facts"]["rounds"], page["totals"]["round"], page["now"]["round"]) == (12, 6, 7)
    assert page["now"]["step"] == [4, 20, 1.25]
    assert {key: row["state"] for key, row in clients.items()} == {
        **{"0": "delivered", "1": "rejected", "2": "training", "3": "training"},
        **dict.fromkeys("4567", "asked"),
    }
    assert clients["1"]["note"] == "it has NaN or infinity in 'lora_A'"
    assert clients["5"]["rejected"] == 1
    assert parts["rejections"]["1"] == {"round": 3, "client": 5, "reason": "its norm is above the limit"}
    assert [row["text"] for row in parts["log"].values()][-1] == "Round 7: <b>something</b> worth a line"


def test_totals_are_those_of_the_records(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3)
    parts = parts_of(view(folder))
    records = [record for record in RunLog(folder).read() if record.kind == "client"]
    totals = parts["page"]["totals"]
    assert totals["upload_bytes"] == sum(record.upload_bytes for record in records)
    assert totals["download_bytes"] == sum(record.download_bytes for record in records)
    assert totals["training_flops"] == pytest.approx(sum(record.training_flops for record in records))
    assert totals["peak_memory_bytes"] == max(record.peak_memory_bytes for record in records)
    assert totals["seconds"] == pytest.approx(3 * 4.6)
    own = [record for record in records if record.client == 2]
    assert parts["clients"]["2"]["upload_bytes"] == sum(record.upload_bytes for record in own)
    assert parts["clients"]["2"]["loss"] == own[-1].train_loss
    assert parts["rounds"]["2"]["upload_bytes"] == sum(record.upload_bytes for record in records if record.round == 2)
    scores = [record for record in RunLog(folder).read() if record.kind == "evaluation" and record.name == "b1"]
    assert parts["scores"]["budget/b1/test"] == [[record.round, record.score] for record in scores]


def test_what_is_withheld_is_missing_and_not_zero(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=1, clients=2)
    log = RunLog(folder)
    withheld = {"examples": None, "steps": None, "tokens": None, "train_loss": None, "training_flops": None}
    first = next(record for record in log.read() if record.kind == "client")
    log.append(first.model_copy(update={"round": 2, "seconds": None, **withheld}))
    spent = PrivacyRecord(
        round=2, unit="client", delta=1e-5, clients=[0, 1], epsilon=[1.5, 2.5], noise_multiplier=[1, 1], stopped=[1]
    )
    log.append(spent, RoundRecord(round=2, seconds=1.0, participants=[0, 1]))
    parts = parts_of(view(folder))
    assert "loss" not in parts["clients"]["0"]
    assert "training_flops" not in parts["clients"]["0"]
    assert parts["page"]["totals"]["training_flops"] is None
    assert parts["page"]["totals"]["privacy"] == {"epsilon": 2.5, "delta": 1e-5, "unit": "client"}
    assert (parts["clients"]["1"]["state"], parts["clients"]["1"]["note"]) == ("gone", "its privacy budget is spent")


@pytest.mark.parametrize(
    ("event", "word"),
    [("ended", "finished"), ("stopped", "stopped"), ("interrupted", "interrupted"), ("failed", "failed")],
)
def test_a_run_that_ended_says_how(tmp_path: Path, event: str, word: str) -> None:
    folder = live_run(tmp_path / "run")
    (folder / ".lock.json").unlink()
    ActivityLog(folder).append(event, reason="why")
    parts = parts_of(view(folder))
    assert parts["page"]["standing"]["word"] == word
    assert {row["state"] for row in parts["clients"].values()} <= {"idle", "delivered", "rejected"}


def test_a_run_whose_process_was_killed_is_not_running(tmp_path: Path) -> None:
    folder = live_run(tmp_path / "run")
    hold(folder, pid=2**22 + 1)  # above the largest process id
    standing = parts_of(view(folder))["page"]["standing"]
    assert standing["word"] == "gone"
    assert f"fedguild resume {folder}" in standing["reason"]


def test_a_half_written_line_is_left_until_it_is_whole(tmp_path: Path) -> None:
    folder = live_run(tmp_path / "run")
    seen = view(folder)
    parts_of(seen)
    line = RoundRecord(round=7, seconds=2.0, participants=[0]).model_dump_json().encode() + b"\n"
    with open(folder / RunLog.FILE, "ab") as file:
        file.write(line[:40])
        file.flush()
        assert parts_of(seen)["page"]["totals"]["round"] == 6
        file.write(line[40:])
    assert parts_of(seen)["page"]["totals"]["round"] == 7


def test_going_back_to_an_earlier_round_begins_anew(tmp_path: Path) -> None:
    folder = live_run(tmp_path / "run")
    seen = view(folder)
    before = parts_of(seen)
    epoch = seen.board.epoch
    with RunLog(folder).truncating_after(4):
        pass
    after = parts_of(seen)
    assert after["page"]["totals"]["round"] == 4
    assert sorted(after["rounds"], key=int) == ["1", "2", "3", "4"]
    assert after["clients"]["0"]["upload_bytes"] < before["clients"]["0"]["upload_bytes"]
    assert seen.board.epoch == epoch + 1
    with RunLog(folder).truncating_after(0):
        pass
    assert parts_of(seen)["clients"].keys() == before["clients"].keys(), "those that have no record yet"


def test_a_federation_shows_keys_contacts_and_who_is_gone(tmp_path: Path) -> None:
    folder = federation(tmp_path / "server")
    seen = FederationView(folder / "state", Board())
    clients = parts_of(seen)["clients"]
    assert [clients[str(n)].get("key", "") for n in range(4)] == ["joined", "joined", "joined", "revoked"]
    assert [clients[str(n)]["online"] for n in range(4)] == [True, False, True, False]
    assert (clients["3"]["state"], clients["3"]["note"]) == ("gone", "its key was revoked")
    assert clients["0"]["contact"] >= clients["2"]["contact"]
    ActivityLog(folder / "state/run").append("online", clients=["client-002"])
    gone = parts_of(seen)["clients"]["0"]
    assert (gone["state"], gone["note"], gone["online"]) == ("gone", "it is not connected", False)
    ActivityLog(folder / "state/run").append("online", clients=["client-000", "client-002"])
    assert parts_of(seen)["clients"]["0"]["state"] == "idle"
    ActivityLog(folder / "state/run").append("ended")
    ActivityLog(folder / "state/run").append("online", clients=["client-002"])  # the run delivers the models
    assert not any("online" in client for client in parts_of(seen)["clients"].values())
    assert "The key of client-003 was revoked." in [row["text"] for row in parts_of(seen)["log"].values()]


def test_a_key_that_was_refused_and_accepted_after_that_has_joined(tmp_path: Path) -> None:
    folder = federation(tmp_path / "server")
    seen, audit = FederationView(folder / "state", Board()), AuditLog(folder / "state")
    for client in ("client-000", "client-003"):
        audit.append("refused", node="1", name=client, reason="too old")
    refused = parts_of(seen)["clients"]
    assert [refused[n]["key"] for n in ("0", "3")] == ["refused", "revoked"]
    for client in ("client-000", "client-003"):
        audit.append("accepted", node="1", name=client)
    accepted = parts_of(seen)["clients"]
    assert [accepted[n]["key"] for n in ("0", "3")] == ["joined", "revoked"]
    assert "client-000 takes part after all." in [row["text"] for row in parts_of(seen)["log"].values()]


def test_the_cells_of_a_comparison_fill(tmp_path: Path) -> None:
    folder = comparison(tmp_path / "grid")
    grid = GridView(folder, Board())
    parts = parts_of(grid)
    facts = parts["page"]["facts"]
    assert (facts["rows"], facts["columns"], facts["seeds"]) == (["flame", "fedit"], [""], [0, 1])
    shown = {(run["row"], run["seed"]): (run["word"], run["round"]) for run in parts["runs"].values()}
    assert shown == {
        ("flame", 0): ("finished", 6),
        ("flame", 1): ("running", 6),
        ("fedit", 0): ("failed", 2),
        ("fedit", 1): ("waiting", 0),
    }
    assert parts["runs"]["2"]["reason"] == "disk full"
    one_more_round(folder / "flame/seed-1", 7)
    grid.refresh()
    assert grid.board.get("runs", 1)["round"] == 7


def test_new_runs_and_pages_of_a_folder_are_looked_for_twice_a_second(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/first", rounds=1)
    clock = [0.0]
    grid = GridView(tmp_path / "runs", Board(), now=lambda: clock[0])
    assert list(parts_of(grid)["runs"]) == ["0"]
    write_run(tmp_path / "runs/sweep/rank-4/seed-0", rounds=1)
    (tmp_path / "runs/sweep/sweep.html").write_text("sweep")
    clock[0] = SCAN_SECONDS - 0.01
    assert list(parts_of(grid)["runs"]) == ["0"]
    clock[0] = SCAN_SECONDS
    parts = parts_of(grid)
    assert list(parts["runs"]) == ["0", "1"]
    assert parts["page"]["facts"]["pages"] == [{"kind": "sweep", "name": "sweep", "place": "sweep"}]
    assert SCAN_SECONDS <= 0.5


def test_a_plan_that_leads_out_of_its_folder_is_not_followed(tmp_path: Path) -> None:
    write_run(tmp_path / "secret")
    folder = tmp_path / "grid"
    folder.mkdir()
    outside = [str(tmp_path / "secret"), "../secret"]
    cells = [{"row": "x", "column": "", "seed": 0, "folder": path} for path in outside]
    (folder / "cells.json").write_text(json.dumps({"cells": cells}))
    assert "runs" not in parts_of(GridView(folder, Board()))


def test_a_follower_waits_for_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "later", state_of=server_state)
    follower.refresh()
    assert follower.board.get("page", "standing")["word"] == "waiting"
    live_run(tmp_path / "later")
    follower._looked = 0.0
    follower.refresh()
    assert follower.board.get("page", "standing")["word"] == "running"
    assert follower.board.get("page", "facts")["kind"] == "run"


def test_a_follower_outlives_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(key: str, value: str) -> None:
        limit = time.monotonic() + 30
        while value not in follower.board.get("page", "standing")[key]:
            assert time.monotonic() < limit, follower.board.get("page", "standing")
            time.sleep(0.01)

    follower = Follower(live_run(tmp_path / "run"), poll_seconds=0.01)
    follower.start()
    try:
        shown("word", "running")
        with monkeypatch.context() as patch:
            patch.setattr(RunView, "refresh", lambda self: (_ for _ in ()).throw(OSError("stale file handle")))
            shown("reason", "cannot be read now: stale file handle")
        shown("word", "running")
    finally:
        follower.stop()


@pytest.mark.parametrize(("make", "kind"), [(live_run, RunView), (comparison, GridView), (federation, FederationView)])
def test_a_folder_is_known_by_what_is_in_it(tmp_path: Path, make: Any, kind: type) -> None:
    follower = Follower(make(tmp_path / "it"), state_of=server_state)
    follower.refresh()
    assert type(follower.view) is kind
    assert is_run(tmp_path / "it") is (make is live_run)


def test_a_reader_gets_what_changed_and_everything_after_a_new_beginning() -> None:
    board = Board()
    board.put("clients", 0, {"state": "idle"})
    first = board.since()
    assert (first["reset"], first["parts"]) == (True, {"clients": {"0": {"state": "idle"}}})
    board.put("clients", 0, {"state": "idle"})
    assert board.version == first["version"]
    board.put("clients", 1, {"state": "idle"})
    change = board.since(first["epoch"], first["version"])
    assert (change["reset"], change["parts"]) == (False, {"clients": {"1": {"state": "idle"}}})
    board.clear()
    assert board.since(first["epoch"], first["version"]) == {
        "epoch": first["epoch"] + 1,
        "version": change["version"] + 1,
        "reset": True,
        "parts": {},
    }


def test_late_uploads_are_listed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=1, clients=2)
    strays = [StrayUpload(round=1, client=1, upload_bytes=9, dropped="it is 1 round(s) late")]
    RunLog(folder).append(RoundRecord(round=2, seconds=1.0, participants=[0, 1], strays=strays))
    parts = parts_of(view(folder))
    assert parts["rounds"]["2"]["late"] == 1
    assert parts["rejections"]["1"]["reason"] == "an upload of round 1 was dropped: it is 1 round(s) late"


def test_a_run_of_before_there_were_events_is_finished(tmp_path: Path) -> None:
    assert parts_of(view(write_run(tmp_path / "run")))["page"]["standing"]["word"] == "finished"


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    folder = live_run(tmp_path / "run")
    with open(folder / RunLog.FILE, "ab") as file:
        file.write(b'{"kind":"round","round":\n{"kind":"client"}\n{"kind":"round","round":"x","seconds":"NaN"}\n\xff\n')
    with open(folder / ActivityLog.FILE, "ab") as file:
        file.write(b'{"event": "round"}\nnot json\n[1]\n{"event": "asked", "time": 1, "clients": 3}\n')
    one_more_round(folder, 7)
    assert parts_of(view(folder))["page"]["totals"]["round"] == 7


def test_a_resumed_run_forgets_how_it_ended(tmp_path: Path) -> None:
    folder = live_run(tmp_path / "run")
    ActivityLog(folder).append("failed", reason="disk full")
    hold(folder)
    ActivityLog(folder).append("begun", pid=os.getpid())
    parts = parts_of(view(folder))
    assert parts["page"]["standing"]["word"] == "running"
    assert {row["state"] for row in parts["clients"].values()} == {"idle"}


def test_a_client_that_takes_far_longer_than_the_others_is_late(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=1, clients=4)
    hold(folder)
    log = ActivityLog(folder)
    log.append("round", round=2, rounds=3)
    log.append("asked", round=2, attempt=0, clients=[0, 1, 2, 3])
    for client in range(4):
        log.append("sent", client=f"client-{client:03d}", kind="train", round=2)
    for client in range(3):
        log.append("answered", client=f"client-{client:03d}", kind="train", failure="")
    now = json.loads((folder / ActivityLog.FILE).read_text().splitlines()[-1])["time"]
    assert parts_of(RunView(folder, Board(), now=lambda: now + 0.5))["clients"]["3"]["state"] == "training"
    assert parts_of(RunView(folder, Board(), now=lambda: now + 60.0))["clients"]["3"]["state"] == "late"
