"""Alpaca and AlpaGasus files: instruction, input, output (Taori et al. 2023; Chen et al., ICLR 2024).

These files have no category. Their instructions nearly always open with a verb (`Write`, `Explain`,
`Classify`), so the opening word stands in for one: the frequent words are labels, the rest `other`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import CorpusSpec, keep_frequent_labels
from fedguild.data.corpora.table import read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render


def opening_word(instruction: str) -> str:
    """Returns the first word of an instruction in lower case; empty where there is none."""
    match = re.search(r"[^\W\d_]+", instruction)
    return match.group().lower() if match else ""


def _examples(source: Source, template: str) -> Iterator[Example]:
    columns = {"instruction": ("instruction",), "output": ("output", "response")}
    for _, row in read_table(source).select(columns, {"input": ("input", "context")}):
        instruction = text(row["instruction"])
        prompt = render(template, instruction, text(row["input"]))
        yield Example(prompt, text(row["output"]), label=opening_word(instruction), task="alpaca")


def read(source: Source, template: str, *, top_labels: int = 10) -> list[Example]:
    """Returns the instructions of one split; label is the opening word, or `other`."""
    return keep_frequent_labels(_examples(source, template), top_labels, source.training)


SPEC = CorpusSpec(
    kind="generate",
    layouts=("JSON list or JSON lines with instruction, input, output",),
    template="alpaca",
    hub=HubDataset("mlabonne/alpagasus"),
    read=read,
    options={"top_labels": "how many opening words become labels (10); the rest become 'other'"},
)
