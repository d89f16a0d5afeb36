"""Tables of several methods as papers print them: rows, columns, and a preset for every cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import Field, ValidationError, model_validator

from fedguild.config.base import Section
from fedguild.config.composing import find_preset, first_sentence, unknown_preset
from fedguild.config.explaining import Layer, explained
from fedguild.config.loading import TABLES_FOLDER, load_config
from fedguild.config.schema import Config
from fedguild.config.yaml_reading import parse
from fedguild.core.errors import ConfigError, nearest
from fedguild.core.score_names import Score

ONLY_COLUMN = "all"
"""The column of a table that has no others."""


class TableEntry(Section):
    """A row or a column: its part of the preset's name, and its settings."""

    preset: str | None = Field(
        default=None, description="Its part of the preset's name; null: the name of the row or column."
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="Settings on top of the preset's.")


class TableRow(TableEntry):
    """A row, which may set its own score."""

    score: Score | None = Field(default=None, description="The score that the table shows for it; null: the table's.")


class Claim(Section):
    """A claim of the paper that the table can decide: one row scores higher than others."""

    says: str = Field(description="The claim, in a few words.")
    higher: str = Field(description="The row that scores higher.")
    lower: tuple[str, ...] = Field(min_length=1, description="The rows that it scores higher than.")
    score: str | None = Field(default=None, description="A budget's name or a score; null: the table's score.")
    over: str | None = Field(default=None, description="The score of the lower rows; null: that of the higher one.")
    columns: tuple[str, ...] = Field(default=(), description="Where it is claimed; all columns where empty.")


MOST_LINES = 8
"""Lines of a figure, over all its panels, that have a colour of their own."""


class TableFigure(Section):
    """A figure of a table's scores: panels of lines over the values of one axis.

    A point is a cell, written `row @ column`, or `row` in a table without columns; `{x}` stands for the axis's value.
    """

    x: str = Field(description="What the horizontal axis has.")
    values: tuple[str, ...] = Field(min_length=2, description="Its values, evenly spaced in this order.")
    panels: dict[str, dict[str, str | dict[str, str]]] = Field(
        min_length=1, description="Title of a panel -> line -> its cells, as one pattern or by value."
    )
    scores: dict[str, str] = Field(
        default_factory=dict,
        description="Value -> the score that is drawn at it, a budget's name or a score; else the table's.",
    )
    nats: bool = Field(
        default=False, description="Whether it draws a budget's loss in nats per token, which has to be recorded."
    )
    minus: dict[str, str | dict[str, str]] = Field(
        default_factory=dict,
        description="Title of each panel -> cells whose score is taken from its lines', seed by seed; none: scores.",
    )

    @model_validator(mode="after")
    def _knows_its_values(self) -> Self:
        if unknown := [value for value in self.scores if value not in self.values]:
            raise ValueError(f"the figure has a score for {', '.join(unknown)}, no value of its axis")
        if self.minus and self.minus.keys() != self.panels.keys():
            odd = sorted(self.minus.keys() ^ self.panels.keys())
            raise ValueError(
                f"the figure takes scores from some panels alone; give 'minus' for each ({', '.join(odd)})"
            )
        lines = {line for panel in self.panels.values() for line in panel}
        if len(lines) > MOST_LINES:
            raise ValueError(f"the figure has {len(lines)} lines; with more than {MOST_LINES} colours would repeat")
        return self

    def cells(self, panel: str, line: str) -> list[tuple[str, str]]:
        """Returns the row and column of a line's point at every value.

        Raises:
            ValueError: the line has no cell for a value.
        """
        return self._places(self.panels[panel][line], f"line '{line}'")

    def subtracted(self, panel: str) -> list[tuple[str, str]]:
        """Returns the row and column subtracted from a panel's lines, at every value; empty for plain scores.

        Raises:
            ValueError: there is no cell for a value.
        """
        return self._places(self.minus[panel], f"minus of '{panel}'") if panel in self.minus else []

    def _places(self, given: str | dict[str, str], what: str) -> list[tuple[str, str]]:
        written = {value: given if isinstance(given, str) else given.get(value, "") for value in self.values}
        if missing := [value for value, cell in written.items() if not cell]:
            raise ValueError(f"the figure's {what} has no cell for {', '.join(missing)}")
        parts = [cell.replace("{x}", value).partition("@") for value, cell in written.items()]
        return [(row.strip(), column.strip() or ONLY_COLUMN) for row, _, column in parts]


ROUNDS = "rounds"
"""The end of the file's name of the figure over the rounds."""


class RoundsFigure(Section):
    """A figure of what a method reported, over the rounds: panels of lines, each of a cell."""

    figure: str = Field(description="The method's figure: `figure`, or `figure / column`.")
    label: str = Field(default="", description="What the vertical axis says; empty: the figure's name.")
    panels: dict[str, dict[str, str]] = Field(
        min_length=1, description="Title of a panel -> line -> its cell, `row @ column`, or `row` without columns."
    )

    def cell(self, panel: str, line: str) -> tuple[str, str]:
        row, _, column = self.panels[panel][line].partition("@")
        return row.strip(), column.strip() or ONLY_COLUMN


class Table(Section):
    """A table of several methods under several conditions.

    The settings of a row override its preset's; those of a column override both.
    """

    preset: str = Field(description="The preset of a cell; `{row}` and `{column}` stand for their parts of its name.")
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1, description="The seeds of every cell.")
    score: Score = Field(
        default="mean",
        description="The score that the table shows if it has several columns, or rows that set their own score.",
    )
    reference: str = Field(description="The row that the others are compared with.")
    rows: dict[str, TableRow] = Field(min_length=1, description="The methods and variants, in their order.")
    columns: dict[str, TableEntry] = Field(
        default_factory=lambda: {ONLY_COLUMN: TableEntry()}, min_length=1, description="The conditions, in their order."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of every cell, which override all others."
    )

    claims: tuple[Claim, ...] = Field(default=(), description="Claims of the paper that the table can decide.")
    shows: tuple[str, ...] = Field(
        default=(),
        description="Figures of the method to show with the score of recorded runs: `figure`, or `figure / column`.",
    )
    figure: TableFigure | None = Field(
        default=None, description="A figure of the scores, of a comparison's runs and of recorded ones; null: none."
    )
    figures: dict[str, TableFigure] = Field(
        default_factory=dict, description="Further figures of the scores, each by the end of its file's name."
    )
    rounds: RoundsFigure | None = Field(
        default=None, description="A figure of the method's own figure over the rounds; null: none."
    )

    @property
    def drawn_scores(self) -> dict[str, TableFigure]:
        """The figures of the scores by file name suffix; that of the first is empty."""
        return {**({"": self.figure} if self.figure is not None else {}), **self.figures}

    @model_validator(mode="after")
    def _knows_what_is_claimed(self) -> Self:
        for claim in self.claims:
            unknown = [row for row in (claim.higher, *claim.lower) if row not in self.rows]
            unknown += [column for column in claim.columns if column not in self.columns]
            if unknown:
                raise ValueError(f"the claim '{claim.says}' names {', '.join(unknown)}, no row or column of the table")
        return self

    @model_validator(mode="after")
    def _names_its_figures(self) -> Self:
        if ROUNDS in self.figures:
            raise ValueError(f"a figure of the scores cannot be called {ROUNDS}, as the one over the rounds is")
        return self

    @model_validator(mode="after")
    def _knows_what_is_drawn(self) -> Self:
        drawn: list[tuple[str, tuple[str, str]]] = []
        for figure in self.drawn_scores.values():
            drawn += [
                (f"line '{line}'", cell)
                for panel, lines in figure.panels.items()
                for line in lines
                for cell in figure.cells(panel, line)
            ]
            drawn += [(f"minus of '{panel}'", cell) for panel in figure.minus for cell in figure.subtracted(panel)]
        if self.rounds is not None:
            drawn += [
                (f"line '{line}'", self.rounds.cell(panel, line))
                for panel, lines in self.rounds.panels.items()
                for line in lines
            ]
        for what, (row, column) in drawn:
            unknown = [name for name, known in ((row, self.rows), (column, self.columns)) if name not in known]
            if unknown:
                raise ValueError(f"the figure's {what} names {unknown[0]}, no row or column of the table")
        return self

    @model_validator(mode="after")
    def _knows_its_reference(self) -> Self:
        if self.reference not in self.rows:
            raise ValueError(f"reference '{self.reference}' is not one of the rows {', '.join(self.rows)}")
        return self

    @property
    def scores(self) -> dict[str, Score]:
        """Row -> the score that the table shows for it."""
        return {name: row.score or self.score for name, row in self.rows.items()}


@dataclass(frozen=True)
class ShippedTable:
    """A built-in table.

    Attributes:
        name: Path below the tables folder without its ending, for example `ub-smoe/table-4`.
        description: First sentence of the comment at the top of the file.
    """

    name: str
    description: str
    path: Path

    def load(self) -> Table:
        settings = parse(self.path.read_text("utf-8"), str(self.path))
        try:
            return Table.model_validate(settings)
        except ValidationError as error:
            raise explained(error, [Layer(str(self.path), settings)], Table) from error


@dataclass(frozen=True)
class TableCell:
    """A method under a condition.

    Attributes:
        preset: The preset that it starts from.
        layers: The settings that override it.
    """

    row: str
    column: str
    preset: str
    layers: tuple[Layer, ...]

    def config(self, overrides: Sequence[str] = ()) -> Config:
        return load_config(self.preset, overrides, between=self.layers)


@cache
def tables() -> tuple[ShippedTable, ...]:
    """Returns all built-in tables, sorted by name."""
    return tuple(
        ShippedTable(
            name=path.relative_to(TABLES_FOLDER).with_suffix("").as_posix(),
            description=first_sentence(path.read_text("utf-8")),
            path=path,
        )
        for path in sorted(TABLES_FOLDER.rglob("*.yaml"))
    )


def table_cells(name: str, table: Table, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> list[TableCell]:
    """Returns the cells of a table, column by column.

    Args:
        name: The table's name, for messages.
        rows: The rows wanted; empty for all.
        columns: The columns wanted; empty for all.

    Raises:
        ConfigError: a wanted row or column, or a cell's preset, does not exist.
    """
    _require_known(name, "row", rows, table.rows)
    _require_known(name, "column", columns, table.columns)
    cells = []
    for column in columns or table.columns:
        for row in rows or table.rows:
            across, down = table.rows[row], table.columns[column]
            preset = table.preset.format(row=across.preset or row, column=down.preset or column)
            if find_preset(preset) is None:
                hint = unknown_preset(preset).hint
                raise ConfigError(f"{name}: there is no preset '{preset}' for {row}, {column}.", hint)
            layers = (
                Layer(f"{name}, row {row}", across.settings, file=Path(name)),
                Layer(f"{name}, column {column}", down.settings, file=Path(name)),
                Layer(name, {**table.settings, "name": row}, file=Path(name)),
            )
            cells.append(TableCell(row, column, preset, layers))
    return cells


def require_claimed_scores(name: str, table: Table) -> None:
    """Checks that the rows a claim compares have the score or budget that it is about.

    Raises:
        ConfigError: a claim names another score.
    """
    for claim in table.claims:
        if claim.score is None or claim.score in get_args(Score):
            continue
        for cell in table_cells(name, table, [claim.higher, *claim.lower], list(claim.columns or table.columns)):
            budgets = [tier.name for tier in cell.config().federation.budgets]
            if claim.score not in budgets:
                raise ConfigError(
                    f"{name}: '{claim.says}' is about the score '{claim.score}', which {cell.row} does not have.",
                    nearest(claim.score, [*budgets, *get_args(Score)]),
                )


def _require_known(table: str, kind: str, wanted: Sequence[str], known: Mapping[str, TableEntry]) -> None:
    for name in wanted:
        if name not in known:
            raise ConfigError(f"The table {table} has no {kind} '{name}'.", nearest(name, known))
