"""Dolly-15K: instructions in eight categories, written by Databricks' staff (2023)."""

from __future__ import annotations

from collections.abc import Iterator

from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.corpora.table import read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render


def read(source: Source, template: str) -> Iterator[Example]:
    """Yields the instructions of one split; label and task are the category."""
    columns = {
        "instruction": ("instruction",),
        "context": ("context", "input"),
        "response": ("response", "output"),
        "category": ("category",),
    }
    for _, row in read_table(source).select(columns):
        prompt = render(template, text(row["instruction"]), text(row["context"]))
        category = text(row["category"])
        yield Example(prompt, text(row["response"]), label=category, task=category)


SPEC = CorpusSpec(
    kind="generate",
    layouts=(
        "JSON lines or a JSON list with instruction, context, response, category",
        "AlpaGasus's form: instruction, input, output, category",
    ),
    template="alpaca",
    hub=HubDataset("databricks/databricks-dolly-15k"),
    read=read,
)
