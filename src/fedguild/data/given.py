"""Data given in Python, kept as JSON lines in the run's folder so that the run can be resumed without it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedguild.config.data import GIVEN
from fedguild.core.errors import DataError
from fedguild.core.files import write_bytes, write_json
from fedguild.data.cells import verbatim, whole_floats, with_integers, without_fill
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.example import Example
from fedguild.data.partition import PartitionScheme, Parts, as_parts

FOLDER = "data"
ASSIGNMENT = "assignment.json"


@dataclass(frozen=True)
class GivenData:
    """The objects behind a config's `given:` settings.

    Attributes:
        files: Name of a file below the run's `data` -> its content.
        partition: The scheme, if it was given.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    partition: PartitionScheme | None = None

    def write(self, run_folder: Path) -> None:
        for name, content in self.files.items():
            write_bytes(run_folder / FOLDER / name, content)


def rows_of(dataset: Any) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of a dataset by split, `train` and maybe `test`.

    Args:
        dataset: A `datasets.Dataset` or `DatasetDict`, a pandas frame, a list of mappings, or a mapping of splits to
            any of these.

    Raises:
        DataError: it is none of these, or has no training rows.
    """
    if isinstance(dataset, Mapping):
        splits = {str(name): _rows(part) for name, part in dataset.items()}
        names = CorpusSpec(kind="mixed", read=lambda *_: ()).test_splits
        test = next((name for name in names if name in splits), None)
        if "train" not in splits:
            raise DataError(
                f"The dataset has no split named train; it has: {', '.join(splits) or 'none'}.",
                "Name the split to train on train, and the one to test on test.",
            )
        return {"train": splits["train"], **({"test": splits[test]} if test else {})}
    return {"train": _rows(dataset)}


def as_file(rows: Iterable[Mapping[str, Any]]) -> tuple[str, bytes]:
    """Returns a file name, the SHA-256 of the content, and the rows as JSON lines."""
    try:
        content = "".join(f"{json.dumps(dict(row), ensure_ascii=False, default=_spelled)}\n" for row in rows).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"A row has text that is not Unicode: {error}.", "Decode it with errors='replace'.") from error
    return f"{hashlib.sha256(content).hexdigest()}.jsonl", content


def source(setting: str | list[str] | None, run_folder: Path | None) -> str | list[str] | None:
    """Resolves a setting of the data's source: itself, or the file with data given in Python.

    Raises:
        DataError: the file is missing, or not what was given.
    """
    if not isinstance(setting, str) or not setting.startswith(GIVEN):
        return setting
    name = f"{setting.removeprefix(GIVEN)}.jsonl"
    path = None if run_folder is None else run_folder / FOLDER / name
    if path is None or not path.is_file():
        raise DataError(
            f"The data of this config was given in Python, and {path or name} does not exist.",
            "Give the dataset to fedguild.run again, or set data.train to a file.",
        )
    if hashlib.sha256(path.read_bytes()).hexdigest() != path.stem:
        raise DataError(f"{path} is not what was given: its checksum differs.")
    return str(path)


def given_parts(
    examples: Sequence[Example],
    clients: int,
    rng: np.random.Generator,
    scheme: PartitionScheme | None,
    run_folder: Path | None,
) -> Parts:
    """Returns the partition given in Python, and keeps it in the run's folder.

    Args:
        scheme: The scheme; None to read what the folder keeps.
        run_folder: The folder of the run; None to keep nothing.

    Raises:
        DataError: the partition does not fit the examples and clients, or there is none.
    """
    path = None if run_folder is None else run_folder / FOLDER / ASSIGNMENT
    if scheme is None and path is not None and path.is_file():
        try:
            return as_parts(json.loads(path.read_text("utf-8")), len(examples), clients, what=f"in {path}")
        except ValueError as error:
            raise DataError(f"{path} is damaged.", "Give the partition to fedguild.run again.") from error
    if scheme is None:
        raise DataError(
            f"The partition of this config was given in Python, and {path or ASSIGNMENT} does not exist.",
            "Give the partition to fedguild.run again, or set data.partition.scheme.",
        )
    parts = as_parts(scheme(examples, clients, rng), len(examples), clients)
    if path is not None:
        write_json(path, parts)
    return parts


def _rows(part: Any) -> list[dict[str, Any]]:
    is_frame = hasattr(part, "iloc")
    is_typed = not is_frame and hasattr(part, "features")
    rows = part.astype(object).where(part.notna(), None).to_dict("records") if is_frame else part
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise DataError(
            f"A dataset cannot be a {type(part).__name__}.",
            "Accepted: a datasets.Dataset or DatasetDict, a pandas frame, a list of mappings, or a path.",
        )
    listed = list(rows)
    wrong = next((row for row in listed if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise DataError(f"A row of the dataset is a {type(wrong).__name__}, not a mapping of columns to values.")
    if not listed:
        raise DataError("The dataset has no rows.")
    cells = [
        {str(key): _cell(without_fill(value) if is_typed else value) for key, value in row.items()} for row in listed
    ]
    return list(with_integers(cells, whole_floats(cells, dict.fromkeys(key for row in cells for key in row))))


def _spelled(value: Any) -> Any:
    """Returns an object as JSON holds it: a date as its text, and what is no text as an object, which no text is."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    try:
        return verbatim(value)
    except TypeError:
        return {"python": type(value).__name__}


def _cell(value: Any) -> Any:
    """Returns a value as JSON holds it; a missing value of pandas is None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and math.isnan(value):
        return None
    return value
