"""AG News: news articles in four classes (Zhang et al., NeurIPS 2015)."""

from __future__ import annotations

from collections.abc import Iterator

from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import CorpusSpec, choice_example
from fedguild.data.corpora.table import Table, read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render

CLASSES = ("World", "Sports", "Business", "Sci/Tech")
INSTRUCTION = "Classify this news article: World, Sports, Business or Sci/Tech."


def _headerless(first: list[str]) -> tuple[str, ...] | None:
    original = len(first) == 3 and first[0] in ("1", "2", "3", "4")
    return ("class", "title", "description") if original else None


def _articles(table: Table) -> Iterator[tuple[str, int]]:
    """Yields (article, class index): the original file counts classes from 1, the hub's from 0."""
    if "class" in table.columns:
        original = {"class": ("class",), "title": ("title",), "description": ("description",)}
        for number, row in table.select(original):
            label = text(row["class"])
            if label not in ("1", "2", "3", "4"):
                raise table.bad_row(number, f"the class {label!r}", "1 to 4")
            yield text(f"{row['title']} {row['description']}"), int(label) - 1
    else:
        for number, row in table.select({"text": ("text",), "label": ("label",)}):
            yield text(row["text"]), table.index(number, row["label"], len(CLASSES))


def read(source: Source, template: str) -> Iterator[Example]:
    """Yields the articles of one split; label and answer are the class."""
    for article, index in _articles(read_table(source, _headerless)):
        prompt = render(template, INSTRUCTION, article)
        yield choice_example(prompt, CLASSES, index, label=CLASSES[index], task="ag_news")


SPEC = CorpusSpec(
    kind="choice",
    layouts=("CSV without header: class 1-4, title, description", "CSV with the columns text, label 0-3"),
    hub=HubDataset("fancyzhx/ag_news"),
    read=read,
)
