"""The trackers that ship, each in its offline mode, read back by its own reader where it has one.

One scenario for all: two rounds, a kill before the third is saved, and the rest of the run.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedguild.measuring.log.records import RunLog
from fedguild.runs.tracking import TRACKERS
from fedguild.runs.tracking.points import points
from tests.report.runs import write_run
from tests.runs.tracking.runs import Series, config_of, play

ROUNDS = 4


@dataclass
class Tracked:
    """What a tracker has of a run."""

    series: list[tuple[str, int, float]]
    name: str | None = None
    group: str | None = None
    tags: frozenset[str] = frozenset()
    seed: Any = None


def of_tensorboard(folder: Path, _: str) -> Tracked:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return Tracked([(tag, one.step, one.value) for tag in events.Tags()["scalars"] for one in events.Scalars(tag)])


def of_wandb(folder: Path, identity: str) -> Tracked:
    from wandb.proto.wandb_internal_pb2 import Record

    read = Tracked([])
    for path in sorted(folder.glob(f"wandb/offline-run-*-{identity}/*.wandb")):
        records: list[Any] = []
        patience = time.monotonic() + 30
        while not any(record.HasField("exit") for record in records):  # wandb's own process may still be writing
            assert time.monotonic() < patience, f"{path} has no end"
            time.sleep(0.02)
            records = [Record.FromString(content) for content in transactions(path.read_bytes())]
        for record in records:
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                step = items["_step"]
                read.series += [(key, step, float(value)) for key, value in items.items() if not key.startswith("_")]
            elif kind == "run":
                run = record.run
                settings = {item.key: json.loads(item.value_json) for item in run.config.update}
                read.name, read.group, read.tags = run.display_name, run.run_group, frozenset(run.tags)
                read.seed = settings["seed"]
    return read


def transactions(content: bytes) -> Iterator[bytes]:
    """Yields the records of a `.wandb` file: LevelDB's log format behind a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if at + 7 + length > len(content):
            return
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def of_mlflow(folder: Path, identity: str) -> Tracked:
    from mlflow import MlflowClient

    client = MlflowClient()
    run = client.get_run(identity)
    assert run.info.status == "FINISHED"
    experiment = client.get_experiment_by_name("guild")
    assert run.info.experiment_id == experiment.experiment_id
    tags = {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")}
    return Tracked(
        [(name, one.step, one.value) for name in run.data.metrics for one in client.get_metric_history(identity, name)],
        run.info.run_name,
        tags.pop("group"),
        frozenset(tags),
        int(run.data.params["seed"]),
    )


def of_trackio(folder: Path, identity: str) -> Tracked:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("guild")
    rows = SQLiteStorage.get_logs("guild", identity)
    series = [
        (key, row["step"], value) for row in rows for key, value in row.items() if key not in ("step", "timestamp")
    ]
    settings = run.config
    return Tracked(series, run.name[:-7], settings["_Group"], frozenset(settings["tags"]), settings["seed"])


READERS: dict[str, Callable[[Path, str], Tracked]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
}


def test_every_tracker_that_ships_is_read_back_here() -> None:
    assert set(TRACKERS) == set(READERS)


@pytest.mark.parametrize("name", READERS)
def test_the_tracker_holds_every_value_once_and_continues_its_run(name, tmp_path, monkeypatch, capfd):
    if find_spec(TRACKERS.load(name).PACKAGE) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to create
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert name != "trackio" or "trackio" not in sys.modules, "it reads TRACKIO_DIR when it is imported"
    hold_once(name, tmp_path, capfd)


def hold_once(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Plays a run that is killed and continued, and compares all that its tracker holds with the run's log."""
    source = write_run(tmp_path / "source", rounds=ROUNDS, clients=2, layers=2, own_scores=True)
    folder, told = tmp_path / "run", list[str]()
    config = config_of([name], "seed=5", "tracking.group=ours", "tracking.tags=[first, second]")
    play(folder, source, config, 1, 3, killed=True, tell=told.append)
    play(folder, source, config, 3, ROUNDS, tell=told.append)
    assert told == []
    assert capfd.readouterr().out == "", "the standard output is for results"

    noted = json.loads((folder / "tracking.json").read_text())[name]
    assert noted["round"] == ROUNDS
    read = READERS[name](folder, noted["id"])
    expected: Series = {}
    for point, value, number in points(RunLog(source).read()):
        expected.setdefault(point, {})[number] = value
    found: Series = {}
    for key, step, value in read.series:
        assert step not in found.setdefault(key, {}), f"{key} has round {step} twice"
        found[key][step] = value
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-6), key
    if name != "tensorboard":
        assert (read.name, read.group, read.seed) == ("flame-tiny-tasks-seed-5", "ours", 5)
        assert read.tags == {"first", "second"}


def test_tensorboard_drops_what_a_run_wrote_before_anything_was_noted(tmp_path: Path) -> None:
    """A folder of an earlier version, which kept no `tracking.json`."""
    pytest.importorskip("tensorboard")
    source, folder = write_run(tmp_path / "source", rounds=2, clients=2, layers=1), tmp_path / "run"
    play(folder, source, config_of(["tensorboard"]), 1, 1)
    (folder / "tracking.json").unlink()
    play(folder, source, config_of(["tensorboard"]), 2, 2)
    found = [(name, step) for name, step, _ in of_tensorboard(folder, "").series]
    assert sorted(found) == sorted((name, number) for name, _, number in points(RunLog(source).read()))


def test_wandb_without_a_login_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(type(wandb.api), "api_key", None)
    told: list[str] = []
    source = write_run(tmp_path / "source", rounds=1, clients=2, layers=1)
    play(tmp_path / "run", source, config_of(["wandb"]), 1, 1, tell=told.append)
    (said,) = told
    assert "not logged in; `wandb login`, or set WANDB_MODE=offline" in said
