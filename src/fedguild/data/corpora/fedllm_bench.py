"""FedLLM-Bench: instructions by the users who wrote them (R. Ye et al., NeurIPS 2024, arXiv 2406.04845).

One JSON object for all clients, as its authors publish it: client -> list of records with instruction and response.
The client is the label and the document of its records, so that `data.partition.scheme=label` with as many clients as
the file has gives each client its own records.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedguild.core.errors import DataError
from fedguild.data.corpora.document import read_document
from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.corpora.table import text
from fedguild.data.example import Example
from fedguild.data.prompts import render


def read(source: Source, template: str) -> Iterator[Example]:
    """Yields the records of all clients; label, task and document are the client."""
    if isinstance(source.where, HubDataset):
        raise DataError(
            f"FedLLM-Bench is no dataset of the hub, but {source.where} looks like one.",
            "Download its data (github.com/rui-ye/FedLLM-Bench) and give one of the files, for example "
            "data.train=data/Fed-Aya/aya_38c_25k.json.",
        )
    path = source.path
    for client, records in read_document(path, ()).items():
        if not isinstance(records, list):
            raise DataError(f"The client '{client}' of {path} has a {type(records).__name__}.", "Accepted: a list.")
        for number, record in enumerate(records, start=1):
            if not isinstance(record, dict) or "instruction" not in record or "response" not in record:
                found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise DataError(
                    f"Record {number} of the client '{client}' of {path} lacks an instruction or a response.",
                    f"Found: {found}. Multi-turn conversations and preferences are not read.",
                )
            prompt = render(template, text(record["instruction"]))
            yield Example(prompt, text(record["response"]), label=client, task=client, document=client)


SPEC = CorpusSpec(
    kind="generate",
    layouts=("a JSON object: client -> list of records with instruction and response",),
    template="alpaca",
    read=read,
)
