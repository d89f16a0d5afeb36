"""TeleQuAD: questions about 3GPP documents, answered by a span (Holm 2021), in SQuAD's format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedguild.core.errors import DataError
from fedguild.data.corpora.document import read_document
from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.corpora.table import read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render


def _articles(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yields (name, paragraphs) of every document, named by its id, else its title, else its position."""
    for number, article in enumerate(read_document(path, ("data",))["data"]):
        name = text(article.get("docid")) or text(article.get("title")) or f"document {number}"
        if "paragraphs" not in article:
            raise DataError(
                f"The document '{name}' of {path} has no paragraphs.",
                f"Found: {', '.join(article)}. Expected SQuAD's format: data[].paragraphs[].qas[].",
            )
        yield name, article["paragraphs"]


def _from_file(path: Path, template: str, impossible: bool) -> Iterator[Example]:
    for document, paragraphs in _articles(path):
        for paragraph in paragraphs:
            missing = {"context", "qas"} - paragraph.keys()
            if missing:
                raise DataError(
                    f"A paragraph of '{document}' in {path} lacks {', '.join(sorted(missing))}.",
                    f"Found: {', '.join(paragraph)}. Expected: context, qas.",
                )
            for qa in paragraph["qas"]:
                if qa.get("is_impossible") and not impossible:
                    yield _example(template, "", "", [], document)  # without a response: dropped, and counted
                    continue
                answers = [text(answer["text"]) for answer in qa.get("answers", [])]
                yield _example(template, text(qa["question"]), text(paragraph["context"]), answers, document)


def _from_hub(source: Source, template: str) -> Iterator[Example]:
    columns = {"context": ("context",), "question": ("question",), "answers": ("answers",)}
    for _, row in read_table(source).select(columns, {"title": ("docid", "title")}, nested=("answers",)):
        answers = [text(answer) for answer in row["answers"]["text"]]
        yield _example(template, text(row["question"]), text(row["context"]), answers, text(row["title"]))


def _example(template: str, question: str, context: str, answers: list[str], document: str) -> Example:
    prompt = render(template, question, context)
    return Example(prompt, answers[0] if answers else "", label=document, task="telequad", document=document)


def read(source: Source, template: str, *, impossible: bool = False) -> Iterator[Example]:
    """Yields the questions of one split; label and document are the document, so both partitions apply.

    Args:
        impossible: Keep questions that are marked impossible but have an answer nevertheless.

    Raises:
        DataError: the file is not in SQuAD's format; names the key that is missing.
    """
    if isinstance(source.where, HubDataset):
        return _from_hub(source, template)
    path = source.path
    return _from_file(path, template, impossible)


SPEC = CorpusSpec(
    kind="generate",
    layouts=(
        "a JSON object in SQuAD's format: data[].paragraphs[].qas[]",
        "a SQuAD dataset of the hub with context, question, answers and title",
    ),
    template="telequad",
    read=read,
    options={"impossible": "keep questions marked impossible that have an answer nevertheless (false)"},
)
