"""The request to stop a federation's run: a file that its loop checks whenever it waits."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from fedguild.core.errors import StoppedError
from fedguild.core.files import write_json

STOP = "stop.json"


def request_stop(state: Path, by: str) -> None:
    """Asks the run of a state folder to stop; `by` names who asks, for the message."""
    write_json(state / STOP, {"by": by, "since": datetime.now().astimezone().isoformat(timespec="seconds")})


def stop_is_requested(state: Path) -> bool:
    """Whether the run was asked to stop and has not stopped yet."""
    return (state / STOP).exists()


def withdraw_request(state: Path) -> None:
    """Removes the request, before a run starts and after it has stopped."""
    (state / STOP).unlink(missing_ok=True)


def stop_if_requested(state: Path) -> None:
    """Ends the run if it was asked to stop.

    Raises:
        StoppedError: it was.
    """
    if stop_is_requested(state):
        raise StoppedError(
            "The run was stopped by its operator.", "`fedguild federation run` goes on from the last complete round."
        )
