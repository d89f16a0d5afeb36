"""Your own data: conversations, instructions, preference pairs or plain text, recognised by their columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fedguild.data.conversation import Tally, examples_of
from fedguild.data.corpora.source import Source
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.corpora.table import TextForm, read_table
from fedguild.data.example import Example
from fedguild.data.layouts import recognise
from fedguild.data.prompts import render


def read(
    source: Source,
    template: str,
    *,
    messages_column: str | None = None,
    instruction_column: str | None = None,
    input_column: str | None = None,
    response_column: str | None = None,
    system_column: str | None = None,
    history_column: str | None = None,
    text_column: str | None = None,
    tools_column: str | None = None,
    label_column: str | None = None,
    task_column: str | None = None,
    document_column: str | None = None,
    choices_column: str | None = None,
    chosen_column: str | None = None,
    rejected_column: str | None = None,
    separator: str | None = None,
    quote: str | None = None,
    encoding: str | None = None,
) -> Iterator[Example]:
    """Yields the records of one split.

    Args:
        source: A local file or folder, several files, or a dataset on the hub. Other arguments are those of the
            corpus's options: None looks for the usual names of a column, and an empty name leaves the column out.

    Raises:
        DataError: the columns fit no layout, or a cell is not what its column must hold.
    """
    named = {
        "messages": messages_column,
        "instruction": instruction_column,
        "input": input_column,
        "response": response_column,
        "system": system_column,
        "history": history_column,
        "text": text_column,
        "tools": tools_column,
        "label": label_column,
        "task": task_column,
        "document": document_column,
        "choices": choices_column,
        "chosen": chosen_column,
        "rejected": rejected_column,
    }
    table = read_table(source, form=TextForm(separator, quote, encoding))
    layout = recognise(table, {key: name for key, name in named.items() if name is not None})
    tally = source.tally or Tally()
    tally.layout = f"{table.where}: {layout}"
    yield from examples_of(table, layout, tally, partial(render, template))


SPEC = CorpusSpec(
    kind="mixed",
    layouts=(
        "JSON lines, JSON, CSV, TSV, Parquet, Arrow or Excel; columns by their usual names or as the options say",
    ),
    template="alpaca",
    read=read,
    options={
        "messages_column": "column of a conversation (messages, conversations, dialogue, ...)",
        "instruction_column": "column of the instruction (instruction, prompt, question or query)",
        "input_column": "column of the input (input or context, may be absent; empty for none)",
        "response_column": "column of the response (response, output, completion or answer)",
        "system_column": "column of a system message (system or system_prompt, may be absent; empty for none)",
        "history_column": "column of earlier pairs of question and answer (history, may be absent; empty for none)",
        "text_column": "column of plain text (text)",
        "tools_column": "column of the tools that the assistant may call (tools or functions, may be absent)",
        "label_column": "column of the label that Dirichlet draws over (label or category, else the task)",
        "task_column": "column of the task that scores are grouped by (task, may be absent)",
        "document_column": "column of the document that a by-document partition keeps whole (document)",
        "choices_column": "column with the list of candidate responses (choices, may be absent)",
        "chosen_column": "column of the preferred answer of a pair (chosen; empty for none)",
        "rejected_column": "column of the answer that it was preferred to (rejected; empty for none)",
        "separator": "separator of a CSV file's cells (found in the file)",
        "quote": "quotation mark of a CSV file's cells (a double one; empty for none)",
        "encoding": "encoding of a CSV or JSON file (UTF-8 or UTF-16, found in the file)",
    },
)
