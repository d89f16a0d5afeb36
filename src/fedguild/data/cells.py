"""Tables of records, and what a cell may hold."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedguild.core.errors import DataError

Row = dict[str, Any]
_ACCEPTED = "text, a number, true or false, a date, or nothing"


class Number(str):
    """A number, as it is written."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Records with named columns.

    Attributes:
        where: The file or hub dataset, for messages.
        columns: Names of the columns found.
        rows: The records; may be read several times.
        typed: Whether every mapping in a cell has the keys of all rows' mappings there, as in Parquet.
    """

    where: str
    columns: tuple[str, ...]
    rows: Iterable[Row]
    typed: bool = False

    def select(
        self,
        required: Mapping[str, tuple[str, ...]],
        optional: Mapping[str, tuple[str, ...]] | None = None,
        nested: Iterable[str] = (),
    ) -> Iterator[tuple[int, Row]]:
        """Yields (row number from 1, record) with the columns under their canonical names.

        Args:
            required: Canonical name -> the names that a layout may give it, in any case; first match wins.
            optional: The same for columns that may be absent; they then hold None.
            nested: Canonical names of columns that may hold lists and mappings. The cells of all others are text, or
                None where there is nothing.

        Raises:
            DataError: a required column is missing, or a cell is not text; lists what was found and expected.
        """
        names = {key: self.find(aliases) for key, aliases in {**required, **(optional or {})}.items()}
        missing = [key for key in required if names[key] is None]
        if missing:
            expected = ", ".join(" or ".join(dict.fromkeys(aliases)) for aliases in required.values())
            raise DataError(
                f"{self.where} lacks a column for: {', '.join(missing)}.",
                f"Found: {', '.join(self.columns) or 'no columns'}. Expected: {expected}.",
            )
        whole = set(nested)
        for number, row in enumerate(self.rows, start=1):
            cells = {key: None if name is None else row.get(name) for key, name in names.items()}
            for key, value in cells.items():
                if not (value is None or isinstance(value, str) or key in whole):
                    cells[key] = self._text(number, str(names[key]), value)
            yield number, cells

    def _text(self, number: int, column: str, value: Any) -> str | None:
        try:
            said = verbatim(value)
        except TypeError:
            raise self.bad_cell(number, column, f"a {type(value).__name__} ({str(value)[:60]})", _ACCEPTED) from None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if _is_missing(value) else Number(said) if number else said

    def find(self, names: tuple[str, ...]) -> str | None:
        """Returns the first of some columns that the table has, in any case; None if it has none of them."""
        for name in names:
            if name in self.columns:
                return name
            folded = name.casefold()
            found = next((column for column in self.columns if column.strip().casefold() == folded), None)
            if found is not None:
                return found
        return None

    def first(self, columns: Mapping[str, str]) -> dict[str, Any]:
        """Returns the first cell of each column that holds anything; None where none does."""
        found: dict[str, Any] = dict.fromkeys(columns)
        left = set(columns)
        for row in self.rows:
            for key in [key for key in left if not _is_blank(row.get(columns[key]))]:
                found[key] = row[columns[key]]
                left.remove(key)
            if not left:
                break
        return found

    def bad_row(self, number: int, found: str, accepted: str) -> DataError:
        """Returns the error for a record whose content is not acceptable."""
        return DataError(f"Row {number} of {self.where} has {found}.", f"Accepted: {accepted}.")

    def bad_cell(self, number: int, column: str, found: str, accepted: str) -> DataError:
        """Returns the error for a cell whose content is not acceptable."""
        return DataError(f"Row {number} of {self.where}, column {column}: {found}.", f"Accepted: {accepted}.")

    def index(self, number: int, value: Any, choices: int) -> int:
        """Returns `value` as an index below `choices`, or raises the row's error."""
        said = "" if _is_missing(value) else verbatim(value).strip()
        index = int(float(said)) if re.fullmatch(r"[+-]?\d+(\.0*)?", said) else -1
        if not 0 <= index < choices:
            shown = "no label" if said in ("", "-1") else f"the label {value!r}"
            raise self.bad_row(
                number, shown, f"a label from 0 to {choices - 1} (published test splits often have none)"
            )
        return index


def text(value: Any) -> str:
    """Returns a cell as text without surrounding whitespace; empty for a missing one.

    Raises:
        DataError: it is a list, a mapping or another object.
    """
    try:
        return verbatim(value).strip()
    except TypeError:
        raise DataError(
            f"The data has a {type(value).__name__} ({str(value)[:60]}) where text is expected.",
            f"Accepted: {_ACCEPTED}.",
        ) from None


def verbatim(value: Any) -> str:
    """Returns a cell as text: numbers in digits, true or false, dates as in ISO 8601; empty for a missing one.

    Raises:
        TypeError: it is infinite, a list, a mapping or another object.
    """
    if isinstance(value, str):
        return str(value)
    if _is_missing(value):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    raise TypeError(value)


def plain(value: Any) -> Any:
    """Returns a nested value with the numbers of a JSON file as numbers."""
    if isinstance(value, Number):
        return int(value) if re.fullmatch(r"-?\d+", value) else float(value)
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def without_fill(value: Any) -> Any:
    """Returns a cell of a typed table without the keys that hold nothing, below the mappings of the cell's own list.

    Arguments of a tool call, for example, lose those that only other rows' calls have; a message keeps its keys.
    """
    if isinstance(value, list):
        return [without_fill(one) for one in value]
    return {key: _filled(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def whole_floats(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> set[str]:
    """Returns the columns of floats that are all whole: integers that a missing cell made floats."""
    found: set[str] = set()
    fractional: set[str] = set()
    wanted = list(columns)
    for row in rows:
        for name in wanted:
            value = row.get(name)
            if isinstance(value, float) and not math.isnan(value):
                (found if value.is_integer() else fractional).add(name)
    return found - fractional


def with_integers(rows: Iterable[Mapping[str, Any]], columns: set[str]) -> Iterator[Row]:
    """Yields rows with the floats of some columns as the integers that they are."""
    for row in rows:
        yield {
            key: int(value) if key in columns and isinstance(value, float) and value.is_integer() else value
            for key, value in row.items()
        }


def _filled(value: Any) -> Any:
    if isinstance(value, list):
        return [_filled(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _filled(one) for key, one in value.items() if one is not None}
    return value


def _is_blank(value: Any) -> bool:
    return _is_missing(value) or value == [] or (isinstance(value, str) and value.strip() in ("", "[]"))


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
