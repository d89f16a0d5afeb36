"""MMLU: multiple-choice questions in 57 subjects (Hendrycks et al., ICLR 2021)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedguild.core.errors import DataError
from fedguild.data.corpora.source import HubDataset, Source, is_split
from fedguild.data.corpora.spec import CorpusSpec, choice_example
from fedguild.data.corpora.table import Row, Table, read_file, read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render

LETTERS = ("A", "B", "C", "D")
_CHOICE_COLUMNS = ("choice0", "choice1", "choice2", "choice3")


def _headerless(first: list[str]) -> tuple[str, ...] | None:
    original = len(first) == 6 and first[5].strip() in LETTERS
    return ("question", *_CHOICE_COLUMNS, "answer") if original else None


def _tables(source: Source) -> Iterator[tuple[str, Table]]:
    """Yields (subject, table); the subject is empty if the rows name theirs."""
    if not isinstance(source.where, Path):
        yield "", read_table(source)
        return
    for path in _files(source):
        yield re.sub(r"_(dev|val|test)$", "", path.stem), read_file(path, _headerless)


def _files(source: Source) -> list[Path]:
    if source.folder is None:
        return [source.where] if isinstance(source.where, Path) else []
    for name in source.splits:
        parts = [_subject_files(source.folder, part) for part in name.split("+")]
        if all(parts):
            return [path for files in parts for path in files]
    raise DataError(
        f"The folder {source.folder} holds no MMLU files.",
        f"Expected subfolders named {' or '.join(source.splits)} with a CSV file per subject, or such files.",
    )


def _subject_files(folder: Path, part: str) -> list[Path]:
    if (folder / part).is_dir():
        return sorted((folder / part).glob("*.csv"))
    return sorted(path for path in folder.glob("*.csv") if is_split(path, part))


def _answer(table: Table, number: int, value: Any) -> int:
    letter = text(value)
    return LETTERS.index(letter) if letter in LETTERS else table.index(number, value, len(LETTERS))


def _rows(table: Table) -> Iterator[tuple[int, Row, list[str]]]:
    """Yields (row number, record, its four choices) from either layout."""
    required = {"question": ("question",), "answer": ("answer",)}
    columns = ("choices",) if "choices" in table.columns else _CHOICE_COLUMNS
    choice_columns = {name: (name,) for name in columns}
    for number, row in table.select({**required, **choice_columns}, {"subject": ("subject",)}, ("choices",)):
        choices = row["choices"] if columns == ("choices",) else [row[name] for name in columns]
        if not isinstance(choices, list) or len(choices) != len(LETTERS):
            raise table.bad_row(number, f"the choices {choices!r}", "a list of four texts")
        yield number, row, [text(choice) for choice in choices]


def read(source: Source, template: str) -> Iterator[Example]:
    """Yields the questions of one split; choices are the letters, label is the subject."""
    for file_subject, table in _tables(source):
        for number, row, choices in _rows(table):
            subject = text(row["subject"]) or file_subject
            topic = subject.replace("_", " ")
            instruction = f"The following are multiple choice questions (with answers) about {topic}.\n"
            options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
            prompt = render(template, instruction, f"{text(row['question'])}\n{options}")
            yield choice_example(prompt, LETTERS, _answer(table, number, row["answer"]), label=subject, task="mmlu")


SPEC = CorpusSpec(
    kind="choice",
    layouts=(
        "a folder {dev,val,test}/SUBJECT_{dev,val,test}.csv without header: question, A, B, C, D, letter",
        "CSV with the header question, choice0 to choice3, answer 0-3",
        "any table with question, subject, choices, answer",
    ),
    hub=HubDataset("cais/mmlu", config="all"),
    read=read,
    train_splits=("dev+validation", "dev+val", "train", "auxiliary_train", "validation", "val", "dev"),
    test_splits=("test",),
)
