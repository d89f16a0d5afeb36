"""The line between Flower's short process and the trainer on the same machine: 127.0.0.1 and a token.

The trainer writes its port and a token into a file that only its user can read. A request is the token,
a length and a parcel; the answer a length and a parcel. Needs neither torch nor flwr.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from fedguild.engines.flower.parcel import Parcel, from_bytes, to_bytes
from fedguild.errors import FedGuildError, UploadError

FILE = "trainer.json"
TOKEN_CHARACTERS = 64
_LENGTH_BYTES = 8
_PIECE_BYTES = 2**20
CONNECT_SECONDS = 5.0
LOST_TRAINER = "its trainer stopped while it worked; it is started again"


def forward(folder: Path, parcel: Parcel, *, wait_seconds: float = 600.0) -> Parcel:
    """Returns the trainer's answer to a parcel; an answer with a failure where the trainer dies over it.

    Args:
        folder: Where the trainer keeps its file.
        parcel: The question.
        wait_seconds: How long to wait for a trainer that is not there yet (it may be loading the model).
    """
    due = time.monotonic() + wait_seconds
    while True:
        try:
            line, token = _call(folder)
            break
        except (OSError, ValueError, KeyError):
            if time.monotonic() > due:
                return parcel.answer(failure=f"its trainer is not running (waited {wait_seconds:g} s)")
            time.sleep(0.2)
    try:
        with line:
            line.sendall(token.encode())
            _send(line, to_bytes(parcel))
            return from_bytes(_receive(line))
    except (OSError, UploadError):
        return parcel.answer(failure=LOST_TRAINER)


def serve(folder: Path, handle: Callable[[Parcel], Parcel], *, running: Callable[[], bool] = lambda: True) -> None:
    """Answers requests, one at a time, until `running` says no.

    Args:
        folder: Where to write the file that tells the way here.
        handle: Answers a parcel; a FedGuildError of it becomes an answer with a failure.
        running: Asked about once a second.
    """
    token = secrets.token_hex(TOKEN_CHARACTERS // 2)
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(1.0)
        _write_way(folder / FILE, door.getsockname()[1], token)
        try:
            while running():
                try:
                    line, _ = door.accept()
                except TimeoutError:
                    continue
                with line:
                    _answer(line, token, handle)
        finally:
            (folder / FILE).unlink(missing_ok=True)


def _answer(line: socket.socket, token: str, handle: Callable[[Parcel], Parcel]) -> None:
    """Answers one request; a caller without the token, or one that went away, gets nothing."""
    line.settimeout(CONNECT_SECONDS)
    try:
        if not hmac.compare_digest(_exactly(line, TOKEN_CHARACTERS), token.encode()):
            return
        line.settimeout(None)
        parcel = from_bytes(_receive(line))
    except (OSError, UploadError):
        return
    try:
        reply = handle(parcel)
    except FedGuildError as error:
        reply = parcel.answer(failure=error.message)
    try:
        _send(line, to_bytes(reply))
    except OSError:
        return


def _call(folder: Path) -> tuple[socket.socket, str]:
    way = json.loads((folder / FILE).read_text("utf-8"))
    line = socket.create_connection(("127.0.0.1", int(way["port"])), timeout=CONNECT_SECONDS)
    line.settimeout(None)
    return line, str(way["token"])


def _write_way(path: Path, port: int, token: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump({"port": port, "token": token, "pid": os.getpid()}, file)
    os.replace(temporary, path)


def _send(line: socket.socket, content: bytes) -> None:
    line.sendall(len(content).to_bytes(_LENGTH_BYTES, "little"))
    line.sendall(content)


def _receive(line: socket.socket) -> bytes:
    return _exactly(line, int.from_bytes(_exactly(line, _LENGTH_BYTES), "little"))


def _exactly(line: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        piece = line.recv(min(_PIECE_BYTES, count - len(content)))
        if not piece:
            raise ConnectionError("the line was cut")
        content += piece
    return bytes(content)
