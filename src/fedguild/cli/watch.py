"""`fedguild watch`: a local page that follows a run, a comparison, a federation or a folder of runs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fedguild.cli.output import note

EXAMPLES = (
    "fedguild watch runs/flame-tiny-tasks",
    "fedguild watch runs/compare --port 8800 --no-browser",
    "fedguild watch union/server",
    "fedguild watch runs",
)
WatchOption = Annotated[
    bool, typer.Option("--watch", help="Open a local page that follows the run; it ends with the command.")
]


def command(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A run, a comparison, a federation's server folder or a folder of runs; it need not exist yet.",
            show_default=False,
        ),
    ],
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="The port; 0: any that is free.")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Whether to open the page in the browser.")
    ] = True,
) -> None:
    """Open a local page that follows a run, live or finished, until Ctrl-C; it writes and sends nothing.

    The page is served on 127.0.0.1 only, works offline, and shows rounds, time left, scores, clients, costs and the
    log; for a comparison its cells as they fill, for a federation its clients' keys and last contact. Its address,
    printed here, contains a secret that keeps the machine's other users out.
    """
    with watching(folder, port=port, browser=browser):
        if not folder.exists():
            note(f"{folder} does not exist yet; the page waits for it.")
        note("Ctrl-C stops it.")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


@contextlib.contextmanager
def watching(folder: Path, *, on: bool = True, port: int = 0, browser: bool = True) -> Iterator[None]:
    """Serves the page of a folder while the block runs.

    Args:
        on: False to do nothing.
        port: The port; 0 for any that is free.

    Raises:
        FedGuildError: the port is taken.
    """
    if not on:
        yield
        return
    from fedguild.federation.site import server_state
    from fedguild.report.watch.server import WatchServer

    server = WatchServer(folder, port, server_state)
    server.begin()
    try:
        typer.echo(f"Watching {folder}: {server.url}", err=True)
        if browser:
            threading.Thread(target=_open, args=(server.url,), daemon=True).start()
        yield
    finally:
        server.end()


def _open(url: str) -> None:
    """Opens a page in the browser, if there is one; the terminal prints its address in any case.

    Without a display the browser may be one for the terminal, which would take the terminal from the run.
    """
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(url)
