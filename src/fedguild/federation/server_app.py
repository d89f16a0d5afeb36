"""The app that Flower starts on the server for each run: the round loop over Flower's Grid."""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fedguild.core.errors import FedGuildError, StoppedError
from fedguild.core.files import write_json
from fedguild.core.layout import OUTCOMES
from fedguild.core.score_names import scores_line
from fedguild.federation import SERVER_FOLDER
from fedguild.federation.flower.adapter import make_server_app

if TYPE_CHECKING:
    from fedguild.federation.flower.adapter import GridTransport

FLOWERS_SERVER = ("fedguild.federation.server_executor",)
"""The program that started the round loop, and ends with the server."""


def main(transport: GridTransport, run_config: Mapping[str, Any]) -> None:
    """Runs the server's folder and writes the outcome for `fedguild federation run`."""
    from fedguild.federation.serving import serve
    from fedguild.federation.site import load_server
    from fedguild.federation.watchdog import end_with_ancestors

    folder = Path(os.environ[SERVER_FOLDER])
    settings = load_server(folder)
    outcome: dict[str, Any] = {"status": "failed", "message": "The server's process was terminated.", "hint": ""}
    path = folder / settings.state / OUTCOMES / f"{run_config.get('ticket') or 'untold'}.json"

    def last_words(cause: str) -> None:
        hint = "Start the server again; `fedguild federation run` goes on from the last complete round."
        outcome.update(message=f"Flower's server is gone ({cause}).", hint=hint)
        write_json(path, outcome)

    end_with_ancestors(FLOWERS_SERVER, lambda program: last_words(f"{program} ended"))
    _before_sigterm(lambda: last_words("it was ended"))
    try:
        back_to = int(run_config.get("round", -1))
        round = None if back_to < 0 else back_to
        result = serve(transport, settings, folder, progress=_Printed(), round=round)
        outcome = {"status": "done", "folder": str(result.folder), "rounds": result.rounds, "mean": result.mean}
    except StoppedError as error:
        outcome = {"status": "stopped", "message": error.message, "hint": error.hint}
        print(f"{error}", flush=True)
    except FedGuildError as error:
        outcome |= {"message": error.message, "hint": error.hint}
        print(f"The run stopped: {error}", flush=True)
        logging.getLogger("flwr").addFilter(_is_news)
        raise  # so that Flower marks the run as failed
    except Exception as error:
        outcome |= {"message": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
        raise
    finally:
        write_json(path, outcome)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record is no report of an error that was printed as a message, which has a traceback besides."""
    return not (record.exc_info and isinstance(record.exc_info[1], FedGuildError))


def _before_sigterm(action: Callable[[], None]) -> None:
    """Calls `action` before this process ends by SIGTERM; Flower's own handler leaves little time afterwards."""
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGTERM)

    def act(number: int, frame: FrameType | None) -> None:
        action()
        signal.signal(signal.SIGTERM, handler)
        if callable(handler):
            handler(number, frame)
        else:
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, act)


app = make_server_app(main)


class _Printed:
    """A `Progress` as plain lines on stdout, which Flower streams to whoever follows the run."""

    def stage(self, text: str) -> None:
        self.message(f"{text}.")

    def round_started(self, number: int, total: int) -> None:
        self.message(f"Round {number} of {total}.")

    def step(self, done: int, total: int, loss: float) -> None:
        """Prints nothing: the steps are on the clients' machines."""

    def evaluated(self, scores: Mapping[str, float], metric: str) -> None:
        self.message(scores_line(scores, metric))

    def message(self, text: str) -> None:
        print(text, flush=True)
