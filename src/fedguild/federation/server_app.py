"""The app that Flower starts on the server for each run: the round loop over Flower's Grid."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedguild.engines.flower.adapter import make_server_app
from fedguild.errors import FedGuildError, StoppedError
from fedguild.federation import SERVER_FOLDER
from fedguild.files import write_json

if TYPE_CHECKING:
    from fedguild.engines.flower.adapter import GridTransport

OUTCOMES = "outcomes"
FLOWERS_SERVER = ("flower-superlink", "flower-superexec", "fedguild.federation.server_executor")
"""The programs without which the round loop reaches no client."""


def main(transport: GridTransport, run_config: Mapping[str, Any]) -> None:
    """Runs the server's folder and writes the outcome for `fedguild federation run`."""
    from fedguild.config.site import load_server
    from fedguild.federation.printed_progress import PrintedProgress
    from fedguild.federation.serving import serve
    from fedguild.federation.watchdog import end_with_ancestors

    folder = Path(os.environ[SERVER_FOLDER])
    settings = load_server(folder)
    outcome: dict[str, Any] = {"status": "failed", "message": "The server's process was terminated.", "hint": ""}
    path = folder / settings.state / OUTCOMES / f"{run_config.get('ticket') or 'untold'}.json"

    def last_words(program: str) -> None:
        hint = "Start the server again; `fedguild federation run` goes on from the last complete round."
        write_json(path, outcome | {"message": f"Flower's server is gone ({program} ended).", "hint": hint})

    end_with_ancestors(FLOWERS_SERVER, last_words)
    try:
        back_to = int(run_config.get("round", -1))
        round = None if back_to < 0 else back_to
        result = serve(transport, settings, folder, progress=PrintedProgress(), round=round)
        outcome = {"status": "done", "folder": str(result.folder), "rounds": result.rounds, "mean": result.mean}
    except StoppedError as error:
        outcome = {"status": "stopped", "message": error.message, "hint": error.hint}
        print(f"{error}", flush=True)
    except FedGuildError as error:
        outcome |= {"message": error.message, "hint": error.hint}
        print(f"The run stopped: {error}", flush=True)
        raise
    except Exception as error:
        outcome |= {"message": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
        raise
    finally:
        write_json(path, outcome)


app = make_server_app(main)
