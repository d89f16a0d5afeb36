"""Journals whose disk is full for a moment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fedguild.core.errors import FedGuildError
from fedguild.core.journal import Journal


def test_lines_that_a_full_disk_did_not_take_all_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(b"first")
    for left in (12, 8, 0):  # of "second" and "third" with their ends
        with monkeypatch.context() as patch:

            def full(descriptor: int, cut: int = 13 - left) -> None:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - cut)
                raise OSError(28, "No space left on device")

            patch.setattr(os, "fsync", full)
            with pytest.raises(FedGuildError, match="No space left on device"):
                journal.append(b"second", b"third")
    journal.append(b"second", b"third")
    assert Journal(journal.path).lines == [b"first", b"second", b"third"]


def test_a_line_of_which_a_full_disk_took_a_part_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(b"first")
    with monkeypatch.context() as patch:

        def full(descriptor: int) -> None:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 3)
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", full)
        with pytest.raises(FedGuildError, match="No space left on device"):
            journal.append(json.dumps({"entry": 2}).encode())
    assert not journal.path.read_bytes().endswith(b"\n")
    for line in (b"third", b"fourth"):
        journal.append(line)
    assert Journal(journal.path).lines == [b"first", b"third", b"fourth"]
