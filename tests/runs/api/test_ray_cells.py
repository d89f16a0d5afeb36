"""Cells of a comparison on Ray: each ends as it would here, an error names its cell, nothing is run twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedguild.core.errors import FedGuildError
from fedguild.runs import experiment
from fedguild.runs.api.launch import Launch, _finish
from fedguild.runs.api.run_grid import Cell, Row
from tests.runs.runs import assert_same, ended, small_config

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # else the other tests go first
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def cell(model: Path, folder: Path, *settings: str) -> Cell:
    return Cell(small_config(model, "federation.rounds=2", *settings), folder, Row("small"))


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_cells_end_as_they_do_here(olmoe_folder: Path, tmp_path: Path) -> None:
    cells = [cell(olmoe_folder, tmp_path / f"there/seed-{seed}", f"seed={seed}") for seed in (0, 1)]
    Launch(launcher="ray").complete_cells(cells)
    assert [each.state() for each in cells] == ["finished", "finished"]
    experiment.run(cells[1].config, tmp_path / "here")
    assert_same(ended(tmp_path / "there/seed-1"), ended(tmp_path / "here"))
    told: list[str] = []
    before = [(each.folder / "metrics.jsonl").stat().st_mtime_ns for each in cells]
    Launch(launcher="ray", tell=told.append).complete_cells(cells)
    assert [(each.folder / "metrics.jsonl").stat().st_mtime_ns for each in cells] == before
    assert sum("already finished" in line for line in told) == 2


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedGuildError, match=r"seed 0 failed: .*nowhere"):
        Launch(launcher="ray").complete_cells([cell(tmp_path / "nowhere", tmp_path / "run", "seed=0")])


def test_an_error_within_a_run_is_told_as_it_is(olmoe_folder: Path, tmp_path: Path) -> None:
    """Not by the first line of Ray's traceback, nor as if a machine had died; the others are stopped."""
    raised = ray.exceptions.RayTaskError("_complete", "ray::_complete()\n", ValueError("too little memory"))
    stopped: list[str] = []

    def get(_: object) -> None:
        raise raised.as_instanceof_cause()

    stand_in = SimpleNamespace(get=get, cancel=lambda task, force: stopped.append(task), exceptions=ray.exceptions)
    with pytest.raises(FedGuildError, match=r"seed 0 failed: ValueError: too little memory") as caught:
        _finish(stand_in, "this", cell(olmoe_folder, tmp_path / "run", "seed=0"), ["other"], Launch())
    assert str(tmp_path / "run") in caught.value.hint
    assert stopped == ["other"]


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_more_cores_than_there_are_is_said_at_once(olmoe_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FedGuildError, match=r"cores is 9, but Ray has 2 CPU"):
        Launch(launcher="ray", cores=9).complete_cells([cell(olmoe_folder, tmp_path / "run")])
