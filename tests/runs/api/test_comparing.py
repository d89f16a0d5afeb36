"""`fedguild.compare`."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedguild
from fedguild.core.errors import CheckpointError, ConfigError
from fedguild.runs.callbacks import Event, Saved
from tests.runs.api.conftest import BASE, CLIENTS, ROWS

CONFIGS = [
    {"extends": BASE, "name": "flame"},
    {"extends": BASE, "name": "fedit", "method": {"name": "fedit", "rank": 3}},
]


def stop_after_the_first(event: Event) -> None:
    if isinstance(event, Saved) and event.round == 1 and "flame" in str(event.folder):
        event.stop("enough")


@pytest.fixture(scope="module")
def rows_only(own_data: list[str]) -> list[str]:
    """The settings without `method.rank`, which each config has."""
    return [*[one for one in own_data if not one.startswith("method.")], "federation.rounds=2"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory, rows_only: list[str]) -> fedguild.Comparison:
    """FLAME, which a callback stops after its first round, and FedIT, on given data; two seeds."""
    return fedguild.compare(
        CONFIGS,
        *rows_only,
        seeds=[0, 1],
        output=tmp_path_factory.mktemp("compared"),
        dataset=ROWS,
        partition=[number % CLIENTS for number in range(len(ROWS))],
        metrics={"length": lambda said, wanted: len(said)},
        callbacks=[stop_after_the_first],
        tell=print,
    )


def test_a_row_for_every_score_and_seed(comparison: fedguild.Comparison) -> None:
    frame = comparison.frame()
    assert set(frame.row) == {"flame", "fedit"}
    assert set(frame.score) == {"large", "small", "mean"}
    assert len(frame) == 2 * 3 * 2
    assert (frame[frame.row == "fedit"].difference == 0).all()
    wide = frame.pivot_table(index=["score", "seed"], columns="row", values="value")
    flame = frame[frame.row == "flame"].set_index(["score", "seed"]).difference
    assert (flame - (wide.flame - wide.fedit)).abs().max() < 1e-12


def test_a_run_of_it(comparison: fedguild.Comparison) -> None:
    run = comparison.run("flame", seed=1)
    assert (run.folder, run.stopped) == (comparison.folder / "flame" / "seed-1", "enough")
    assert "length" in run.frame().columns
    assert repr(run.figures()) == f"Figures({', '.join(run.figures())})"
    assert "<svg" in run.figures()._repr_html_()
    assert "flame" in run._repr_html_()
    with pytest.raises(ConfigError, match="no run with seed 7"):
        comparison.run("flame", seed=7)
    with pytest.raises(ConfigError, match="has no run 'flam'"):
        comparison.run("flam")


def test_it_comes_back_from_its_folder(comparison: fedguild.Comparison, tmp_path: Path) -> None:
    """With what differs besides the method, every option as the runs used it; config.yaml says those, too."""
    again = fedguild.load_comparison(comparison.folder)
    assert str(again) == str(comparison)
    assert all(f"| {row.label} |" in str(again) for table in again.tables.values() for row in table.rows)
    assert again.tables == comparison.tables
    assert (again.runs, again.pages, again.overview) == (comparison.runs, comparison.pages, comparison.overview)
    differing = again.differing()
    assert differing.loc["method.rank"].tolist() == ["20", "3"]
    assert "name" not in differing.index
    assert again.overview is not None
    assert (comparison.folder / "table.csv").read_text() == comparison.frame().to_csv(index=False)
    assert r"\toprule" in (comparison.folder / "table.tex").read_text()
    text = (comparison.run("fedit").folder / "config.yaml").read_text()
    assert "  rank: 3\n  # alpha: 16.0\n" in text
    with pytest.raises(CheckpointError, match="not the folder of a comparison"):
        fedguild.load_comparison(tmp_path)


def test_it_shows_itself(comparison: fedguild.Comparison) -> None:
    shown = comparison._repr_html_()
    assert "<svg" in shown
    assert "flame" in shown
    assert list(comparison.figures()) == ["scores", "rounds", "costs"]
    assert "<svg" in comparison.figures()["costs"]._repr_html_()
    assert comparison.pages[""].is_file()


def test_finished_and_stopped_runs_are_kept(comparison: fedguild.Comparison, rows_only: list[str]) -> None:
    told: list[str] = []
    before = {path: path.stat().st_mtime_ns for path in comparison.folder.rglob("metrics.jsonl")}
    again = fedguild.compare(
        CONFIGS,
        *rows_only,
        seeds=[0, 1],
        output=comparison.folder,
        dataset=ROWS,
        partition=[number % CLIENTS for number in range(len(ROWS))],
        metrics={"length": lambda said, wanted: len(said)},
        tell=told.append,
    )
    assert told == [f"{name} seed {seed}: already finished" for name in ("flame", "fedit") for seed in (0, 1)]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again.frame().equals(comparison.frame())


def test_what_cannot_be_compared(tmp_path: Path, rows_only: list[str]) -> None:
    def compare(*arguments: object, **given: object) -> None:
        fedguild.compare(*arguments, *rows_only, output=tmp_path, **given)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="cannot be used with more than one job"):
        compare(CONFIGS, jobs=2, callbacks=[print])
    with pytest.raises(ConfigError, match="cannot be used on Ray"):
        compare(CONFIGS, launcher="ray", metrics={"length": lambda said, wanted: 1.0})
    with pytest.raises(ConfigError, match="There is no table 'flame/tiny-tasks'"):
        compare("flame/tiny-tasks")
    with pytest.raises(ConfigError, match="Rows and columns choose from a table"):
        compare(CONFIGS, rows=["flame"])
    with pytest.raises(ConfigError, match="A seed is given twice"):
        compare(CONFIGS, seeds=[1, 1])
    for seeds in (0, []):
        with pytest.raises(ConfigError, match="seeds takes a sequence of whole numbers, got"):
            compare(CONFIGS, seeds=seeds)
        with pytest.raises(ConfigError, match="seeds takes a sequence of whole numbers, got"):
            fedguild.sweep(BASE, "method.rank=2,3", seeds=seeds)  # type: ignore[arg-type]
    for wrong in ({"launcher": "slurm"}, {"jobs": 0}):
        with pytest.raises(ConfigError, match=r"There is no launcher 'slurm'|jobs is 0"):
            compare(CONFIGS, **wrong)
        with pytest.raises(ConfigError, match=r"There is no launcher 'slurm'|jobs is 0"):
            fedguild.sweep(BASE, "method.rank=2,3", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"\['seed=1'\] is not an override"):
        compare(CONFIGS, ["seed=1"])
    with pytest.raises(ConfigError, match="callbacks takes a sequence of functions"):
        compare(CONFIGS, callbacks=print)
    with pytest.raises(ConfigError, match=r"\['method.rank=2,3'\] is not a setting"):
        fedguild.sweep(BASE, ["method.rank=2,3"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'flam' is not one of the compared configs"):
        compare(CONFIGS, reference="flam")
    assert not list(tmp_path.iterdir())


def test_data_reaches_other_processes(tmp_path: Path, rows_only: list[str]) -> None:
    """What a process with a cell needs lies in its folder before it starts."""
    from fedguild.runs.api.inputs import gather
    from fedguild.runs.api.launch import hand_over
    from fedguild.runs.api.run_grid import Row, plan_grid
    from fedguild.runs.setup import prepare_data

    def last_alone(examples: object, clients: int, rng: object) -> list[int]:
        return [index % (clients - 1) for index in range(len(ROWS) - 8)] + [clients - 1] * 8

    grid = plan_grid([Row(CONFIGS[0])], [0], tmp_path, rows_only, gather(ROWS, last_alone))
    hand_over(grid.cells, grid.inputs)
    data = prepare_data(grid.cells[0].config, grid.cells[0].folder)
    assert [sum(row) for row in data.partition_table.counts] == [14, 13, 13, 8]
