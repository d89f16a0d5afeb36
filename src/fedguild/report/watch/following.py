"""Following a folder: what kind it is, and a thread that reads its files as they grow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fedguild.core.errors import first_line
from fedguild.core.layout import AUDIT, RUN
from fedguild.measuring.log.index import PLAN_FILE, find_runs, is_run
from fedguild.measuring.log.standing import Standing
from fedguild.report.watch.board import Board
from fedguild.report.watch.federation_view import FederationView
from fedguild.report.watch.grid_view import GridView
from fedguild.report.watch.run_view import RunView

POLL_SECONDS = 0.2
LOOK_SECONDS = 0.5
"""A folder in which there is nothing yet is looked at again after this time."""


StateOf = Callable[[Path], Path | None]
"""Folder -> the state folder of the federation's server whose folder it is; None where it is no server's."""


def no_server(folder: Path) -> None:
    """The default of `state_of`: no folder is a federation's server folder."""


class View(Protocol):
    """The parts of a page, read from a folder."""

    def refresh(self) -> bool:
        """Reads what is new; returns whether there is more to read already."""
        ...

    def close(self) -> None: ...


def view_of(folder: Path, board: Board, state_of: StateOf = no_server) -> View | None:
    """Returns the view of a folder: a federation, a run, or a folder of runs; None if it is none of them yet.

    Raises:
        ConfigError: it is a federation's server folder with an invalid server.yaml.
    """
    if (state := state_of(folder)) is not None:
        return FederationView(state, board)
    if folder.name == RUN and (folder.parent / AUDIT).is_file():
        return FederationView(folder.parent, board)
    if is_run(folder):
        return RunView(folder, board)
    if (folder / PLAN_FILE).is_file() or find_runs(folder):
        return GridView(folder, board)
    return None


class Follower:
    """Keeps a board in step with a folder, in its own thread.

    Args:
        folder: The folder; it need not exist yet.
        poll_seconds: Interval between looks at the files.
        state_of: Returns the run's state folder if a folder is a federation's server folder.
    """

    def __init__(self, folder: Path, poll_seconds: float = POLL_SECONDS, state_of: StateOf = no_server) -> None:
        self.folder, self.board = folder, Board()
        self.view: View | None = None
        self.used = time.monotonic()
        self._poll_seconds, self._state_of = poll_seconds, state_of
        self._stop = threading.Event()
        self._reading = threading.Lock()
        self._looked = -LOOK_SECONDS
        self._thread = threading.Thread(target=self._follow, name=f"follow {folder}", daemon=True)

    def start(self) -> None:
        """Begins to follow; returns once the folder has been looked at."""
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self.board.close()

    def refresh(self) -> bool:
        with self._reading:
            before = self.board.version
            if self.view is None:
                self._look()
            more = self.view.refresh() if self.view is not None else False
        if self.board.version != before:
            self.board.tell()
        return more

    def _look(self) -> None:
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self.view = view_of(self.folder, self.board, self._state_of)
        if self.view is not None:
            self.board.clear()
            return
        awaited = f"Nothing in {self.folder} yet; the page follows it as soon as there is a run."
        how = Standing("waiting", awaited)
        self.board.put("page", "facts", {"kind": "waiting", "folder": str(self.folder), "name": self.folder.name})
        self.board.put("page", "standing", {"word": how.word, "reason": how.reason, "holder": ""})

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                more = self.refresh()
            except Exception as error:  # the page says so, and goes on once the folder can be read
                reason = f"{self.folder} cannot be read now: {first_line(error)}"
                self.board.put("page", "standing", {"word": "waiting", "reason": reason, "holder": ""})
                self.board.tell()
                more = False
            if not more:
                self._stop.wait(self._poll_seconds)
        if self.view is not None:
            self.view.close()
