"""Reading of tables: text files here, typed files and hub datasets through `datasets`.

JSON and CSV are read as they are written, because a typed reader changes them: 65 in a column with a fraction becomes
65.0, and a mapping gets the keys of all others. Nothing is left on disk and no network is needed for local data;
datasets of the hub use the ordinary Hugging Face cache.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import glob
import gzip
import io
import json
import lzma
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from fedguild.core.errors import ConfigError, DataError, first_line
from fedguild.core.hub import reach_hub
from fedguild.data.cells import Number, Row, Table, text, whole_floats, with_integers
from fedguild.data.corpora.source import (
    SUFFIXES,
    HubDataset,
    Source,
    first_split,
    kind_of,
    require_split_paths,
)

__all__ = ["Row", "Table", "TextForm", "hub_splits", "read_file", "read_table", "read_text", "text"]

Headerless = Callable[[list[str]], tuple[str, ...] | None]
SEPARATORS = (",", ";", "\t", "|")
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_OPENED: dict[str, Callable[[Any], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zip": lambda content: _unzipped(content),
    ".zst": lambda content: _unzstandard(content),
}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ROW_LISTS = ("data", "rows", "train", "examples", "records", "instances")
_LONGEST_CELL = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class TextForm:
    """How a CSV or JSON file is written; None for what is found in it.

    Attributes:
        separator: Between two cells.
        quote: Around a cell; empty for none.
        encoding: Name of the encoding.
    """

    separator: str | None = None
    quote: str | None = None
    encoding: str | None = None


def read_table(source: Source, headerless: Headerless | None = None, form: TextForm | None = None) -> Table:
    """Reads a source: files, a folder of any kind, or a hub dataset.

    Args:
        headerless: For CSV: given the first line's cells, returns the column names where that
            line is already data.

    Raises:
        DataError: the source cannot be read; says which and how to fix it.
        ConfigError: a folder's README names files elsewhere.
    """
    where = source.where
    if isinstance(where, HubDataset):
        return _read_hub(where, source.splits)
    if isinstance(where, tuple):
        return _joined([read_file(path, headerless, form) for path in where])
    if source.folder is None:
        return read_file(where, headerless, form)
    return _read_folder(source.folder, source.splits, headerless, form)


def is_dataset(folder: Path) -> bool:
    """Whether a folder is one of `save_to_disk`, or its README has the configurations of a hub dataset."""
    return _is_saved(folder) or _has_configs(folder)


def folder_splits(folder: Path) -> list[str]:
    """Returns the splits of such a folder."""
    if not _is_saved(folder):
        return hub_splits(HubDataset(str(folder)))
    listed = folder / "dataset_dict.json"
    return list(json.loads(listed.read_text("utf-8"))["splits"]) if listed.is_file() else []


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _has_configs(folder: Path) -> bool:
    readme = folder / "README.md"
    return readme.is_file() and re.search(r"^configs:", readme.read_text("utf-8", errors="replace"), re.M) is not None


def _read_folder(folder: Path, splits: tuple[str, ...], headerless: Headerless | None, form: TextForm | None) -> Table:
    """Reads a split of a folder: of `save_to_disk`, with a file for each split, or laid out like a hub dataset."""
    if _is_saved(folder):
        from datasets import DatasetDict, load_from_disk

        saved = load_from_disk(str(folder))
        if not isinstance(saved, DatasetDict):
            return _typed(saved, str(folder))
        split = first_split(splits, list(saved))
        if split is None:
            raise DataError(
                f"The folder {folder} has no split named {' or '.join(splits)}; it has: {', '.join(saved)}.",
                "Give the folder of one split instead.",
            )
        return _typed(saved[split], f"{folder}@{split}")
    if _has_configs(folder):
        return _read_hub(HubDataset(str(folder)), splits)
    return read_file(require_split_paths(folder, splits)[0], headerless, form)


def read_file(path: Path, headerless: Headerless | None = None, form: TextForm | None = None) -> Table:
    """Reads one local file; the arguments are those of `read_table`."""
    kind, form = kind_of(path), form or TextForm()
    if kind is None:
        raise DataError(f"{path} is not a table.", f"Accepted file types: {', '.join(SUFFIXES)}, also compressed.")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty.")
    if kind in ("json", "csv"):
        content = read_text(path, form.encoding)
        rows = list(_json_rows(path, content) if kind == "json" else _csv_rows(path, content, headerless, form))
        if kind == "json" and _SURROGATE.search(content):
            _require_unicode(path, rows)
    else:
        rows = _excel_rows(path) if kind == "excel" else _streamed(kind, path)
        rows = list(with_integers(rows, whole_floats(rows, _columns(rows))))
    if not rows:
        raise DataError(f"{path} holds no records.")
    return Table(str(path), _columns(rows), rows, typed=kind not in ("json", "csv", "excel"))


def _require_unicode(path: Path, rows: Iterable[Row]) -> None:
    r"""Raises DataError if a row has one half of a character that JSON spells in two, such as `"\ud83d"`."""
    for number, row in enumerate(rows, start=1):
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):x}"
            raise DataError(
                f"Row {number} of {path} has {half}, half of a character, so its text is not Unicode.",
                "The text was cut or damaged before it was written: mend or leave out the row.",
            ) from error


def _columns(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for row in rows for key in row))


def _joined(tables: list[Table]) -> Table:
    columns = tuple(dict.fromkeys(name for table in tables for name in table.columns))
    where = ", ".join(table.where for table in tables[:3]) + (", ..." if len(tables) > 3 else "")
    rows = [row for table in tables for row in table.rows]
    return Table(where, columns, rows, typed=any(table.typed for table in tables))


def read_text(path: Path, encoding: str | None = None) -> str:
    """Returns a file's text, decompressed.

    Raises:
        DataError: it is not text in its encoding; the message has the line, the byte and possible encodings.
    """
    content = path.read_bytes()
    opened = _OPENED.get(path.suffix.lower())
    if opened is not None:
        try:
            content = opened(content)
        except ImportError as error:
            raise DataError(
                f"{path} is compressed by Zstandard, and the package to read it is missing: {first_line(error)}",
                "Install it: pip install zstandard.",
            ) from error
        except (OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile, ValueError) as error:
            raise DataError(f"{path} cannot be decompressed: {first_line(error)}") from error
    found = encoding or next((name for mark, name in _BOMS if content.startswith(mark)), "utf-8")
    try:
        return content.decode(found)
    except LookupError as error:
        raise DataError(f"There is no encoding '{found}'.", "Accepted: utf-8, windows-1252, latin-1, ...") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        at = error.start - content.rfind(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: the byte 0x{content[error.start]:02x} at position {at} is not {found.upper()}.",
            "Data files are read as UTF-8; this one may be Windows-1252 or Latin-1. Save it again as UTF-8, or set "
            "data.options.encoding=windows-1252.",
        ) from error


def _unzstandard(content: bytes) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True) as stream:
            return bytes(stream.read())
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _unzipped(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            raise ValueError(f"the archive has {len(names)} files, not one")
        return archive.read(names[0])


def _json_rows(path: Path, content: str) -> Iterator[Row]:
    """Yields the rows of JSON lines, of a list, of an object that holds one, or of pandas' orientations."""
    where = f"{path} cannot be read as json: "
    try:
        whole = _parsed(content)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data" and kind_of(path, lines=True) != "lines":
            raise DataError(f"{where}line {error.lineno}, column {error.colno}: {error.msg}.") from error
        yield from _json_lines(where, content)
        return
    except ValueError as error:
        raise DataError(f"{where}{error}.") from error
    is_row = kind_of(path, lines=True) == "lines" and isinstance(whole, dict)
    rows = [whole] if is_row else _rows_of(whole)
    if rows is None:
        keys = ", ".join(list(whole)[:8]) if isinstance(whole, dict) else type(whole).__name__
        raise DataError(
            f"{path} holds no list of records; it holds: {keys}.",
            "Accepted: JSON lines, a list of objects, an object with one such list ({'data': [...]}), or what "
            "pandas' to_json writes.",
        )
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{where}row {number} must be a JSON object, but this is {row!r:.60}.")
        yield row


def _json_lines(where: str, content: str) -> Iterator[Row]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = _parsed(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}line {number}, column {error.colno}: {error.msg}.") from error
        except ValueError as error:
            raise DataError(f"{where}line {number}: {error}.") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}line {number}: a row must be a JSON object, but this is {line.strip()!r:.60}.")
        yield row


def _parsed(content: str) -> Any:
    return json.loads(
        content, parse_int=Number, parse_float=Number, parse_constant=_constant, object_pairs_hook=_object
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"an object has a key twice: {', '.join(key for key, _ in pairs)}")
    return found


def _constant(name: str) -> None:
    if name != "NaN":
        raise ValueError(f"{name} is not a number")


def _rows_of(whole: Any) -> Iterable[Any] | None:
    """Returns the rows of a JSON document; None if it has none."""
    if isinstance(whole, list):
        return whole
    if not isinstance(whole, dict) or not whole:
        return None
    columns, data = whole.get("columns"), whole.get("data")
    if isinstance(columns, list) and isinstance(data, list):  # split
        return [dict(zip(columns, row, strict=False)) if isinstance(row, list) else row for row in data]
    values = list(whole.values())
    lists = [key for key in _ROW_LISTS if isinstance(whole.get(key), list)]
    if lists and all(isinstance(row, dict) for row in whole[lists[0]]):
        return list(whole[lists[0]])
    if all(isinstance(one, dict) for one in values):  # pandas' columns or index
        by_column = all(key.lstrip("-").isdigit() for key in values[0])
        if not by_column:
            return values
        return [{name: cells.get(index) for name, cells in whole.items()} for index in values[0]]
    if all(isinstance(one, list) for one in values) and len({len(one) for one in values}) == 1:
        if any(isinstance(cell, dict) for cell in values[0]):
            return None
        return [dict(zip(whole, cells, strict=True)) for cells in zip(*values, strict=True)]
    return [whole] if not any(isinstance(one, dict) for one in values) else None


def _csv_rows(path: Path, content: str, headerless: Headerless | None, form: TextForm) -> Iterator[Row]:
    """Yields the rows of a CSV file, every cell as the text it is (`None`, `007`, `1.50`)."""
    csv.field_size_limit(_LONGEST_CELL)
    separator = form.separator or _separator(path, content, form)
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True, **_quoting(form))
    names: list[str] = []
    number = 0
    try:
        for cells in reader:
            if not cells:
                continue
            if not names:
                given = headerless(cells) if headerless else None
                names = list(given or cells)
                if given is None:
                    _require_distinct(path, names)
                    continue
            number += 1
            if len(cells) > len(names):
                raise DataError(
                    f"Row {number} of {path} (line {reader.line_num}) has {len(cells)} cells, but there are "
                    f"{len(names)} columns: {', '.join(names)}.",
                    f"The separator is {separator!r}, and a cell that holds it must be quoted. Set "
                    "data.options.separator or data.options.quote if it is another.",
                )
            yield dict(zip(names, [*cells, *[None] * (len(names) - len(cells))], strict=True))
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}, cannot be read as csv: {error}.",
            "A quotation mark within a quoted cell is written twice. Set data.options.quote= (nothing) if cells are "
            "not quoted.",
        ) from error


def _quoting(form: TextForm) -> dict[str, Any]:
    return {"quoting": csv.QUOTE_NONE} if form.quote == "" else {"quotechar": form.quote or '"'}


def _require_distinct(path: Path, names: list[str]) -> None:
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise DataError(f"{path} has two columns named {twice[0]!r}.", f"Found: {', '.join(names)}.")


def _separator(path: Path, content: str, form: TextForm) -> str:
    """Returns the separator with which most of the first lines have as many cells as the header, at least two."""
    usual = "\t" if ".tsv" in path.name.lower() else ","

    def fitting(separator: str) -> tuple[float, int, bool]:
        reader = csv.reader(io.StringIO(content, newline=""), delimiter=separator, **_quoting(form))
        lines = [len(cells) for cells, _ in zip((row for row in reader if row), range(20), strict=False)]
        same = sum(count == lines[0] for count in lines) / len(lines) if lines and lines[0] > 1 else 0.0
        return same, lines[0] if lines else 0, separator == usual

    if fitting(usual)[0] > 0.99:
        return usual
    return max(SEPARATORS, key=fitting)


def _streamed(kind: str, path: Path) -> list[Row]:
    from datasets import load_dataset

    with tempfile.TemporaryDirectory() as cache:
        try:
            file = glob.escape(str(path.resolve()))
            return list(load_dataset(kind, data_files=[file], split="train", streaming=True, cache_dir=cache))
        except Exception as error:  # every reader behind `datasets` raises its own errors
            raise DataError(f"{path} cannot be read as {kind}: {first_line(error)}") from error


def _excel_rows(path: Path) -> list[Row]:
    import pandas

    try:
        frame = pandas.read_excel(path, dtype=object, keep_default_na=False, na_values=[""])
    except ImportError as error:
        raise DataError(
            f"{path} is a spreadsheet, and a package to read it is missing: {first_line(error)}",
            "For .xlsx: pip install 'fedguild[excel]'. Or save the sheet as CSV.",
        ) from error
    except Exception as error:  # every reader behind pandas raises its own errors
        raise DataError(f"{path} cannot be read as a spreadsheet: {first_line(error)}") from error
    missing = frame.isna()
    for name in frame.columns:  # a spreadsheet has no dates, only times at midnight
        if all(isinstance(cell, datetime) and cell.time() == time() for cell in frame[name][~missing[name]]):
            frame[name] = [cell.date() if isinstance(cell, datetime) else cell for cell in frame[name]]
    return [
        {str(name): None if absent else cell for name, cell, absent in zip(frame.columns, row, gaps, strict=True)}
        for row, gaps in zip(frame.itertuples(index=False), missing.itertuples(index=False), strict=True)
    ]


def _typed(dataset: Any, where: str) -> Table:
    """Returns a dataset as a table, integers that became floats as integers."""
    floats = [name for name, kind in dataset.features.items() if str(getattr(kind, "dtype", "")).startswith("float")]
    whole = whole_floats(dataset.select_columns(floats), floats) if floats else set()
    rows = list(with_integers(dataset, whole)) if whole else dataset
    return Table(where, tuple(dataset.column_names), rows, typed=True)


def _read_hub(hub: HubDataset, splits: tuple[str, ...]) -> Table:
    from datasets import load_dataset

    _prepare(hub)
    available = [hub.split] if hub.split else hub_splits(hub)
    split = hub.split or first_split(splits, available)
    if split is None:
        raise DataError(
            f"The dataset {hub} has no split named {' or '.join(splits)}; it has: {', '.join(available)}.",
            f"Name the split, for example {replace(hub, split=available[0] if available else 'train')}.",
        )
    try:
        if hub.is_local:
            with tempfile.TemporaryDirectory() as cache:
                found = load_dataset(hub.name, hub.config or None, split=split, cache_dir=cache, keep_in_memory=True)
                return _typed(found, f"{hub}")
        dataset = load_dataset(hub.name, hub.config or None, split=split, revision=hub.revision or None)
    except Exception as error:  # the network, the hub and every file format raise their own errors
        raise _unreachable(hub, error) from error
    return _typed(dataset, f"{hub}")


def hub_splits(hub: HubDataset) -> list[str]:
    """Returns the names of a dataset's splits.

    Raises:
        DataError: the hub cannot be reached or does not have the dataset.
        ConfigError: a folder's README names files elsewhere.
    """
    from datasets import get_dataset_split_names

    _prepare(hub)
    try:
        return list(get_dataset_split_names(hub.name, hub.config or None, revision=hub.revision or None))
    except Exception as error:  # the network, the hub and every file format raise their own errors
        raise _unreachable(hub, error) from error


def _prepare(hub: HubDataset) -> None:
    """Reaches the hub for a dataset on it; of a folder checks that its configurations name files in the folder alone.

    Raises:
        DataError: they cannot be read.
        ConfigError: they name others, which may be private.
    """
    if not hub.is_local:
        reach_hub()
        return
    try:
        named = _named_paths(Path(hub.name))
    except Exception as error:  # YAML and its readers raise their own errors
        raise _unreachable(hub, error) from error
    for path in named:
        parts = re.split(r"[/\\]", path)
        if urlparse(path).scheme or "::" in path or parts[0] in ("", "~") or ".." in parts:
            raise ConfigError(
                f"The data folder {hub.name} names {path} as its data, which is not in the folder.",
                "A README (configs: data_files, data_dir) takes relative paths within its folder. Name files elsewhere "
                "yourself, as data.train or data.test.",
            )


def _named_paths(folder: Path) -> list[str]:
    """Returns the paths and patterns that a folder's configurations name, in the files that `datasets` looks into."""
    import yaml
    from huggingface_hub import DatasetCard

    card, settings = folder / "README.md", folder / ".huggingface.yaml"
    found = [DatasetCard.load(card).data.to_dict()] if card.is_file() else []
    found += [yaml.safe_load(settings.read_text("utf-8")) or {}] if settings.is_file() else []
    configs = [config for each in found for config in each.get("configs") or ()]
    return [path for config in configs for key in ("data_files", "data_dir") for path in _texts(config.get(key))]


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts within lists and the values of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _unreachable(hub: HubDataset, error: Exception) -> DataError:
    if hub.is_local:
        return DataError(
            f"The folder {hub} cannot be read as a dataset: {first_line(error)}",
            "Give the file itself, or name it like the split (train.jsonl, test.jsonl). A configuration is named as "
            f"{hub.name}:NAME.",
        )
    return DataError(
        f"The dataset {hub} cannot be read from the Hugging Face hub: {first_line(error)}",
        "If there is no network, give local files instead: the train and test settings take a path. "
        f"If you meant a local path, {hub.name} does not exist here.",
    )
