"""Standing of a run, read from its folder: waiting, running, ended, or gone without notice."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import psutil

from fedguild.core.layout import CONFIG, STOPPED
from fedguild.core.locking import HOLDER, Holder
from fedguild.measuring.log.folder import read_if_whole

Word = Literal["waiting", "running", "finished", "stopped", "interrupted", "failed", "gone"]
_CLOCK_SECONDS = 5.0
"""By how much the start of a process and the time in its lock's file may differ."""


@dataclass(frozen=True)
class Standing:
    """How a run stands.

    Attributes:
        word: In one word; `gone` is a run whose process has ended without recording it.
        reason: The reason, or what is awaited; may be empty.
        holder: The process that works on the run, in words; empty if there is none.
    """

    word: Word
    reason: str = ""
    holder: str = ""

    @property
    def status(self) -> str:
        """How the run stands, as it is shown."""
        return "not running" if self.word == "gone" else self.word


def standing(folder: Path, ending: tuple[str, str] | None, last_round: int, rounds: int) -> Standing:
    """Returns how a run stands.

    Args:
        folder: The run's folder; it need not exist.
        ending: The last ending among the run's events with its reason; None if there is none, or the run went on since.
        last_round: The last complete round.
        rounds: The rounds that the config asks for; 0 if unknown.
    """
    holder = _read_holder(folder)
    if holder is not None and is_alive(holder):
        return Standing("running", holder=f"process {holder.pid} on {holder.host}")
    stopped = read_if_whole(folder / STOPPED).get("reason")
    if stopped:
        return Standing("stopped", f"after round {last_round}: {stopped}")
    if ending is not None:
        words: dict[str, Word] = {"ended": "finished", "stopped": "stopped", "interrupted": "interrupted"}
        return Standing(words.get(ending[0], "failed"), ending[1])
    if not (folder / CONFIG).exists():
        return Standing("waiting", f"No run in {folder} yet; the page follows it as soon as there is one.")
    if rounds and last_round >= rounds:
        return Standing("finished")
    return Standing("gone", f"No process works on it. `fedguild resume {folder}` goes on after round {last_round}.")


def is_alive(holder: Holder) -> bool:
    """Whether the process that holds a run's lock is alive, as far as this machine can tell."""
    if holder.host != socket.gethostname():
        return True
    try:
        began = psutil.Process(holder.pid).create_time()
        return bool(began <= datetime.fromisoformat(holder.since).timestamp() + _CLOCK_SECONDS)
    except (psutil.Error, ValueError, OverflowError):
        return False


def _read_holder(folder: Path) -> Holder | None:
    try:
        return Holder(**read_if_whole(folder / HOLDER))
    except TypeError:
        return None
