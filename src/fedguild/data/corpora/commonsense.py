"""Commonsense-15K and its eight test sets, in the wording of LLM-Adapters (Hu et al., EMNLP 2023).

Every record says which answers it accepts (`Answer format: true/false`), and every response is `the correct answer is
...`. A record does not say which of the eight sets it is from. That is read from a line-aligned `X.task.txt` next to
`X.json`, else from the folder's name, else from the start of the instruction, which cannot tell ARC and OpenBookQA
apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from fedguild.core.errors import DataError
from fedguild.data.corpora.source import HubDataset, Source, split_paths
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.corpora.table import Table, read_file, read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render

Label = Literal["task", "answer"]
SETS = (
    "ARC-Challenge",
    "ARC-Easy",
    "boolq",
    "hellaswag",
    "openbookqa",
    "piqa",
    "social_i_qa",
    "winogrande",
)
ARC_OR_OPENBOOKQA = "arc_openbookqa"
RESPONSE = "the correct answer is "
_OPENINGS = (
    ("Please answer the following question with true or false", "boolq"),
    ("Please choose the correct solution", "piqa"),
    ("Please choose the correct ending", "hellaswag"),
    ("Please choose the correct answer to fill in the blank", "winogrande"),
)
_FORMAT = re.compile(r"Answer format:\s*(\S+)\s*$")


def accepted_answers(instruction: str) -> tuple[str, ...]:
    """Returns the answers that an instruction accepts; empty if it does not say."""
    match = _FORMAT.search(instruction)
    return tuple(match.group(1).split("/")) if match else ()


def task_of(instruction: str, answers: tuple[str, ...]) -> str:
    """Returns the set that a record is from, as far as its instruction tells.

    Three numbered answers mean Social IQa (a few ARC questions have three, too); more mean ARC or
    OpenBookQA.
    """
    for opening, task in _OPENINGS:
        if instruction.startswith(opening):
            return task
    return "social_i_qa" if len(answers) == 3 else ARC_OR_OPENBOOKQA


def _tables(source: Source) -> Iterator[tuple[Path | None, Table]]:
    if not isinstance(source.where, Path):
        yield None, read_table(source)
        return
    for path in _files(source):
        yield path, read_file(path)


def _files(source: Source) -> list[Path]:
    if source.folder is None:
        return [source.where] if isinstance(source.where, Path) else []
    files = split_paths(source.folder, source.splits)
    for name in () if files else SETS:
        folder = source.folder / name
        files += split_paths(folder, source.splits) if folder.is_dir() else []
    if not files:
        raise DataError(
            f"The folder {source.folder} has no split named {' or '.join(source.splits)}.",
            f"Expected such a JSON file, or subfolders with one: {', '.join(SETS)}.",
        )
    return files


def _known_tasks(path: Path | None, rows: int) -> list[str] | None:
    """Returns each row's set from the file next to `path` or the folder's name; None if neither says."""
    if path is None:
        return None
    beside = path.with_suffix(".task.txt")
    if beside.is_file():
        tasks = beside.read_text(encoding="utf-8").split()
        if len(tasks) != rows:
            raise DataError(f"{beside} names {len(tasks)} tasks, but {path.name} has {rows} rows.")
        return tasks
    return [path.parent.name] * rows if path.parent.name in SETS else None


def read(source: Source, template: str, *, label: Label = "task") -> Iterator[Example]:
    """Yields the records of one split; choices are the whole responses, task is the source set.

    Args:
        label: What a Dirichlet partition draws over: the source set, or the answer.

    Raises:
        DataError: columns are missing or an answer is not one of those accepted.
    """
    columns = {name: (name,) for name in ("instruction", "output", "answer")}
    for path, table in _tables(source):
        tasks = _known_tasks(path, sum(1 for _ in table.rows))
        for number, row in table.select(columns, {"input": ("input",)}):
            instruction, answer = text(row["instruction"]), text(row["answer"])
            answers = accepted_answers(instruction)
            if answers and answer not in answers:
                raise table.bad_row(number, f"the answer {answer!r}", ", ".join(answers))
            task = tasks[number - 1] if tasks else task_of(instruction, answers)
            yield Example(
                prompt=render(template, instruction, text(row["input"])),
                response=RESPONSE + answer if answers else text(row["output"]),
                label=answer if label == "answer" else task,
                task=task,
                choices=tuple(RESPONSE + choice for choice in answers),
                answer=answers.index(answer) if answers else None,
            )


SPEC = CorpusSpec(
    kind="choice",
    layouts=(
        "JSON list with instruction, input, output, answer; source sets line by line in X.task.txt where present",
        "a folder of the eight sets, each with train.json or test.json",
    ),
    template="commonsense",
    hub=HubDataset("zwhe99/commonsense_170k"),
    read=read,
    options={"label": "what Dirichlet draws over: task (default) or answer"},
)
