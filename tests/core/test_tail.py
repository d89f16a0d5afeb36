"""A reader of a file that another process appends to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedguild.core import tail
from fedguild.core.tail import Tail


def test_a_line_without_its_newline_waits_for_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = Tail(path)
    assert reader.read() == ([], False)
    path.write_bytes(b"one\ntw")
    assert reader.read() == ([b"one"], True)
    assert reader.read() == ([], False)
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert reader.read() == ([b"two", b"three"], False)


def test_what_is_long_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "CHUNK_BYTES", 10)
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(9)))
    reader, found = Tail(path), []
    for _ in range(8):
        found += reader.read()[0]
    assert found == [b"line %d" % number for number in range(9)]


def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, other = tmp_path / "log", tmp_path / "other"
    path.write_bytes(b"one\ntwo\nthree\n")
    reader = Tail(path)
    reader.read()
    other.write_bytes(b"one\n")
    os.replace(other, path)
    assert reader.read() == ([b"one"], True)


def test_a_truncated_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    reader = Tail(path)
    reader.read()
    os.truncate(path, 0)
    assert reader.read() == ([], True)
    path.write_bytes(b"new\n")
    assert reader.read()[0] == [b"new"]
