"""PIQA: the better of two solutions for a goal (Bisk et al., AAAI 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedguild.core.errors import DataError
from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import CorpusSpec, choice_example
from fedguild.data.corpora.table import Table, read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render


def _labels(table: Table, path: Path) -> list[Any]:
    """Returns the labels of the line-aligned file next to `X.jsonl`, `X-labels.lst`."""
    beside = path.with_name(f"{path.stem}-labels.lst")
    if not beside.is_file():
        raise DataError(
            f"{path} has no column 'label', and there is no file {beside.name} beside it.",
            f"Found: {', '.join(table.columns)}. Expected: goal, sol1, sol2 with the labels in {beside.name}, "
            "or a column 'label'.",
        )
    return beside.read_text(encoding="utf-8").split()


def _labelled(source: Source) -> tuple[Table, list[Any] | None]:
    table = read_table(source)
    if "label" in table.columns or not isinstance(source.where, Path):
        return table, None
    path = source.path
    labels = _labels(table, path)
    count = sum(1 for _ in table.rows)
    if len(labels) != count:
        raise DataError(f"{path} has {count} rows, but its label file has {len(labels)} labels.")
    return table, labels


def read(source: Source, template: str) -> Iterator[Example]:
    """Yields the goals of one split; choices are the solutions, label is the position of the correct one."""
    table, labels = _labelled(source)
    required = {name: (name,) for name in ("goal", "sol1", "sol2")}
    if labels is None:
        required["label"] = ("label",)
    for number, row in table.select(required):
        index = table.index(number, row["label"] if labels is None else labels[number - 1], 2)
        solutions = (text(row["sol1"]), text(row["sol2"]))
        prompt = render(template, text(row["goal"]))
        yield choice_example(prompt, solutions, index, label=f"solution{index + 1}", task="piqa")


SPEC = CorpusSpec(
    kind="choice",
    layouts=("X.jsonl with goal, sol1, sol2 and the labels in X-labels.lst", "JSON lines with goal, sol1, sol2, label"),
    hub=HubDataset("ybisk/piqa", revision="refs/convert/parquet"),
    read=read,
    test_splits=("validation", "valid", "val", "dev", "test"),
)
