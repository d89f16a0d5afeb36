"""Requests from Flower's process to the trainer on the same machine."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from fedguild.federation.flower import ipc
from fedguild.federation.flower.message import Message

REQUEST = Message("train", "ab" * 16, 3, 1, body=bytes(range(256)) * 9)


@contextmanager
def serving(folder: Path, handle: Callable[[Message], Message]) -> Iterator[None]:
    stopped = threading.Event()
    thread = threading.Thread(target=ipc.serve, args=(folder, handle), kwargs={"running": lambda: not stopped.is_set()})
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def reverse(message: Message) -> Message:
    return message.reply(body=message.body[::-1])


def test_a_request_gets_its_reply_and_only_the_owner_can_read_the_token(tmp_path: Path) -> None:
    large = replace(REQUEST, body=os.urandom(5 * 2**20))
    with serving(tmp_path, reverse):
        assert ipc.request(tmp_path, large).body == large.body[::-1]
        assert ipc.request(tmp_path, REQUEST).body == REQUEST.body[::-1]
        assert (tmp_path / ipc.ADDRESS_FILE).stat().st_mode & 0o077 == 0
    assert not (tmp_path / ipc.ADDRESS_FILE).exists()


def test_a_caller_without_the_token_gets_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    handled: list[Message] = []
    with serving(tmp_path, lambda message: handled.append(message) or message.reply()):  # type: ignore[func-returns-value]
        ipc.request(tmp_path, REQUEST)
        port = json.loads((tmp_path / ipc.ADDRESS_FILE).read_text())["port"]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"0" * ipc.TOKEN_CHARACTERS + b"\1" * 8)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"short")
        ipc.request(tmp_path, REQUEST)
    assert len(handled) == 2


def test_a_trainer_that_is_not_up_is_waited_for(tmp_path: Path) -> None:
    assert ipc.request(tmp_path, REQUEST, wait_seconds=0.3).failure == "its trainer is not running (waited 0.3 s)"


def test_a_trainer_that_dies_while_it_works_is_a_failure(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = {"port": listener.getsockname()[1], "token": "0" * ipc.TOKEN_CHARACTERS, "pid": 0}
        (tmp_path / ipc.ADDRESS_FILE).write_text(json.dumps(address))

        def die() -> None:
            connection, _ = listener.accept()
            connection.recv(2**16)
            connection.close()

        dying = threading.Thread(target=die)
        dying.start()
        assert ipc.request(tmp_path, REQUEST).failure == ipc.TRAINER_DIED
        dying.join()
