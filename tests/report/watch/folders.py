"""Folders of runs as they are while the runs go on."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.records import RoundRecord, RunLog
from tests.report.runs import write_run

PLAN = [("flame", 0), ("flame", 1), ("fedit", 0), ("fedit", 1)]


def hold(folder: Path, pid: int | None = None) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = {"pid": pid or os.getpid(), "host": socket.gethostname(), "since": since, "command": "pytest"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock.json").write_text(json.dumps(holder))


def live_run(folder: Path, **how: Any) -> Path:
    """Writes a run that is in the middle of its seventh round of twelve."""
    write_run(folder, rounds=6, rejected=[(3, 5, "its norm is above the limit")], **how)
    settings = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(settings.replace("rounds: 6", "rounds: 12"))
    hold(folder)
    log = ActivityLog(folder)
    log.append("begun", pid=os.getpid())
    log.append("stage", text="Loading the model embedded")
    log.append("round", round=7, rounds=12)
    log.append("asked", round=7, attempt=0, clients=list(range(8)))
    log.append("training", clients=[0, 1, 2, 3])
    log.append("step", done=4, total=20, loss=1.25)
    log.append("delivered", client=0, reason="", needed=True)
    log.append("delivered", client=1, reason="it has NaN or infinity in 'lora_A'", needed=True)
    log.append("message", text="Round 7: <b>something</b> worth a line")
    return folder


def comparison(folder: Path) -> Path:
    """Writes a comparison: one cell is finished, one is going on, one failed, one has not begun."""
    cells = [{"row": row, "column": "", "seed": seed, "folder": f"{row}/seed-{seed}"} for row, seed in PLAN]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cells.json").write_text(json.dumps({"cells": cells}))
    done = write_run(folder / "flame/seed-0", seed=0)
    (done / "report.html").write_text("<!doctype html><title>report</title>")
    ActivityLog(done).append("ended")
    live_run(folder / "flame/seed-1", seed=1)
    failed = write_run(folder / "fedit/seed-0", name="fedit", method="fedit", rounds=2)
    ActivityLog(failed).append("failed", reason="disk full")
    return folder


def federation(folder: Path) -> Path:
    """Writes the folder of a federation's server with four clients, one of which is out."""
    state = folder / "state"
    live_run(state / "run", clients=8, own_scores=True)
    folder.joinpath("server.yaml").write_text("state: state\n")
    (state / "registered.json").write_text(json.dumps({f"client-{n:03d}": "key" for n in range(3)}))
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    entries = [{"time": now, "event": "registered", "client": f"client-{n:03d}"} for n in range(4)]
    entries += [{"time": now, "event": "joined", "client": n, "claimed": 9, "examples": 9} for n in range(3)]
    entries += [{"time": now, "event": "revoked", "client": "client-003"}]
    entries += [{"time": now, "event": "refused", "name": "client-003", "reason": "its key is not registered"}]
    (state / "audit.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    log = ActivityLog(state / "run")
    log.append("online", clients=["client-000", "client-002"])
    log.append("sent", client="client-002", kind="train", round=7)
    log.append("answered", client="client-000", kind="train", failure="")
    return folder


def one_more_round(folder: Path, number: int) -> None:
    RunLog(folder).append(RoundRecord(round=number, seconds=2.0, participants=[0, 1]))
