"""`fedguild init`: six questions, and a commented config that runs."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fedguild.cli.options import CONFIG
from fedguild.cli.output import note
from fedguild.core.errors import ConfigError, DataError, FedGuildError

if TYPE_CHECKING:
    from fedguild.runs.api.drafting import Data

T = TypeVar("T")

EXAMPLES = (
    "fedguild init",
    "fedguild init --yes && fedguild run",
    "fedguild init mine.yaml --data ours.jsonl --columns instruction=question,response=reply --clients 5",
    "fedguild init big.yaml --yes --model allenai/OLMoE-1B-7B-0924 --data dolly --budgets 8,4,2,1 --where ray",
)


class Where(StrEnum):
    """Where the clients train."""

    LOCAL = "local"
    RAY = "ray"
    FEDERATION = "federation"


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new config.")] = Path(CONFIG),
    model: Annotated[
        str | None, typer.Option("--model", help="embedded, english, a hub id or a folder.", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="A corpus, for example dolly; a file or folder; or a hub id.", show_default=False),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            help="Columns of a file with unusual names, for example instruction=question,response=reply; also input "
            "and label.",
            show_default=False,
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option("--clients", min=1, help="Number of clients.")] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            "--budgets",
            help="Tiers of clients by what they can run, largest first: active experts per token, for example 8,4,2,1 "
            "(of a dense model, LoRA ranks); one number if all are equal.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="One of `fedguild methods`.", show_default=False)
    ] = None,
    where: Annotated[
        Where | None,
        typer.Option(
            "--where",
            help="local: this machine; ray: the GPUs of a Ray cluster; federation: real clients over the network.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Use the defaults for everything not given.")] = False,
) -> None:
    """Write a commented config that runs, from six answers: model, data, clients, budgets, method and where.

    The config is checked before it is written: the method fits the model and the budgets, and data on this machine was
    read and partitioned. An existing file is never overwritten.
    """
    from fedguild.runs.api import drafting

    if file.exists():
        raise ConfigError(f"{file} exists, and is left as it is.", "Give another name: fedguild init NAME.yaml.")
    ask = _Asker(yes)
    path = ask("Model: embedded, english, a hub id or a folder", model, "embedded", _model)
    described = drafting.describe_model(path)
    named = _columns(columns)
    found = ask(
        "Data: tasks (generated), a corpus such as dolly, a file or folder, or a hub id",
        data,
        "tasks",
        lambda answer: _data(answer, named, asking=not yes and data is None),
    )
    if found.summary():
        note(found.summary())
    count = ask("Number of clients", None if clients is None else str(clients), "4", lambda text: _clients(text, found))
    usual = drafting.default_budgets(described)
    unit = "active experts per token" if described is None or described.moe else "LoRA ranks"
    tiers = ask(f"Budgets: {unit}, largest first", budgets, ",".join(map(str, usual)), _budgets)
    chosen = ask(
        "Method (`fedguild methods` lists them)",
        method,
        drafting.default_method(described, tiers),
        lambda name: _method(name, drafting.require_method),
    )
    place = ask("Where the clients train: local, ray or federation", where and where.value, "local", Where)
    answers = drafting.Answers(path, found, count, tiers, chosen, place.value)
    text = drafting.draft(answers, file)
    drafting.check(text, file)
    drafting.write(text, file)
    typer.echo(file)
    if place is Where.FEDERATION:
        note(f"Next: fedguild federation init union --clients {count} --config {file}")
    else:
        note("Next: fedguild run" if file == Path(CONFIG) else f"Next: fedguild run {file}")


class _Asker:
    """Asks for what was not given as an option, until the answer is acceptable.

    Args:
        yes: Whether to take the defaults instead.
    """

    def __init__(self, yes: bool) -> None:
        self._yes = yes

    def __call__(self, question: str, given: str | None, default: str, accept: Callable[[str], T]) -> T:
        """Returns an answer.

        Raises:
            FedGuildError: the answer was given as an option, or is the default, and is wrong.
        """
        if given is not None or self._yes:
            return accept(default if given is None else given)
        while True:
            answer = typer.prompt(question, default=default, err=True)
            try:
                return accept(str(answer).strip())
            except (FedGuildError, ValueError) as error:
                note(str(error))


def _model(path: str) -> str:
    from fedguild.runs.api.drafting import describe_model

    if describe_model(path) is None:
        note(f"{path} is not on this machine: whether the method fits it is seen when it is downloaded.")
    return path


def _data(answer: str, columns: dict[str, str], *, asking: bool) -> Data:
    """Returns the data, after asking for columns that cannot be inferred."""
    from fedguild.runs.api.drafting import look_at_data

    try:
        return look_at_data(answer, columns)
    except DataError as error:
        if not asking or "--columns" not in error.hint:
            raise
        note(f"{error.message} {error.hint.partition('. ')[0]}.")
        asked = {
            key: str(typer.prompt(f"Column of the {key}", err=True)).strip() for key in ("instruction", "response")
        }
        return look_at_data(answer, {**columns, **asked})


def _columns(text: str | None) -> dict[str, str]:
    known = (
        *("messages", "instruction", "response", "input", "system", "history"),
        *("text", "tools", "label", "task", "document", "choices"),
    )
    named: dict[str, str] = {}
    for part in text.split(",") if text else []:
        key, equals, name = part.strip().partition("=")
        if not equals or not name or key not in known:
            raise ConfigError(f"--columns has '{part}'.", f"Accepted: KEY=COLUMN, KEY being one of {', '.join(known)}.")
        named[key] = name
    return named


def _clients(text: str, data: Data) -> int:
    from fedguild.runs.api.drafting import FEWEST_ROWS

    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"The number of clients is a whole number from 1, got '{text}'.")
    if data.rows is not None and data.rows < FEWEST_ROWS * int(text):
        raise ConfigError(
            f"{data.rows} rows do not reach for {text} clients: each needs at least {FEWEST_ROWS}, to train, to "
            "validate and to test on."
        )
    return int(text)


def _budgets(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"Budgets are whole numbers separated by commas, largest first, got '{text}'.")
    numbers = tuple(map(int, parts))
    if list(numbers) != sorted(set(numbers), reverse=True):
        raise ConfigError(f"Budgets differ and fall, for example 8,4,2,1; got '{text}'.")
    return numbers


def _method(name: str, require: Callable[[str], None]) -> str:
    require(name)
    return name
