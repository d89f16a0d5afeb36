"""The line between Flower's process and the trainer."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fedguild.engines.flower import link
from fedguild.engines.flower.parcel import Parcel, from_bytes, open_parcel, to_bytes
from fedguild.errors import UploadError

ASKED = Parcel("train", "ab" * 16, 3, 1, "int8", facts={"deep": {"list": [1, 2.5, None]}}, body=bytes(range(256)) * 9)


@contextmanager
def trainer(folder: Path, handle=lambda parcel: parcel.answer(body=parcel.body[::-1])) -> Iterator[None]:
    """Answers in a thread for as long as the block lasts."""
    over = threading.Event()
    thread = threading.Thread(target=link.serve, args=(folder, handle), kwargs={"running": lambda: not over.is_set()})
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_parcel_is_the_same_after_the_way() -> None:
    assert from_bytes(to_bytes(ASKED)) == ASKED


def test_an_answer_keeps_what_it_answers() -> None:
    answer = ASKED.answer(failure="no", body=b"x")
    assert (answer.kind, answer.run, answer.round, answer.client, answer.codec) == ("train", "ab" * 16, 3, 1, "int8")
    assert (answer.failure, answer.facts, answer.body) == ("no", {}, b"x")


@pytest.mark.parametrize(
    "header",
    [
        "no json",
        "[]",
        json.dumps({"kind": "steal", "run": "x"}),
        json.dumps({"kind": "train"}),
        json.dumps({"kind": "train", "run": 7}),
        json.dumps({"kind": "train", "run": "x", "round": "1"}),
        json.dumps({"kind": "train", "run": "x", "round": True}),
        json.dumps({"kind": "train", "run": "x", "facts": []}),
        json.dumps({"kind": "train", "run": "x", "surplus": 1}),
    ],
)
def test_a_header_of_another_form_is_refused(header: str) -> None:
    with pytest.raises(UploadError):
        open_parcel(header, b"")


def test_bytes_that_are_cut_off_are_refused() -> None:
    with pytest.raises(UploadError, match="cut off"):
        from_bytes(to_bytes(ASKED)[:40])


def test_a_question_is_answered(tmp_path: Path) -> None:
    large = replace(ASKED, body=os.urandom(5 * 2**20))
    with trainer(tmp_path):
        assert link.forward(tmp_path, large).body == large.body[::-1]
        assert link.forward(tmp_path, ASKED).body == ASKED.body[::-1]


def test_only_the_owner_can_read_the_token(tmp_path: Path) -> None:
    with trainer(tmp_path):
        link.forward(tmp_path, ASKED)
        assert (tmp_path / link.FILE).stat().st_mode & 0o077 == 0
    assert not (tmp_path / link.FILE).exists()


def test_who_has_not_the_token_gets_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    seen: list[Parcel] = []
    with trainer(tmp_path, lambda parcel: seen.append(parcel) or parcel.answer()):
        link.forward(tmp_path, ASKED)
        port = json.loads((tmp_path / link.FILE).read_text())["port"]
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"0" * link.TOKEN_CHARACTERS + b"\1" * 8)
            with suppress(ConnectionResetError):
                assert line.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"short")
        link.forward(tmp_path, ASKED)
    assert len(seen) == 2


def test_a_trainer_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    assert link.forward(tmp_path, ASKED, wait_seconds=0.3).failure == "its trainer is not running (waited 0.3 s)"


def test_a_trainer_that_dies_over_a_question_is_a_failure(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        way = {"port": door.getsockname()[1], "token": "0" * link.TOKEN_CHARACTERS, "pid": 0}
        (tmp_path / link.FILE).write_text(json.dumps(way))

        def die() -> None:
            line, _ = door.accept()
            line.recv(2**16)
            line.close()

        dying = threading.Thread(target=die)
        dying.start()
        assert link.forward(tmp_path, ASKED).failure == link.LOST_TRAINER
        dying.join()
