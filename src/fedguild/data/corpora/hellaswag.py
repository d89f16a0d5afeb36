"""HellaSwag: the correct one of four endings of a text (Zellers et al., ACL 2019)."""

from __future__ import annotations

from collections.abc import Iterator

from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import OTHER, CorpusSpec, choice_example, keep_frequent_labels
from fedguild.data.corpora.table import read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render

INSTRUCTION = "Which ending continues the text best?"


def _examples(source: Source, template: str) -> Iterator[Example]:
    table = read_table(source)
    required = {"ctx": ("ctx",), "endings": ("endings",), "label": ("label",)}
    for number, row in table.select(required, {"activity": ("activity_label",)}, ("endings",)):
        endings = row["endings"]
        if not isinstance(endings, list) or len(endings) < 2:
            raise table.bad_row(number, f"the endings {endings!r}", "a list of at least two texts")
        prompt = render(template, INSTRUCTION, text(row["ctx"]))
        index = table.index(number, row["label"], len(endings))
        activity = text(row["activity"]) or OTHER
        yield choice_example(prompt, [text(ending) for ending in endings], index, label=activity, task="hellaswag")


def read(source: Source, template: str, *, top_labels: int = 20) -> list[Example]:
    """Returns the texts of one split; choices are the endings, label is the activity or `other`."""
    return keep_frequent_labels(_examples(source, template), top_labels, source.training)


SPEC = CorpusSpec(
    kind="choice",
    layouts=("JSON lines with ctx, endings, label, and activity_label where present",),
    hub=HubDataset("Rowan/hellaswag"),
    read=read,
    options={"top_labels": "how many activities become labels (20); the rest become 'other'"},
    test_splits=("validation", "valid", "val", "dev", "test"),
)
