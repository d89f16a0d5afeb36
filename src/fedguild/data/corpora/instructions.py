"""Any table of instructions: your own data, under the column names it has."""

from __future__ import annotations

from collections.abc import Iterator

from fedguild.data.corpora.source import Source
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.corpora.table import Row, Table, read_table, text
from fedguild.data.example import Example
from fedguild.data.prompts import render

REQUIRED = {
    "instruction": ("instruction", "prompt", "question"),
    "response": ("response", "output", "completion", "answer"),
}
OPTIONAL = {
    "input": ("input", "context"),
    "label": ("label", "category"),
    "task": ("task",),
    "document": ("document",),
    "choices": ("choices",),
}


def _aliases(known: dict[str, tuple[str, ...]], columns: dict[str, str]) -> dict[str, tuple[str, ...]]:
    return {key: (columns[key],) if key in columns else names for key, names in known.items()}


def _choices(table: Table, number: int, row: Row) -> tuple[tuple[str, ...], int | None]:
    if not row["choices"]:
        return (), None
    response = text(row["response"])
    choices = tuple(text(choice) for choice in row["choices"]) if isinstance(row["choices"], list) else ()
    if response not in choices:
        raise table.bad_row(number, f"the choices {row['choices']!r}", f"a list that holds the response {response!r}")
    return choices, choices.index(response)


def read(
    source: Source,
    template: str,
    *,
    instruction_column: str | None = None,
    input_column: str | None = None,
    response_column: str | None = None,
    label_column: str | None = None,
    task_column: str | None = None,
    document_column: str | None = None,
    choices_column: str | None = None,
) -> Iterator[Example]:
    """Yields the records of one split.

    Args:
        source: A local file or folder, or a dataset on the hub.
        instruction_column: Column of the instruction; None looks for instruction, prompt, question.
        input_column: Column of the input; None looks for input, context; may be absent; empty for none.
        response_column: Column of the response; None looks for response, output, completion, answer.
        label_column: Column of the label; None looks for label, category; else it is the task.
        task_column: Column of the task; None looks for task; else it is `instructions`.
        document_column: Column of the document; None looks for document; may be absent.
        choices_column: Column with the list of candidate responses; None looks for choices.

    Raises:
        DataError: a named or required column is missing, or a response is not among its choices.
    """
    named = {
        "instruction": instruction_column,
        "input": input_column,
        "response": response_column,
        "label": label_column,
        "task": task_column,
        "document": document_column,
        "choices": choices_column,
    }
    columns = {key: name for key, name in named.items() if name}
    known = _aliases({**REQUIRED, **OPTIONAL}, columns)
    known |= {key: () for key, name in named.items() if name == ""}
    required = {key: names for key, names in known.items() if key in REQUIRED or key in columns}
    optional = {key: names for key, names in known.items() if key not in required}
    table = read_table(source)
    for number, row in table.select(required, optional):
        choices, answer = _choices(table, number, row)
        task = text(row["task"]) or "instructions"
        yield Example(
            prompt=render(template, text(row["instruction"]), text(row["input"])),
            response=text(row["response"]),
            label=text(row["label"]) or task,
            task=task,
            choices=choices,
            answer=answer,
            document=text(row["document"]),
        )


SPEC = CorpusSpec(
    kind="mixed",
    layouts=("JSON lines, JSON list, CSV, TSV or Parquet; columns by their usual names or as the options say",),
    template="alpaca",
    read=read,
    options={
        "instruction_column": "column of the instruction (instruction, prompt or question)",
        "input_column": "column of the input (input or context, may be absent; empty for none)",
        "response_column": "column of the response (response, output, completion or answer)",
        "label_column": "column of the label that Dirichlet draws over (label or category, else the task)",
        "task_column": "column of the task that scores are grouped by (task, may be absent)",
        "document_column": "column of the document that a by-document partition keeps whole (document)",
        "choices_column": "column with the list of candidate responses (choices, may be absent)",
    },
)
