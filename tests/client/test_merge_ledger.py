"""The ledger of merged changes: what it keeps, what it refuses, and what it never mixes up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.memory import ClientMemory
from fedguild.client.merge_ledger import (
    DIGEST,
    FOLDED,
    MERGE,
    VERSION,
    MergeLedger,
    digest,
    merge_version,
    reaches,
    without_merges,
)
from fedguild.core.errors import CheckpointError
from fedguild.core.packing import pack
from fedguild.core.payload import Payload, with_part
from fedguild.core.sealed import write_sealed
from fedguild.model.folding import folded


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


def dense_download(newest: int, dense: int, *sent: int, shift: float = 0.0) -> Payload:
    """What a client gets of a history whose versions up to `dense` are folded."""
    whole = folded(change(version, shift) for version in range(1, dense + 1))
    chain = digest("", pack(whole, {}))
    for version in range(dense + 1, newest + 1):
        chain = digest(chain, pack(change(version, shift), {}))
    tensors = {
        f"{version}/{name}": value
        for version in sent
        for name, value in (whole if version == dense else change(version, shift)).items()
    }
    return Payload(with_part(MERGE, tensors), {VERSION: newest, DIGEST: chain, FOLDED: dense})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_who_holds_the_factors_folds_them_and_who_does_not_receives_the_same_bits(tmp_path: Path) -> None:
    """Before and after a second fold; what a dense change replaces goes two versions later, not at once."""
    old, new = MergeLedger(tmp_path / "old"), MergeLedger(tmp_path / "new")
    old.receive(download(4, 1, 2, 3, 4))
    held = old.receive(dense_download(5, 4, 5))
    joined = new.receive(dense_download(5, 4, 4, 5))
    assert held.keys() == joined.keys() == {"4/q.change", "5/q.lora_A", "5/q.lora_B"}
    assert all(torch.equal(held[name], joined[name]) for name in held)
    assert names(old.folder) == ["folded-00004.merge", *(f"version-0000{number}.merge" for number in range(1, 6))]
    assert_holds(old, old.receive(download(4)), 4)
    old.receive(dense_download(6, 4, 6))
    assert names(old.folder) == [f"{name}.merge" for name in ("folded-00004", "version-00005", "version-00006")]
    new.receive(dense_download(6, 4, 6))
    for ledger in (old, new):
        twice = ledger.receive(dense_download(7, 6, 7))
        assert torch.equal(twice["6/q.change"], folded(change(version) for version in range(1, 7))["q.change"])


def test_who_can_neither_fold_nor_was_sent_the_dense_change_fails_with_the_versions(tmp_path: Path) -> None:
    ledger = MergeLedger(tmp_path)
    ledger.receive(download(2, 1, 2))
    with pytest.raises(CheckpointError, match=r"lacks 3, 4 of the 5 versions"):
        ledger.receive(dense_download(5, 4, 5))
    ledger.receive(dense_download(5, 4, 4, 5))
    path = tmp_path / "folded-00004.merge"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match=r"folded-00004\.merge is damaged"):
        ledger.receive(dense_download(5, 4, 5))
    ledger.receive(dense_download(5, 4, 4, 5))


def test_a_version_that_came_out_otherwise_is_folded_anew(tmp_path: Path) -> None:
    ledger = MergeLedger(tmp_path)
    ledger.receive(download(3, 1, 2, 3))
    ledger.receive(dense_download(4, 3, 4))
    ledger.receive(download(3, 1, 2, 3, shift=0.25))
    found = ledger.receive(dense_download(4, 3, 4, shift=0.25))
    assert torch.equal(found["3/q.change"], folded(change(version, 0.25) for version in range(1, 4))["q.change"])


def test_a_ledger_is_filled_from_a_folded_state(tmp_path: Path) -> None:
    first, second = MergeLedger(tmp_path / "first"), MergeLedger(tmp_path / "second")
    found = first.receive(dense_download(5, 3, 3, 4, 5))
    second.refill(found)
    again = second.receive(dense_download(5, 3))
    assert all(torch.equal(again[name], value) for name, value in found.items())
    assert not reaches(found, 2)
    assert reaches(found, 3)
    assert reaches({}, 0)


def test_versions_are_mapped_and_take_no_memory_of_their_own(tmp_path: Path) -> None:
    found = MergeLedger(tmp_path).receive(download(2, 1, 2))
    regions = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    spans = [tuple(int(end, 16) for end in region.split("-")) for region in regions]
    for name, tensor in found.items():
        assert any(start <= tensor.data_ptr() < stop for start, stop in spans), name
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_a_ledger_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """Its files are not aligned."""
    write_sealed(tmp_path / "version-00001.merge", pack(change(1), {}))
    assert_holds(MergeLedger(tmp_path), MergeLedger(tmp_path).receive(download(1)), 1)


def test_what_an_actor_gets_beside_a_ledger() -> None:
    sent = without_merges(download(2, 1, 2))
    assert list(sent.tensors) == ["adapter/x"]
    assert sent.scalars == download(2).scalars


def test_one_backbone_cannot_be_of_two_versions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"different versions of one backbone: \[1, 2\]"):
        MergeLedger(tmp_path).receive(download(1, 1), download(2, 1, 2))
