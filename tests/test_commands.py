"""Every command in the documentation is run by a test, or a comment above it says why not.

Above the fence of a block of commands may stand one of

    <!-- run by: tests/x.py -->      a test that runs the block, with the page
    <!-- not run: REASON -->         for the lines that this module does not run

All `fedguild` commands are parsed by the command line itself, and their presets, files, methods and settings looked up,
also those that are not run.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest
import typer.main
from typer.testing import CliRunner

from fedguild.cli import app
from fedguild.config import load_config, table_cells, tables
from fedguild.core.errors import ConfigError
from fedguild.core.plugins import is_target
from fedguild.methods import METHODS
from fedguild.runs.api.comparing import is_table
from fedguild.runs.api.sweeping import divide

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELLS = ("sh", "bash", "console", "shell")
BLOCK = re.compile(
    r"^(?:<!-- (?P<kind>run by|not run): (?P<why>[^\n]+?) -->\n+)?```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SMALL = (
    "federation.rounds=1",
    "federation.clients=2",
    "federation.client_fraction=1",
    "training.steps=1",
    "training.batch_size=2",
    "evaluation.max_examples=2",
    "evaluation.max_new_tokens=2",
)
"""Sizes at which the documentation's runs on the embedded model are run here."""
RUN = ("methods", "presets", "partition")
"""Sub-commands that are run as they stand, as they train nothing."""
RUN_SMALL = ("fedguild run flame/tiny-tasks tracking=[tensorboard]",)
"""Runs that are run with `SMALL`; `fedguild run` itself is run by many tests, and each takes a second or two."""


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str
    words: tuple[str, ...]
    kind: str
    why: str

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def runs_here(self) -> bool:
        name, *arguments = self.words
        cheap = name == "fedguild" and (arguments[0] in RUN or self.text in RUN_SMALL)
        return cheap and self.kind != "run by" and not is_target(arguments[-1])  # a class that the page alone has


def commands_of(page: str, text: str) -> Iterator[Command]:
    for block in BLOCK.finditer(text):
        if block["language"] in SHELLS:
            for words in commands_in(block["text"]):
                yield Command(page, words, block["kind"] or "", block["why"] or "")


def commands_in(script: str) -> Iterator[tuple[str, ...]]:
    """Yields the words of a script's commands: continued lines joined, here-documents, comments and `$ ` left out."""
    lines = iter(script.replace("\\\n", " ").splitlines())
    for line in lines:
        if here := re.search(r"<<-?'?(\w+)'?$", line):
            while next(lines).strip() != here[1]:
                pass
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="&|;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if word not in ("&&", "||", ";", "|"):
                words.append(word)
            elif words:
                yield tuple(words)
                words = []


COMMANDS = [
    command for page in PAGES for command in commands_of(page.relative_to(ROOT).as_posix(), page.read_text("utf-8"))
]
FEDGUILD = [command for command in COMMANDS if command.words[0] == "fedguild"]


def unaccounted(commands: Sequence[Command]) -> list[str]:
    """Returns what is wrong with the comments: commands neither run nor marked, and comments that hold no more."""
    found, marked = [], defaultdict(list)
    for command in commands:
        where = f"{command.page}: {command.text}"
        if command.kind == "run by":
            test = ROOT / command.why
            if not test.is_file() or Path(command.page).name not in test.read_text("utf-8"):
                found.append(f"{where}: {command.why} is no test that names the page")
        elif command.kind == "not run":
            absent = [path for path in re.findall(r"tests/[\w./]*\w", command.why) if not (ROOT / path).exists()]
            found += [f"{where}: there is no {path}" for path in absent]
            marked[f"{command.page}: 'not run: {command.why}'"].append(command.runs_here)
        elif not command.runs_here:
            found.append(f"{where}: neither run by a test nor marked")
    return [*found, *(f"{mark}, but all of it is run" for mark, run in marked.items() if all(run))]


def test_every_command_is_run_by_a_test_or_says_why_not() -> None:
    assert len(COMMANDS) > 60
    assert not unaccounted(COMMANDS)


def test_what_is_neither_run_nor_marked_is_found() -> None:
    text = "```sh\nfedguild presets\nfedguild run flame/tiny-tasks\n```\n"
    text += "<!-- not run: no -->\n```sh\nfedguild presets\n```\n"
    text += "<!-- run by: tests/core/test_files.py -->\n```sh\nmake x\n```\n"
    assert unaccounted(list(commands_of("docs/page.md", text))) == [
        "docs/page.md: fedguild run flame/tiny-tasks: neither run by a test nor marked",
        "docs/page.md: make x: tests/core/test_files.py is no test that names the page",
        "docs/page.md: 'not run: no', but all of it is run",
    ]


@cache
def group() -> click.Group:
    return typer.main.get_command(app)  # type: ignore[return-value]


def parsed(words: Sequence[str]) -> tuple[str, Mapping[str, object]]:
    """Returns a command's name and its arguments and options, as click reads them."""
    command: click.Command = group()
    arguments, path = list(words), []
    while isinstance(command, click.Group):
        context = command.make_context(command.name, arguments, resilient_parsing=False)
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        path.append(str(name))
    return " ".join(path), command.make_context(path[-1], arguments).params


def check_words(words: Sequence[str], page: str) -> None:
    """Raises what the command line would raise about a command's arguments, without running it."""
    name, given = parsed(words)
    positional = [given.get("config"), given.get("config_name"), *_listed(given.get("configs"))]
    if name == "presets" and given.get("name") not in METHODS:
        positional.append(given.get("name"))
    configs = [str(one) for one in positional if one and "=" not in str(one)]
    settings = [str(one) for one in (*positional, *_listed(given.get("overrides"))) if one and "=" in str(one)]
    if name == "sweep":
        fixed, swept = divide(settings)
        settings = [*fixed, *(f"{key}={values[-1]}" for key, values in swept.items())]
    shown = (ROOT / page).read_text("utf-8")
    for config in configs:
        if config.endswith(".yaml"):
            assert shown.count(config) > 1, f"the page does not say what {config} is"
        elif is_table(config):
            check_table(config, given)
        else:
            load_config(config, settings)
    if name == "methods" and given["name"]:
        own = f"class {given['name'].partition(':')[2]}(" if is_target(given["name"]) else f'{given["name"]} = "'
        assert given["name"] in METHODS or own in shown, "no method, and none that the page adds"


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else []


def check_table(name: str, given: Mapping[str, object]) -> None:
    """Checks that a table has the rows and columns that a command names."""
    rows, columns = (str(given.get(key) or "").split(",") if given.get(key) else () for key in ("rows", "columns"))
    (table,) = [table for table in tables() if table.name == name]
    assert table_cells(name, table.load(), rows, columns)


def name_of(command: Command) -> str:
    return f"{Path(command.page).stem}: {' '.join(command.words[1:])[:50]}"


@pytest.mark.parametrize("command", FEDGUILD, ids=name_of)
def test_the_command_line_takes_it(command: Command) -> None:
    check_words(command.words[1:], command.page)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("run flame/tiny-task", "is neither a preset nor a config file"),
        ("run flame/tiny-tasks trainin.steps=3", "unknown key"),
        ("run flame/tiny-tasks --ouput x", "No such option"),
        ("ran flame/tiny-tasks", "There is no command"),
        ("federation init union --client 3", "No such option"),
        ("compare flame/table-2 --rows flam", "flam"),
        ("methods flam", "no method"),
        ("presets flam", "is neither a preset nor a config file"),
        ("profile unknown.yaml", "does not say what"),
    ],
)
def test_a_command_that_would_fail_is_found(line: str, reason: str) -> None:
    with pytest.raises((click.UsageError, ConfigError, AssertionError), match=reason):
        check_words(line.split(), "README.md")


@pytest.mark.parametrize("command", [one for one in FEDGUILD if one.runs_here], ids=name_of)
def test_it_runs(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*command.words[1:], *(SMALL if command.text in RUN_SMALL else ())]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


TARGETS = set(
    re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text("utf-8").replace("$(VENV)", ".venv"), re.MULTILINE)
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


def test_what_make_pip_and_python_are_asked_for_is_there() -> None:
    absent = []
    for command in COMMANDS:
        program, *arguments = command.words
        if program == "make":
            wanted = {word for word in arguments if "=" not in word and not word.startswith("-")}
            absent += [command.text] * (not wanted <= TARGETS)
        elif program == "pip":
            extras = re.findall(r"\[([\w,-]+)\]", " ".join(arguments))
            absent += [command.text] * any(extra not in EXTRAS for found in extras for extra in found.split(","))
        elif program == "python" and arguments[0].endswith(".py"):
            absent += [command.text] * (not (ROOT / arguments[0]).is_file())
    assert not absent


INLINE = re.compile(r"`(fedguild [a-z][^`]*)`")


def test_commands_in_the_text_exist_with_their_options() -> None:
    wrong = []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for line in INLINE.findall(re.sub(r"\s+", " ", prose)):
            command: click.Command | None = group()
            words = [word for word in line.split()[1:] if word != "…"]
            while isinstance(command, click.Group) and words:
                command = command.get_command(click.Context(command), words.pop(0))
            params = command.params if command else ()
            known = {option for one in params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
            asked = {word.partition("=")[0] for word in words if word.startswith("-")}
            if command is None or not asked <= known:
                wrong.append(f"{page.relative_to(ROOT)}: {line}")
    assert not wrong
