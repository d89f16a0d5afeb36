"""Natural Instructions: a file per task, each with its definition (Wang et al., EMNLP 2022)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fedguild.core.errors import DataError
from fedguild.data.corpora.document import read_document
from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.corpora.table import read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render

Label = Literal["task", "category"]


def first_text(value: Any) -> str:
    """Returns the first of a list of texts, or the text itself: both forms are in circulation."""
    return text(value[0] if value else None) if isinstance(value, list) else text(value)


def _task_files(source: Source) -> list[Path]:
    if source.folder is None:
        return [source.where] if isinstance(source.where, Path) else []
    paths = sorted(source.folder.glob("*.json"))
    if not paths:
        raise DataError(f"The folder {source.folder} holds no task files.", "Expected files named TASK.json.")
    return paths


def _read_task(path: Path) -> dict[str, Any]:
    return read_document(path, ("Definition", "Instances"))


def _chosen(source: Source, sizes: dict[str, int], max_tasks: int | None) -> set[str]:
    """Returns the names of the largest tasks (ties: alphabetical), or of those in training."""
    if max_tasks is None:
        return set(sizes)
    if source.training:
        return {example.task for example in source.training}
    return set(sorted(sizes, key=lambda name: (-sizes[name], name))[:max_tasks])


def _from_files(source: Source, template: str, label: Label, max_tasks: int | None) -> Iterator[Example]:
    paths = _task_files(source)
    sizes = {path.stem: 0 if max_tasks is None else len(_read_task(path)["Instances"]) for path in paths}
    chosen = _chosen(source, sizes, max_tasks)
    for path in paths:
        if path.stem not in chosen:
            continue
        task = _read_task(path)
        definition = first_text(task["Definition"])
        category = first_text(task.get("Categories"))
        for number, instance in enumerate(task["Instances"], start=1):
            if not {"input", "output"} <= instance.keys():
                raise DataError(
                    f"Instance {number} of {path} lacks an input or an output.", f"Found: {', '.join(instance)}."
                )
            prompt = render(template, definition, text(instance["input"]))
            name = category if label == "category" and category else path.stem
            yield Example(prompt, first_text(instance["output"]), label=name, task=path.stem)


def _from_hub(source: Source, template: str, max_tasks: int | None) -> Iterator[Example]:
    table = read_table(source)
    names = ("task_name", "definition", "inputs", "targets")
    required = {name: (name,) for name in names}
    sizes = (
        Counter(text(row["task_name"]) for _, row in table.select(required, nested=names))
        if max_tasks
        else Counter[str]()
    )
    chosen = _chosen(source, dict(sizes), max_tasks)
    for _, row in table.select(required, nested=("definition", "targets")):
        task = text(row["task_name"])
        if max_tasks is None or task in chosen:
            prompt = render(template, first_text(row["definition"]), text(row["inputs"]))
            yield Example(prompt, first_text(row["targets"]), label=task, task=task)


def read(source: Source, template: str, *, label: Label = "task", max_tasks: int | None = None) -> Iterator[Example]:
    """Yields the instances of one split; task is the file's name, the first output is the response.

    Args:
        label: What a Dirichlet partition draws over: the task, or its first category (files only).
        max_tasks: Keep only this many tasks, those with the most training instances.

    Raises:
        DataError: a file has no `Definition` or `Instances`.
    """
    if isinstance(source.where, Path):
        return _from_files(source, template, label, max_tasks)
    return _from_hub(source, template, max_tasks)


SPEC = CorpusSpec(
    kind="generate",
    layouts=(
        "a folder of TASK.json files with Definition, Instances and optionally Categories",
        "any table with task_name, definition, inputs, targets (hub only)",
    ),
    template="alpaca",
    hub=HubDataset("Muennighoff/natural-instructions"),
    read=read,
    options={
        "label": "what Dirichlet draws over: task (default) or category",
        "max_tasks": "keep only the tasks with the most training instances (all)",
    },
    test_splits=("test", "validation"),
)
