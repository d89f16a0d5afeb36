import errno
import itertools
import os
from pathlib import Path

import pytest
import torch

from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.packing import pack
from fedguild.core.payload import Payload
from fedguild.core.sealed import write_sealed
from fedguild.server import checkpoint


def state(value: float) -> Payload:
    tensors = {"q.lora_A": torch.full((2, 3), value), "q.lora_B": torch.full((3, 2), value, dtype=torch.bfloat16)}
    return Payload(tensors, {"round_seen": int(value), "temperature": 1 / 3, "note": "é"})


def save(folder, round, **options):
    checkpoint.save(folder, round, state(round), fingerprint="run-a", extra={"lines": [round, None]}, **options)


def load(folder, round):
    return checkpoint.load(folder, round, fingerprint="run-a")


def path(folder, round):
    return folder / f"round-{round:05d}.checkpoint"


def test_a_checkpoint_gives_back_the_same_bits(tmp_path):
    save(tmp_path, 3)
    found = load(tmp_path, 3)
    assert found.round == 3
    assert found.extra == {"lines": [3, None]}
    assert found.state.scalars == state(3).scalars
    for name, tensor in state(3).tensors.items():
        assert found.state.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.state.tensors[name], tensor)


@pytest.mark.parametrize(
    ("format", "told"), [({}, "FedGuild 0.1.0 wrote it"), ({"format": 7}, "Install the version that wrote it")]
)
def test_a_checkpoint_of_another_format_is_refused_with_the_version_that_reads_it(tmp_path, format, told):
    header = {"round": 3, "fingerprint": "run-a", "state": "{}", "extra": "{}", **format}
    write_sealed(path(tmp_path, 3), pack({}, header))
    with pytest.raises(CheckpointError, match="this version of FedGuild reads format 2") as error:
        load(tmp_path, 3)
    assert told in error.value.hint


def test_the_last_ones_stay(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") is None
    for round in range(5):
        save(tmp_path, round)
    assert checkpoint.rounds(tmp_path) == [3, 4]
    assert checkpoint.latest(tmp_path) == 4
    for round in range(5, 9):
        save(tmp_path, round, keep=3)
    assert checkpoint.rounds(tmp_path) == [6, 7, 8]


def test_a_run_resumed_from_an_earlier_round_abandons_the_later_ones(tmp_path):
    for round in (7, 8, 9):
        save(tmp_path, round, keep=3)
    save(tmp_path, 8)
    assert checkpoint.rounds(tmp_path) == [7, 8]


def test_another_runs_checkpoint_is_refused_naming_both(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"has: its fingerprint is run-a, that of config.yaml run-b"):
        checkpoint.load(tmp_path, 1, fingerprint="run-b")


def flip_a_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("damage", [flip_a_bit, lambda content: content[:-7], lambda content: b""])
def test_damage_is_named_with_the_way_back(tmp_path, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path(tmp_path, 2).write_bytes(damage(path(tmp_path, 2).read_bytes()))
    with pytest.raises(CheckpointError, match=r"round-00002\.checkpoint is damaged") as caught:
        load(tmp_path, 2)
    assert caught.value.hint == "Round 1 is complete: remove the checkpoint of round 2 to resume from it."
    path(tmp_path, 2).unlink()
    assert checkpoint.latest(tmp_path) == 1
    assert torch.equal(load(tmp_path, 1).state.tensors["q.lora_A"], state(1).tensors["q.lora_A"])


def test_a_sealed_file_of_something_else_is_no_checkpoint(tmp_path):
    for content in (
        b"hello",
        pack({}, {}),
        pack({}, {"round": 1, "fingerprint": "run-a", "state": "{", "extra": "{}"}),
    ):
        write_sealed(path(tmp_path, 1), content)
        with pytest.raises(CheckpointError, match=r"round-00001\.checkpoint is not a checkpoint"):
            load(tmp_path, 1)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_previous_round(tmp_path, monkeypatch, call):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(FedGuildError, match=r"round-00002\.checkpoint: No space left on device"):
            save(tmp_path, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["round-00001.checkpoint"]
    assert torch.equal(load(tmp_path, 1).state.tensors["q.lora_A"], state(1).tensors["q.lora_A"])
    save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == 2


def history_of(rounds: int) -> Payload:
    tensors = {
        f"merge/{version}/m.lora_{side}": torch.full((64, 64), float(version))
        for version in range(1, rounds + 1)
        for side in "AB"
    }
    return Payload({**tensors, "adapter/x": torch.ones(3)}, {"merge_version": rounds})


def test_a_history_is_written_once_and_no_checkpoint_grows_with_it(tmp_path):
    sizes, written, state = [], [], Payload({}, {})
    for number in range(1, 6):
        whole = history_of(number)
        state = Payload({**whole.tensors, **state.tensors, "adapter/x": torch.full((3,), float(number))}, whole.scalars)
        state = checkpoint.save(tmp_path, number, state, fingerprint="run", keep=2)
        sizes.append((tmp_path / f"round-{number:05d}.checkpoint").stat().st_size)
        written.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "history").iterdir()})
    assert max(sizes) - min(sizes) < 1000 < 2 * 64 * 64 * 4
    assert [len(files) for files in written] == [1, 2, 3, 4, 5]
    for earlier, later in itertools.pairwise(written):
        assert earlier.items() <= later.items(), "no version is written again"
    for loaded in (state, checkpoint.load(tmp_path, 5, fingerprint="run").state):
        assert loaded.scalars == {"merge_version": 5}
        assert loaded.tensors.keys() == history_of(5).tensors.keys()
        for name, tensor in history_of(5).tensors.items():
            expected = torch.full((3,), 5.0) if name == "adapter/x" else tensor
            assert torch.equal(loaded.tensors[name], expected)
    assert checkpoint.load(tmp_path, 4, fingerprint="run").state.tensors.keys() == history_of(4).tensors.keys()


def test_a_running_state_holds_no_copy_of_its_history(tmp_path):
    whole = history_of(3)
    mapped = checkpoint.save(tmp_path, 1, whole, fingerprint="run")
    regions = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/history/" in line]
    spans = [tuple(int(end, 16) for end in region[0].split("-")) for region in regions]
    for name, tensor in mapped.tensors.items():
        inside = any(start <= tensor.data_ptr() < stop for start, stop in spans)
        assert inside == name.startswith("merge/"), name


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_history_that_is_damaged_or_missing_is_said_so_and_the_round_before_is_used(tmp_path, how):
    first = checkpoint.save(tmp_path, 1, history_of(1), fingerprint="run")
    known = {path.name for path in (tmp_path / "history").iterdir()}
    checkpoint.save(tmp_path, 2, Payload({**history_of(2).tensors, **first.tensors}, {}), fingerprint="run")
    (new,) = [path for path in (tmp_path / "history").iterdir() if path.name not in known]
    if how == "damaged":
        new.write_bytes(new.read_bytes()[:-1] + b"x")
    else:
        new.unlink()
    with pytest.raises(CheckpointError, match="a part of the run's history"):
        checkpoint.load(tmp_path, 2, fingerprint="run")
    told: list[str] = []
    newest = checkpoint.load_newest(tmp_path, fingerprint="run", tell=told.append)
    assert newest is not None
    assert newest.round == 1
    assert len(told) == 1


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (
            {"token_embedding/x": 0, "experts/y": 1, "seed": 3, "round": 4},
            {"server/token_embedding/x": 0, "server/experts/y": 1, "server/seed": 3, "server/round": 4},
        ),
        (
            {"adapter/x": 0, "experts/y": 1, "clients/held/z": 2, "client/poor": 3, "round": 4},
            {"adapter/x": 0, "server/experts/y": 1, "server/held/z": 2, "server/clients/poor": 3, "server/round": 4},
        ),
        ({"adapter/x": 0, "ranks": [3, 1]}, {"adapter/x": 0, "client/0/rank": 3, "client/1/rank": 1}),
        ({"adapter/x": 0, "experts/y": 1, "round": 4}, {"adapter/x": 0, "experts/y": 1, "round": 4}),
        ({"adapter/x": 0, "ranks": 2, "known": 1}, {"adapter/x": 0, "ranks": 2, "known": 1}),
    ],
    ids=["fedamole", "fedmoe", "hetlora", "another", "a plug-in"],
)
def test_a_state_of_version_0_3_has_the_names_of_today(tmp_path, monkeypatch, before, now):
    scalars = ("seed", "round")
    tensors = {name: torch.tensor(value) for name, value in before.items() if name not in scalars}
    old = Payload(tensors, {name: value for name, value in before.items() if name in scalars})
    checkpoint.save(tmp_path, 2, old, fingerprint="run-a")
    assert plain(load(tmp_path, 2).state) == before
    packed = checkpoint.pack
    monkeypatch.setattr(
        checkpoint, "pack", lambda own, scalars: packed(own, {k: v for k, v in scalars.items() if k != "names"})
    )
    checkpoint.save(tmp_path, 1, old, fingerprint="run-a")
    assert plain(load(tmp_path, 1).state) == now


def plain(state):
    return {name: value.tolist() for name, value in state.tensors.items()} | dict(state.scalars)
