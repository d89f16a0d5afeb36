"""The command in-process, and an `experiment` that writes its runs without training anything."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from fedguild.cli import app
from fedguild.config import Config, load_config
from fedguild.core.payload import Payload
from fedguild.core.progress import Progress
from fedguild.measuring.log.records import RunLog
from fedguild.server import checkpoint
from tests.report.runs import FLAME_FINAL, RANKS_FINAL, write_run

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # some libraries set it for the whole process
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


class FakeExperiment:
    """Stands in for `fedguild.runs.experiment`; `calls` tells what was asked of it."""

    CHECKPOINTS = "checkpoints"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Path]] = []

    def run(self, config: Config, output: Path, *, progress: Progress, **_: object) -> SimpleNamespace:
        self.calls.append(("run", output))
        progress.stage("loading the model")
        progress.round_started(1, config.federation.rounds)
        progress.step(5, 25, 1.5)
        progress.evaluated({"b1": 0.5}, "accuracy")
        self._write(config, output)
        return SimpleNamespace(folder=output)

    def resume(self, output: Path, *, progress: Progress, round: int | None = None, **_: object) -> SimpleNamespace:
        self.calls.append(("resume", output) if round is None else ("resume", output, round))
        config = load_config(str(output / "config.yaml"))
        RunLog(output).path.unlink()
        self._write(config, output)
        return SimpleNamespace(folder=output)

    def evaluate(self, folder: Path, *, round: int | None = None, split: str = "test", **_: object) -> SimpleNamespace:
        self.calls.append(("evaluate", folder))
        if folder.name == "personal":
            own, received = {"client-000": 0.75, "client-001": 0.5}, {"client-000": 0.25, "client-001": 0.0}
            pooled = {"client-000": 0.5, "client-001": 0.5}
            summaries, deviations = {"mtal": 0.625, "received": 0.125, "pooled": 0.5}, {"mtal": 0.177, "pooled": 0.0}
            return SimpleNamespace(
                scores={},
                mean=0.625,
                own=own,
                trained={},
                received=received,
                pooled=pooled,
                summaries=summaries,
                deviations=deviations,
                metric="accuracy",
            )
        return SimpleNamespace(
            scores={"b1": 0.75, "b4": 0.25},
            mean=0.5,
            own={},
            trained={},
            received={},
            pooled={},
            summaries={"mean": 0.5},
            deviations={},
            metric="accuracy",
        )

    @staticmethod
    def _write(config: Config, output: Path) -> None:
        final = FLAME_FINAL if config.method.name == "flame" else RANKS_FINAL
        write_run(
            output,
            name=config.name,
            method=config.method.name,
            seed=config.seed,
            final=final,
            rounds=config.federation.rounds,
        )
        (output / "config.yaml").write_text(config.resolved_yaml())
        checkpoint.save(output / "checkpoints", config.federation.rounds, Payload(), fingerprint=config.fingerprint())
        (output / "report.html").touch()


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> FakeExperiment:
    fake = FakeExperiment()
    monkeypatch.setitem(sys.modules, "fedguild.runs.experiment", fake)  # type: ignore[arg-type]
    monkeypatch.setattr("fedguild.runs.experiment", fake, raising=False)
    return fake
