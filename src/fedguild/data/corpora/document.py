"""Nested JSON documents that are not tables, such as a task or a collection of articles."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedguild.core.errors import DataError
from fedguild.data.corpora.table import read_text


def read_document(path: Path, keys: Iterable[str]) -> dict[str, Any]:
    """Reads a file that holds one JSON object with at least `keys`.

    Raises:
        DataError: the file is not a JSON object or lacks a key; lists the keys found and expected.
    """
    try:
        document = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise DataError(f"{path} cannot be read as JSON: {where}: {error.msg}.") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    expected = ", ".join(keys)
    if not isinstance(document, dict):
        raise DataError(
            f"{path} holds a JSON {type(document).__name__}.",
            f"Expected one object{' with ' * bool(expected)}{expected}.",
        )
    missing = [key for key in keys if key not in document]
    if missing:
        present = ", ".join(map(str, document)) or "no keys"
        raise DataError(f"{path} lacks: {', '.join(missing)}.", f"Found: {present}. Expected: {expected}.")
    return document
