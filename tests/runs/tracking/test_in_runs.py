"""Trackers in real runs: run, resume, compare and a federation."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedguild
from fedguild.core.errors import ConfigError
from fedguild.measuring.log.records import RunLog
from fedguild.runs.tracking.points import points
from tests.runs.runs import Killed, kill_at, load_models_once, small_config, small_settings
from tests.runs.tracking.runs import Memory, Series, offer

SMALL = (
    "federation.rounds=2",
    "federation.clients=3",
    "federation.client_fraction=1",
    "evaluation.max_examples=2",
    "tracking=[memory]",
)


@pytest.fixture(autouse=True)
def _memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Memory)
    load_models_once(monkeypatch, "runs.setup.preparation")


def logged(folder: Path) -> Series:
    series: Series = {}
    for name, value, number in points(RunLog(folder).read()):
        series.setdefault(name, {})[number] = value
    return series


def test_a_run_that_is_killed_and_resumed(olmoe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, "fedguild.runs.experiment._save", 3)  # after round 0 and round 1
        with pytest.raises(Killed):
            fedguild.run("flame/tiny-tasks", *small_settings(olmoe_folder, *SMALL), output=folder)
    assert {number for series in Memory.runs["run 0"].values() for number in series} == {0, 1}
    fedguild.resume(folder)
    assert {"run 0": logged(folder)} == Memory.runs
    assert Memory.ended == [True, False]
    fedguild.resume(folder, round=1)
    assert Memory.runs["run 1"] == logged(folder)


def test_a_missing_package_is_said_before_anything_is_read(olmoe_folder, tmp_path, monkeypatch):
    def unread(*_: object, **__: object) -> None:
        raise AssertionError("the data or the model was read")

    monkeypatch.setattr(Memory, "PACKAGE", "no_such_package")
    monkeypatch.setattr("fedguild.runs.setup.preparation.load_model", unread)
    for reads in ("fedguild.runs.setup.preparation.prepare_data", "fedguild.runs.setup.prepare_data"):
        monkeypatch.setattr(reads, unread)
    settings = small_settings(olmoe_folder, *SMALL)
    with pytest.raises(ConfigError, match="memory needs the package no_such_package"):
        fedguild.run("flame/tiny-tasks", *settings, output=tmp_path / "run")
    with pytest.raises(ConfigError, match="memory needs the package no_such_package"):
        fedguild.compare(["flame/tiny-tasks"], *settings, seeds=[0], output=tmp_path / "compared")
    assert not (tmp_path / "compared").exists()


def test_the_runs_of_a_comparison_are_a_group(olmoe_folder: Path, tmp_path: Path) -> None:
    configs = [{"extends": "flame/tiny-tasks", "name": name} for name in ("one", "other")]
    settings = small_settings(olmoe_folder, *SMALL, "federation.rounds=1")
    fedguild.compare(configs, *settings, seeds=[0, 3], output=tmp_path / "compared")
    assert [run.name for run in Memory.seen] == ["one-seed-0", "one-seed-3", "other-seed-0", "other-seed-3"]
    assert {run.group for run in Memory.seen} == {"compared"}
    assert [run.folder for run in Memory.seen][-1] == tmp_path / "compared" / "other" / "seed-3"
    assert list(Memory.runs.values())[-1] == logged(tmp_path / "compared" / "other" / "seed-3")


@pytest.fixture
def _served_once(monkeypatch: pytest.MonkeyPatch) -> None:
    load_models_once(monkeypatch, "federation.serving")


@pytest.mark.usefixtures("_served_once")
def test_a_federation_is_tracked_by_its_server(olmoe_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from tests.federation.flower.loopback_federation import grid_of, serve_on, trainers_of

    config = small_config(olmoe_folder, *SMALL, "federation.cohort_size=1")
    serve_on(grid_of(trainers_of(config, tmp_path / "sites")), config, tmp_path / "server")
    assert {"run 0": logged(tmp_path / "server" / "state" / "run")} == Memory.runs
    assert len(Memory.seen) == 1, "no client tracks"
