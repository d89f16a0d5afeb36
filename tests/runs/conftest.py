"""A recorded run, and the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedguild.cli import app
from fedguild.runs import experiment
from tests.runs.runs import small_config

Command = Callable[..., Result]


@pytest.fixture(scope="session")
def recorded(olmoe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of `small_config`, to compare others with and to damage copies of."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    experiment.run(small_config(olmoe_folder), folder)
    return folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def complaint(command: Command) -> Callable[..., str]:
    """Calls a command that must fail as a mendable error does; returns what it says."""

    def call(*arguments: object) -> str:
        result = command(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        return result.stderr

    return call
