"""The end of the round loop's process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedguild.core.errors import FedGuildError, StoppedError
from fedguild.federation import SERVER_FOLDER, server_app

PROGRAM = """
import signal, sys, threading
from fedguild.federation.server_app import _before_sigterm
def flowers(number, frame):
    print("the handler from before", number, flush=True)
    sys.exit(7)
{before}
_before_sigterm(lambda: print("last words", flush=True))
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("before", "said", "status"),
    [
        ("signal.signal(signal.SIGTERM, flowers)", "last words\nthe handler from before 15\n", 7),
        ("", "last words\n", -signal.SIGTERM),
    ],
)
def test_last_words_come_before_flowers_own_handler(before: str, said: str, status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == (said, status), ended.stderr


ENDS = {
    "done": (None, {"status": "done", "folder": "run", "rounds": 4, "mean": 0.5}),
    "stopped": (StoppedError("enough", "go on"), {"status": "stopped", "message": "enough", "hint": "go on"}),
    "fault": (FedGuildError("no quorum", "wait"), {"status": "failed", "message": "no quorum", "hint": "wait"}),
    "bug": (ValueError("x"), {"status": "failed", "message": "ValueError: x", "hint": ""}),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_outcome_is_written_however_a_run_ends(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error, outcome = ENDS[end]
    asked: list[object] = []

    def serve(transport: object, settings: object, folder: Path, *, progress: object, round: int | None) -> object:
        asked.append((transport, folder, round))
        if error is not None:
            raise error
        return SimpleNamespace(folder="run", rounds=4, mean=0.5)

    (tmp_path / "server.yaml").write_text("port: 9443\n")
    monkeypatch.setenv(SERVER_FOLDER, str(tmp_path))
    monkeypatch.setattr("fedguild.federation.serving.serve", serve)
    before = signal.getsignal(signal.SIGTERM)
    try:
        if end in ("fault", "bug"):
            with pytest.raises(type(error)):
                server_app.main("transport", {"ticket": "t1", "round": 2})
        else:
            server_app.main("transport", {"ticket": "t1"})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [("transport", tmp_path, 2 if end in ("fault", "bug") else None)]
    assert json.loads((tmp_path / "state" / "outcomes" / "t1.json").read_text()) == outcome
