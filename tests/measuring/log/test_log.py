from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.measuring.log.records import (
    ClientRecord,
    EvaluationRecord,
    PartitionRecord,
    Rejection,
    RoundRecord,
    RoutingRecord,
    RunLog,
)
from tests.runs.runs import comparable


def evaluation(round: int, score: float = 0.1 + 0.2) -> EvaluationRecord:
    return EvaluationRecord(round=round, scope="budget", name="b1", split="test", score=score)


def client(round: int, **changes: object) -> ClientRecord:
    values: dict[str, object] = {
        "round": round,
        "client": 2,
        "budget": "b1",
        "active_experts": 8,
        "rank": 20,
        "examples": 11,
        "steps": 3,
        "tokens": 99,
        "train_loss": 1.0 / 3.0,
        "upload_bytes": 10,
        "download_bytes": 20,
        "training_flops": 1e9,
        "peak_memory_bytes": 5,
        "seconds": 0.5,
    }
    return ClientRecord.model_validate(values | changes)


def complete_round(round: int) -> RoundRecord:
    rejected = [Rejection(client=1, reason="NaN in adapter/a")]
    return RoundRecord(
        round=round, seconds=1.5, phase_seconds={"train": 1.0}, participants=[0, 1, 2], rejected=rejected
    )


def test_records_come_back_bit_by_bit(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "new")
    routing = RoutingRecord(
        round=1,
        layers=1,
        experts=2,
        clients=[4],
        frequency=[[[0.25, 0.75]]],
        entropy=[0.56],
        normalised_entropy=[0.81],
        gini=[0.25],
    )
    written = [evaluation(0), client(1), routing, evaluation(1), complete_round(1)]
    log.append(written[0])
    log.append(*written[1:])
    assert log.read() == written
    lines = log.path.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["evaluation", "client", "routing", "evaluation", "round"]


def test_a_loss_that_is_no_number_stays_valid_json(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(client(1, train_loss=float("nan")))
    json.loads(log.path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (back,) = log.read()
    assert isinstance(back, ClientRecord)
    assert back.train_loss != back.train_loss


def test_truncation_keeps_the_bytes_of_complete_rounds(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(evaluation(0), client(1), complete_round(1))
    kept = log.path.read_bytes()
    log.append(client(2), evaluation(2))
    with log.truncating_after(1):
        pass
    assert log.path.read_bytes() == kept


def test_a_line_cut_by_a_kill_is_not_read_and_the_next_append_drops_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(evaluation(0))
    with open(log.path, "ab") as stream:
        stream.write(b'{"kind":"client","rou')
    assert log.read() == [evaluation(0)]
    log.append(evaluation(1))
    assert log.read() == [evaluation(0), evaluation(1)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"not json", "Invalid JSON"),
        (b'{"kind": "rumour", "round": 1}', "rumour"),
        (b'{"kind": "evaluation", "round": -1, "scope": "budget", "name": "b", "split": "test", "score": 0}', "round"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    log = RunLog(tmp_path)
    log.append(evaluation(0))
    with open(log.path, "ab") as stream:
        stream.write(line + b"\n")
    with pytest.raises(CheckpointError, match="line 2") as caught:
        log.read()
    assert said in str(caught.value)
    assert str(log.path) in str(caught.value)


def test_a_full_disk_leaves_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path)
    log.append(evaluation(0))

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FedGuildError, match="No space left"):
        log.append(evaluation(1))
    assert log.read() == [evaluation(0)]
    monkeypatch.undo()
    log.append(evaluation(2))
    assert log.read() == [evaluation(0), evaluation(2)]


def test_comparable_ignores_the_clock_and_the_memory_only() -> None:
    slow = client(1, seconds=9.0, peak_memory_bytes=None)
    assert comparable([client(1)]) == comparable([slow])
    assert comparable([client(1)]) != comparable([client(1, upload_bytes=11)])
    (stripped,) = comparable([complete_round(1)])
    assert stripped == {
        "kind": "round",
        "round": 1,
        "participants": [0, 1, 2],
        "rejected": [{"client": 1, "reason": "NaN in adapter/a"}],
        "unneeded": [],
        "retried": [],
        "faults": [],
        "strays": [],
    }


def test_arrays_of_the_wrong_shape_are_refused() -> None:
    good = {"round": 1, "layers": 2, "experts": 2, "clients": [0], "frequency": [[[1.0, 0.0], [0.5, 0.5]]]}
    good |= {name: [0.0, 0.0] for name in ("entropy", "normalised_entropy", "gini")}
    RoutingRecord.model_validate(good)
    for name, value in {"clients": [0, 1], "frequency": [[[1.0], [0.5]]], "gini": [0.0]}.items():
        with pytest.raises(ValidationError):
            RoutingRecord.model_validate(good | {name: value})
    with pytest.raises(ValidationError, match="client 1 has 1 counts for 2 labels"):
        PartitionRecord(labels=["a", "b"], counts=[[1, 2], [3]])


def test_damage_anywhere_is_found(tmp_path: Path) -> None:
    """A flipped bit in any byte but the last newline, which is a line cut by a kill."""
    log = RunLog(tmp_path)
    log.append(evaluation(0), client(1), complete_round(1))
    whole = log.path.read_bytes()
    for place in range(0, len(whole) - 1, 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        log.path.write_bytes(bytes(damaged))
        with pytest.raises(CheckpointError, match="is not a record of a run"):
            RunLog(tmp_path).read()


@pytest.mark.parametrize("order", [(0, 2), (1, 2), (0, 2, 1), (0, 0, 1, 2), (1, 0, 2)])
def test_a_line_that_is_missing_repeated_or_moved_is_found(order: tuple[int, ...], tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(evaluation(0), client(1))
    RunLog(tmp_path).append(complete_round(1))
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[number] for number in order))
    with pytest.raises(CheckpointError, match="it was changed, moved or removed"):
        log.read()


def test_a_log_of_0_2_0_is_read_and_sealed_when_its_run_goes_on(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.path.write_text("".join(record.model_dump_json() + "\n" for record in (evaluation(0), evaluation(1))))
    assert log.read() == [evaluation(0), evaluation(1)]
    with log.truncating_after(0):
        pass
    log.append(evaluation(1))
    assert log.read() == [evaluation(0), evaluation(1)]
    assert all("seal" in json.loads(line) for line in log.path.read_text().splitlines())


def test_only_its_user_can_read_a_log(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    log.append(evaluation(0))
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert log.path.parent.stat().st_mode & 0o777 == 0o700


def test_records_that_are_missing_from_the_end_show_against_the_seal(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    assert log.seal == "0" * 16
    log.append(evaluation(0), client(1))
    first = log.seal
    log.append(complete_round(1))
    last = RunLog(tmp_path).seal
    assert len({"0" * 16, first, last}) == 3
    log.append(client(2))
    with log.truncating_after(1, last):
        pass
    assert log.seal == last
    log.append(evaluation(1))
    with log.truncating_after(1, last):
        pass
    assert log.seal == last, "of the same round, but written after the seal was taken"
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(CheckpointError, match="records are missing"), log.truncating_after(1, last):
        pass
    assert log.path.read_bytes() == b"".join(lines[:-1])
    log.path.unlink()
    with pytest.raises(CheckpointError, match="records are missing"), log.truncating_after(1, last):
        pass
