"""Help, version, and what becomes of errors and of Ctrl-C."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from typer.main import get_command

import fedguild
from fedguild.cli import app
from tests.cli.conftest import Invoke

COMMANDS = ["run", "resume", "compare", "partition", "evaluate", "export", "report", "methods", "presets", "doctor"]


def test_help_lists_every_command_in_the_order_of_use(invoke: Invoke) -> None:
    shown = invoke("--help").stdout
    places = [shown.index(f"│ {command} ") for command in COMMANDS]
    assert places == sorted(places)


@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_the_help_of_every_command_has_examples_that_can_be_copied(invoke, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    result = invoke(command, "--help")
    assert result.exit_code == 0
    given = import_module(f"fedguild.cli.{command}").EXAMPLES
    assert all(line.startswith(f"fedguild {command}") for line in given)
    assert result.stdout.partition("Examples:\n")[2].strip().splitlines() == [given[0], *(f"  {x}" for x in given[1:])]


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, (*path, name))


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*one, id=" ".join(one[0])) for one in _commands(get_command(app))]
)
def test_every_argument_and_option_has_help(path, command, invoke, monkeypatch):
    """And shows it: click 8.5 takes the help of typer's arguments away."""
    monkeypatch.setenv("COLUMNS", "400")
    shown = " ".join(invoke(*path, "--help").stdout.replace("│", " ").split())
    assert (command.help or "").strip()
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            assert parameter.help, parameter.name
            assert " ".join(parameter.help.replace("`", "").split()) in shown, parameter.name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "flame/tiny-tasks", "--seed", "3"], "A setting is given without dashes: seed=3"),
        (["compare", "flame/tiny-tasks", "--rounds", "5"], "A setting is given without dashes: federation.rounds=5"),
        (["run", "flame/tiny-tasks", "--learning-rate"], "training.learning_rate=VALUE"),
        (["train", "flame/tiny-tasks"], "There is no command 'train'.\nDid you mean 'run'?"),
        (["exprot"], "There is no command 'exprot'.\nDid you mean 'export'?"),
    ],
)
def test_a_setting_given_as_an_option_and_an_unknown_command_are_told(invoke, arguments, told, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"fedguild {fedguild.__version__}\n"


def test_a_mendable_error_is_a_message_and_exit_code_2(invoke: Invoke) -> None:
    result = invoke("run", "flame/tiny-tasks", "training.stepz=3")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: override 'training.stepz=3': unknown key 'training.stepz'\n")
    assert "Did you mean 'training.steps'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(invoke: Invoke) -> None:
    result = invoke("--debug", "run", "nowhere.yaml")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "Error: There is no config file nowhere.yaml." in result.stderr


@pytest.mark.parametrize(
    ("arguments", "resume_with"),
    [
        (["run", "flame/tiny-tasks"], "fedguild resume runs/flame-tiny-tasks"),
        (["run", "flame/tiny-tasks", "--output", "here"], "fedguild resume here"),
        (["resume", "there"], "fedguild resume there"),
        (["compare", "flame/tiny-tasks"], "the same command again"),
    ],
)
def test_ctrl_c_says_how_to_go_on(invoke, experiment, monkeypatch, arguments, resume_with):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "run", interrupt)
    monkeypatch.setattr(experiment, "resume", interrupt)
    result = invoke(*arguments)
    assert result.exit_code == 130
    assert result.stderr == f"Interrupted.\nContinue from the last complete round with: {resume_with}\n"


def test_ctrl_c_where_there_is_nothing_to_resume(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedguild.cli.doctor.diagnose", interrupt)
    result = invoke("doctor")
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")


def test_python_dash_m() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "fedguild", "presets", "flame"], capture_output=True, text=True, check=True
    )
    assert "olmoe" in shown.stdout


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9 GiB"),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_too_little_memory_is_said_without_a_traceback(invoke, experiment, monkeypatch, error):
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(experiment, "run", run)
    result = invoke("run", "flame/tiny-tasks", "output=there")
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (2, True)
    assert result.stderr.startswith(f"Error: out of memory: {error}")
    assert "continue with: fedguild resume there" in result.stderr


def test_another_error_keeps_its_traceback(invoke, experiment, monkeypatch):
    def run(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(experiment, "run", run)
    assert isinstance(invoke("run", "flame/tiny-tasks", "output=there").exception, RuntimeError)
