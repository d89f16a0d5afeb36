"""SNLI: entailment between a premise and a hypothesis (Bowman et al., EMNLP 2015)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import CorpusSpec, choice_example
from fedguild.data.corpora.table import read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render

CLASSES = ("entailment", "neutral", "contradiction")
ANSWERS = ("Yes", "Maybe", "No")
_NO_CONSENSUS = ("-", "-1", "")


def _prompt(template: str, premise: str, hypothesis: str) -> str:
    """Returns the paper's question, as it is or as the instruction of another template."""
    question = render("snli", premise, hypothesis)
    return question if template == "snli" else render(template, question.rstrip())


def _class_index(label: Any) -> int | None:
    if label in CLASSES:
        return CLASSES.index(label)
    return int(label) if str(label) in ("0", "1", "2") else None


def read(source: Source, template: str) -> Iterator[Example]:
    """Yields the pairs of one split; label is the class. Pairs without a consensus are dropped."""
    table = read_table(source)
    columns = {
        "premise": ("premise", "sentence1"),
        "hypothesis": ("hypothesis", "sentence2"),
        "label": ("gold_label", "label"),
    }
    for number, row in table.select(columns):
        if text(row["label"]) in _NO_CONSENSUS:
            yield Example("", "", label="", task="snli")  # without a response: dropped, and counted
            continue
        index = _class_index(row["label"])
        if index is None:
            raise table.bad_row(number, f"the label {row['label']!r}", f"{', '.join(CLASSES)}, 0 to 2, or - to skip")
        prompt = _prompt(template, text(row["premise"]), text(row["hypothesis"]))
        yield choice_example(prompt, ANSWERS, index, label=CLASSES[index], task="snli")


SPEC = CorpusSpec(
    kind="choice",
    layouts=(
        "JSON lines of SNLI 1.0, or only sentence1, sentence2, gold_label",
        "TSV with the header sentence1, sentence2, gold_label",
        "any table with premise, hypothesis, label 0-2",
    ),
    template="snli",
    hub=HubDataset("stanfordnlp/snli"),
    read=read,
)
