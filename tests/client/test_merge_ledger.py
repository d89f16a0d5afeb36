"""The ledger of merged changes: what it keeps, what it refuses, and what it never mixes up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.memory import ClientMemory
from fedguild.client.merge_ledger import DIGEST, MERGE, VERSION, MergeLedger, digest, merge_version
from fedguild.errors import CheckpointError
from fedguild.packing import pack
from fedguild.payload import Payload, with_part


def change(version: int, shift: float = 0.0) -> dict[str, Tensor]:
    return {"q.lora_A": torch.full((version, 3), version + shift), "q.lora_B": torch.full((2, version), 0.5)}


def download(newest: int, *sent: int, shift: float = 0.0) -> Payload:
    """What a client gets that lacks the versions `sent` of `newest`; another shift is another run."""
    chain = ""
    for version in range(1, newest + 1):
        chain = digest(chain, pack(change(version, shift), {}))
    factors = {f"{version}/{name}": value for version in sent for name, value in change(version, shift).items()}
    return Payload({**with_part(MERGE, factors), "adapter/x": torch.ones(2)}, {VERSION: newest, DIGEST: chain})


def expected(newest: int, shift: float = 0.0) -> dict[str, Tensor]:
    versions = range(1, newest + 1)
    return {f"{version}/{name}": value for version in versions for name, value in change(version, shift).items()}


def assert_holds(ledger: MergeLedger, found: dict[str, Tensor], newest: int, shift: float = 0.0) -> None:
    wanted = expected(newest, shift)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert not list(ledger.folder.glob(".*"))


def test_a_client_that_takes_part_each_round_gets_one_version_each_time(tmp_path: Path) -> None:
    for newest in range(1, 13):
        ledger = MergeLedger(tmp_path / "merges")
        assert_holds(ledger, ledger.receive(download(newest, newest)), newest)
    assert len(list((tmp_path / "merges").iterdir())) == 12


def test_before_the_first_version_there_is_nothing_and_no_folder(tmp_path: Path) -> None:
    ledger = MergeLedger.beside(ClientMemory(tmp_path / "clients"))
    assert ledger.folder == tmp_path / "merges"
    assert ledger.receive(Payload()) == {}
    assert ledger.receive(download(0), download(0)) == {}
    assert merge_version(Payload()) == 0
    assert not ledger.folder.exists()


def test_clients_of_a_site_share_what_one_of_them_gets(tmp_path: Path) -> None:
    """The newcomer's history serves the other, in whatever order they come."""
    for name, downloads in (
        ("first", (download(3, 3), download(3, 1, 2, 3))),
        ("last", (download(3, 1, 2, 3), download(3, 3))),
    ):
        ledger = MergeLedger(tmp_path / name)
        assert_holds(ledger, ledger.receive(*downloads), 3)
        assert_holds(ledger, MergeLedger(tmp_path / name).receive(download(3)), 3)


def test_a_missing_version_is_named(tmp_path: Path) -> None:
    ledger = MergeLedger(tmp_path)
    ledger.receive(download(1, 1))
    with pytest.raises(CheckpointError, match=r"lacks 2, 3 of the 4 versions") as caught:
        ledger.receive(download(4, 4))
    assert "gets every version again" in caught.value.hint
    assert_holds(ledger, ledger.receive(download(4, 1, 2, 3, 4)), 4)


def test_an_older_state_sees_no_later_version_and_replaces_what_it_makes_anew(tmp_path: Path) -> None:
    """A run that was resumed from version 2, and whose version 3 came out otherwise."""
    ledger = MergeLedger(tmp_path)
    ledger.receive(download(4, 1, 2, 3, 4))
    assert_holds(ledger, ledger.receive(download(2)), 2)
    assert_holds(ledger, ledger.receive(download(4, 1, 2, 3, 4, shift=0.25)), 4, shift=0.25)
    assert_holds(ledger, MergeLedger(tmp_path).receive(download(4, shift=0.25)), 4, shift=0.25)


def test_another_runs_versions_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    ledger = MergeLedger(tmp_path)
    ledger.receive(download(3, 1, 2, 3))
    with pytest.raises(CheckpointError, match="holds changes of the backbone that differ from the server's"):
        ledger.receive(download(3, 3, shift=0.5))
    assert_holds(ledger, ledger.receive(download(3, 1, 2, 3, shift=0.5)), 3, shift=0.5)


def test_a_damaged_version_is_noticed_and_mended_by_the_whole_history(tmp_path: Path) -> None:
    ledger = MergeLedger(tmp_path)
    ledger.receive(download(2, 1, 2))
    path = tmp_path / "version-00001.merge"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match=r"version-00001\.merge is damaged"):
        ledger.receive(download(2, 2))
    assert_holds(ledger, ledger.receive(download(2, 1, 2)), 2)
    assert_holds(ledger, ledger.receive(download(2)), 2)


def test_the_same_version_again_is_not_written_again(tmp_path: Path) -> None:
    ledger = MergeLedger(tmp_path)
    ledger.receive(download(1, 1))
    path = tmp_path / "version-00001.merge"
    before = path.stat().st_mtime_ns, path.stat().st_ino
    ledger.receive(download(1, 1), download(1, 1))
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_one_backbone_cannot_be_of_two_versions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"different versions of one backbone: \[1, 2\]"):
        MergeLedger(tmp_path).receive(download(1, 1), download(2, 1, 2))
