"""Ledgers: what was written is never lost or counted twice."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fedguild.core.errors import CheckpointError
from fedguild.privacy.dp.accounting import Release
from fedguild.privacy.dp.ledger import FILE, Ledger

FIRST, SECOND = Release(2.0, 3, 0.1), Release(1.5, drawn=2, drawn_from=8)


def test_a_ledger_survives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / FILE
    ledger = Ledger(path)
    ledger.add("client-000", "1", FIRST)
    ledger.add("client-001", "1", SECOND)
    ledger.add("client-000", "2", FIRST)
    again = Ledger(path)
    assert again.releases("client-000") == {"1": FIRST, "2": FIRST}
    assert again.releases("client-001") == {"1": SECOND}
    assert again.releases("client-002") == {}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_same_release_counts_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / FILE)
    for _ in range(2):
        ledger.add("client-000", "1", FIRST)
    assert len((tmp_path / FILE).read_text().splitlines()) == 1


def test_an_entry_that_was_being_written_at_a_kill_is_none(tmp_path: Path) -> None:
    path = tmp_path / FILE
    Ledger(path).add("client-000", "1", FIRST)
    with open(path, "ab") as file:
        file.write(b'{"client": "client-000", "key"')
    ledger = Ledger(path)
    assert ledger.releases("client-000") == {"1": FIRST}
    ledger.add("client-000", "2", SECOND)
    assert Ledger(path).releases("client-000") == {"1": FIRST, "2": SECOND}


@pytest.mark.parametrize("line", ["nonsense", '{"client": "a", "key": "1"}', '{"key": "1", "release": {}}'])
def test_a_damaged_ledger_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / FILE).write_text(line + "\n")
    with pytest.raises(CheckpointError, match="line 1 is not an entry"):
        Ledger(tmp_path / FILE)


def test_another_release_under_the_same_key_is_an_error(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / FILE)
    ledger.add("client-000", "1", FIRST)
    with pytest.raises(CheckpointError, match="another release of client-000 under '1'"):
        ledger.add("client-000", "1", SECOND)
    assert ledger.releases("client-000") == {"1": FIRST}
