"""Requests from a client's executor to the trainer on the same machine, over 127.0.0.1 with a token.

The trainer writes its port and a token into a file that only its user can read. A request is the token, a length and a
message; the reply is a length and a message. Needs neither torch nor flwr.
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

from fedguild.core.errors import FedGuildError, UploadError
from fedguild.core.files import make_folder
from fedguild.federation.flower.message import Message

ADDRESS_FILE = "trainer.json"
TOKEN_CHARACTERS = 64
_LENGTH_BYTES = 8
_CHUNK_BYTES = 2**20
CONNECT_SECONDS = 5.0
TRAINER_DIED = "its trainer stopped during the request and is being restarted"
TRAINER_ABSENT = "its trainer is not running"


def request(folder: Path, message: Message, *, wait_seconds: float = 600.0) -> Message:
    """Returns the trainer's reply to a message; a reply with a failure if the trainer dies meanwhile.

    Args:
        wait_seconds: How long to wait for a trainer that is not up yet (it may be loading the model).
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            connection, token = _connect(folder)
            break
        except (OSError, ValueError, KeyError):
            if time.monotonic() > deadline:
                return message.reply(failure=f"{TRAINER_ABSENT} (waited {wait_seconds:g} s)")
            time.sleep(0.2)
    try:
        with connection:
            connection.sendall(token.encode())
            _send(connection, message.to_bytes())
            return Message.from_bytes(_receive(connection))
    except (OSError, UploadError):
        return message.reply(failure=TRAINER_DIED)


def will_pass(failure: str) -> bool:
    """Whether a failure is of the trainer's process, which is restarted, and not of the request."""
    return failure.startswith((TRAINER_DIED, TRAINER_ABSENT))


def serve(folder: Path, handle: Callable[[Message], Message], *, running: Callable[[], bool] = lambda: True) -> None:
    """Answers requests, one at a time, until `running` returns False.

    Args:
        folder: Receives the address and the token.
        handle: Returns the reply to a message; a FedGuildError that it raises becomes a reply with a failure.
        running: Called about once a second.
    """
    token = secrets.token_hex(TOKEN_CHARACTERS // 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(1.0)
        _write_address(folder / ADDRESS_FILE, listener.getsockname()[1], token)
        try:
            while running():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    _serve_one(connection, token, handle)
        finally:
            (folder / ADDRESS_FILE).unlink(missing_ok=True)


def _serve_one(connection: socket.socket, token: str, handle: Callable[[Message], Message]) -> None:
    """Answers one request; a caller without the token, or one that has disconnected, gets no reply."""
    connection.settimeout(CONNECT_SECONDS)
    try:
        if not hmac.compare_digest(_receive_exactly(connection, TOKEN_CHARACTERS), token.encode()):
            return
        connection.settimeout(None)
        message = Message.from_bytes(_receive(connection))
    except (OSError, UploadError):
        return
    try:
        reply = handle(message)
    except FedGuildError as error:
        reply = message.reply(failure=error.message)
    try:
        _send(connection, reply.to_bytes())
    except OSError:
        return


def _connect(folder: Path) -> tuple[socket.socket, str]:
    address = json.loads((folder / ADDRESS_FILE).read_text("utf-8"))
    connection = socket.create_connection(("127.0.0.1", int(address["port"])), timeout=CONNECT_SECONDS)
    connection.settimeout(None)
    return connection, str(address["token"])


def _write_address(path: Path, port: int, token: str) -> None:
    make_folder(path.parent)
    temporary = path.with_suffix(".part")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump({"port": port, "token": token, "pid": os.getpid()}, file)
    os.replace(temporary, path)


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(len(content).to_bytes(_LENGTH_BYTES, "little"))
    connection.sendall(content)


def _receive(connection: socket.socket) -> bytes:
    return _receive_exactly(connection, int.from_bytes(_receive_exactly(connection, _LENGTH_BYTES), "little"))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        chunk = connection.recv(min(_CHUNK_BYTES, count - len(content)))
        if not chunk:
            raise ConnectionError("the connection was closed")
        content += chunk
    return bytes(content)
