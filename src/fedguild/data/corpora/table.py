"""Tables of records, read through `datasets` from a local file or from the hub.

Local files are streamed through a temporary cache: nothing is left on disk, and no network is
needed. Datasets of the hub use the ordinary Hugging Face cache.
"""

from __future__ import annotations

import csv
import glob
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedguild.core.errors import DataError, first_line
from fedguild.core.hub import reach_hub
from fedguild.data.corpora.source import (
    TABLE_SUFFIXES,
    HubDataset,
    Source,
    first_split,
    require_split_paths,
)

Row = dict[str, Any]
Headerless = Callable[[list[str]], tuple[str, ...] | None]


@dataclass(frozen=True, slots=True)
class Table:
    """Records with named columns.

    Attributes:
        where: The file or hub dataset, for messages.
        columns: Names of the columns found.
        rows: The records; may be read several times.
    """

    where: str
    columns: tuple[str, ...]
    rows: Iterable[Row]

    def select(
        self, required: Mapping[str, tuple[str, ...]], optional: Mapping[str, tuple[str, ...]] | None = None
    ) -> Iterator[tuple[int, Row]]:
        """Yields (row number from 1, record) with the columns under their canonical names.

        Args:
            required: Canonical name -> the names that a layout may give it, first match wins.
            optional: The same for columns that may be absent; they then hold None.

        Raises:
            DataError: a required column is missing; lists the columns found and expected.
        """
        names = {key: self._find(aliases) for key, aliases in {**required, **(optional or {})}.items()}
        missing = [key for key in required if names[key] is None]
        if missing:
            expected = ", ".join(" or ".join(dict.fromkeys(aliases)) for aliases in required.values())
            raise DataError(
                f"{self.where} lacks a column for: {', '.join(missing)}.",
                f"Found: {', '.join(self.columns) or 'no columns'}. Expected: {expected}.",
            )
        for number, row in enumerate(self.rows, start=1):
            yield number, {key: None if name is None else row.get(name) for key, name in names.items()}

    def _find(self, aliases: tuple[str, ...]) -> str | None:
        return next((name for name in aliases if name in self.columns), None)

    def bad_row(self, number: int, found: str, accepted: str) -> DataError:
        """Returns the error for a record whose content is not acceptable."""
        return DataError(f"Row {number} of {self.where} has {found}.", f"Accepted: {accepted}.")

    def index(self, number: int, value: Any, choices: int) -> int:
        """Returns `value` as an index below `choices`, or raises the row's error."""
        try:
            index = int(value)
        except (TypeError, ValueError):
            index = -1
        if not 0 <= index < choices:
            shown = "no label" if value in ("", None, -1, "-1") else f"the label {value!r}"
            raise self.bad_row(
                number, shown, f"a label from 0 to {choices - 1} (published test splits often have none)"
            )
        return index


def text(value: Any) -> str:
    """Returns a cell as text without surrounding whitespace; empty for a missing one."""
    return "" if value is None else str(value).strip()


def read_table(source: Source, headerless: Headerless | None = None) -> Table:
    """Reads a source that is a file, a folder with one file per split, or a hub dataset.

    Args:
        headerless: For CSV: given the first line's cells, returns the column names where that
            line is already data.

    Raises:
        DataError: the source cannot be read; says which and how to fix it.
    """
    if isinstance(source.where, HubDataset):
        return _read_hub(source.where, source.splits)
    if source.folder is not None:
        return read_file(require_split_paths(source.folder, source.splits)[0], headerless)
    return read_file(source.where, headerless)


def read_file(path: Path, headerless: Headerless | None = None) -> Table:
    """Reads one local JSON, JSON-lines, CSV, TSV or Parquet file; `headerless` as in `read_table`."""
    if path.suffix not in TABLE_SUFFIXES:
        raise DataError(f"{path} is not a table.", f"Accepted file types: {', '.join(TABLE_SUFFIXES)}.")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty.")
    if path.suffix != ".parquet":
        require_text(path)
    if path.suffix in (".csv", ".tsv"):
        rows = _stream("csv", path, **_csv_options(path, headerless))
    else:
        rows = _stream("parquet" if path.suffix == ".parquet" else "json", path)
    if not rows:
        raise DataError(f"{path} holds no records.")
    return Table(str(path), tuple(dict.fromkeys(key for row in rows for key in row)), rows)


def _stream(kind: str, path: Path, **options: Any) -> list[Row]:
    from datasets import IterableDataset

    read = {"csv": IterableDataset.from_csv, "json": IterableDataset.from_json, "parquet": IterableDataset.from_parquet}
    with tempfile.TemporaryDirectory() as cache:
        try:
            return list(read[kind](glob.escape(str(path.resolve())), cache_dir=cache, **options))
        except Exception as error:  # every reader behind `datasets` raises its own errors
            fault = _json_fault(path) if kind == "json" else ""
            raise DataError(f"{path} cannot be read as {kind}: {fault or error}") from error


def require_text(path: Path) -> None:
    """Raises unless a file is UTF-8 text.

    Raises:
        DataError: it is not; the message has the line, the byte and possible encodings.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                guess = (
                    "UTF-16" if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff") else "Windows-1252 or Latin-1"
                )
                raise DataError(
                    f"{path}, line {number}: the byte 0x{line[error.start]:02x} at position {error.start + 1} is not "
                    "UTF-8.",
                    f"Data files are read as UTF-8; this one may be {guess}. Save it again as UTF-8.",
                ) from error


def _json_fault(path: Path) -> str:
    """Returns the line of a JSON file's first error, and what is wrong; empty if it is well-formed.

    The readers behind `datasets` count lines from the start of a block of the file, so their numbers mislead.
    """
    content = path.read_text("utf-8-sig")
    try:
        json.loads(content)
        return ""
    except json.JSONDecodeError as error:
        whole = error
    by_line = path.suffix == ".jsonl" or whole.msg == "Extra data"
    for number, line in enumerate(content.split("\n") if by_line else (), start=1):
        try:
            if line.strip() and not isinstance(json.loads(line), dict):
                return f"line {number}: a row must be a JSON object, but this is {line.strip()!r:.60}."
        except json.JSONDecodeError as error:
            return f"line {number}, column {error.colno}: {error.msg}."
    if by_line:
        return ""
    return f"line {whole.lineno}, column {whole.colno}: {whole.msg}."


def _csv_options(path: Path, headerless: Headerless | None) -> dict[str, Any]:
    """Returns options that keep every cell as the text it is (`None`, `007`, `1.50`)."""
    from datasets import Features, Value

    separator = "\t" if path.suffix == ".tsv" else ","
    with open(path, encoding="utf-8-sig", newline="") as file:
        first = next(csv.reader(file, delimiter=separator), [])
    names = headerless(first) if headerless else None
    features = Features({name: Value("string") for name in names or first})
    options = {"sep": separator, "features": features, "keep_default_na": False}
    return {**options, "header": None, "column_names": list(names)} if names else options


def _read_hub(hub: HubDataset, splits: tuple[str, ...]) -> Table:
    from datasets import load_dataset

    reach_hub()
    available = [hub.split] if hub.split else hub_splits(hub)
    split = hub.split or first_split(splits, available)
    if split is None:
        raise DataError(
            f"The dataset {hub} has no split named {' or '.join(splits)}; it has: {', '.join(available)}.",
            f"Name the split, for example {hub}@{available[0] if available else 'train'}.",
        )
    try:
        dataset = load_dataset(hub.name, hub.config or None, split=split, revision=hub.revision or None)
    except Exception as error:  # the network, the hub and every file format raise their own errors
        raise _unreachable(hub, error) from error
    return Table(f"{hub}", tuple(dataset.column_names), dataset)


def hub_splits(hub: HubDataset) -> list[str]:
    """Returns the names of a hub dataset's splits.

    Raises:
        DataError: the hub cannot be reached or does not have the dataset.
    """
    from datasets import get_dataset_split_names

    reach_hub()
    try:
        return list(get_dataset_split_names(hub.name, hub.config or None, revision=hub.revision or None))
    except Exception as error:  # the network, the hub and every file format raise their own errors
        raise _unreachable(hub, error) from error


def _unreachable(hub: HubDataset, error: Exception) -> DataError:
    return DataError(
        f"The dataset {hub} cannot be read from the Hugging Face hub: {first_line(error)}",
        "If there is no network, give local files instead: the train and test settings take a path. "
        f"If you meant a local path, {hub.name} does not exist here.",
    )
