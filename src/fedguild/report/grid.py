"""A printable table: a header, rows of text, and the same cells for a terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text

from fedguild.core.text import without_control
from fedguild.report import units


@dataclass(frozen=True)
class Cell:
    """One entry of a grid.

    Attributes:
        text: The text; a terminal breaks it where it has line breaks.
        note: A second, smaller line, on an HTML page only.
        strong: Whether it is emphasised, for example as the best of its column.
    """

    text: str
    note: str = ""
    strong: bool = False

    @property
    def line(self) -> str:
        """The text on one line."""
        return self.text.replace("\n", " ")


@dataclass(frozen=True)
class Grid:
    """A table of text. The first column is left-aligned, all others right-aligned.

    Attributes:
        title: What the table shows, with the units.
        header: Column names; a cell's note explains the column.
        rows: The body; every row is as long as the header.
        rules_before: Indices of rows with a rule above them.
    """

    title: str
    header: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    rules_before: frozenset[int] = frozenset()

    def leading(self, *titles: str) -> Grid:
        """Returns the table with the columns of these titles or notes next to the first, where a phone shows them."""
        header = list(enumerate(self.header))
        places = [place for title in titles for place, cell in header if title in (cell.text, cell.note)]
        order = list(dict.fromkeys([0, *places, *range(len(self.header))]))
        rows = tuple(tuple(row[place] for place in order) for row in self.rows)
        return replace(self, header=tuple(self.header[place] for place in order), rows=rows)

    def to_rich(self) -> Table:
        """Returns the table for a terminal; it reads the same without colour; cells fold where it is too wide."""
        table = Table(
            title=Text(without_control(self.title)),
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for index, cell in enumerate(self.header):
            lines = [*cell.text.split(), *cell.note.split(", ")]
            name = without_control("\n".join(lines).strip())
            table.add_column(Text(name), justify="left" if index == 0 else "right", overflow="fold")
        for number, row in enumerate(self.rows):
            if number in self.rules_before:
                table.add_section()
            table.add_row(*(Text(without_control(cell.text), style="bold" if cell.strong else "") for cell in row))
        return table

    def to_markdown(self) -> str:
        header = self._explained
        body = [[f"**{cell.line}**" if cell.strong else cell.line for cell in row] for row in self.rows]
        rule = [":---", *["---:"] * (len(header) - 1)]
        lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in [header, rule, *body]]
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n"

    @property
    def _explained(self) -> list[str]:
        return [f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in self.header]

    def to_latex(self) -> str:
        """Returns a table with the rules of the package booktabs."""
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{self.title.translate(_LATEX)}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}", r"\toprule"]
        lines += [" & ".join(title.translate(_LATEX) for title in self._explained) + r" \\", r"\midrule"]
        for number, row in enumerate(self.rows):
            lines += [r"\midrule"] if number in self.rules_before else []
            lines.append(" & ".join(map(_latex, row)) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\u00b1": r"$\pm$",
        "\u2212": "$-$",
        "\u2013": "--",
        "\u00d7": r"$\times$",
        "\u2009": r"\,",
        "\u00a0": "~",
    }
)


def _latex(cell: Cell) -> str:
    text = cell.line.translate(_LATEX)
    return rf"\textbf{{{text}}}" if cell.strong else text


MOST_VALUES = 3000
"""Tables of a figure's values with more are left out: a page with them would not open."""


def curves_grid(
    curves: Mapping[str, Sequence[tuple[int, float]]], title: str, printed: Callable[[float], str] = units.score
) -> Grid | None:
    """Returns round × line, the values of a line chart."""
    frame = pandas.DataFrame({name: dict(curve) for name, curve in curves.items()}).sort_index()
    texts = frame.map(lambda value: units.MISSING if pandas.isna(value) else printed(value))
    return values_grid(title, "Round", [str(number) for number in frame.index], list(frame), texts.to_numpy().tolist())


def counts_grid(
    counts: NDArray[Any], rows: Sequence[str], columns: Sequence[str], title: str, digits: int = 0
) -> Grid | None:
    """Returns clients × labels or experts, the values of a bubble chart or a heat map."""
    texts = [[f"{value:.{digits}f}" for value in row] for row in counts.tolist()]
    return values_grid(title, "Client", rows, columns, texts)


def values_grid(
    title: str, corner: str, rows: Sequence[str], columns: Sequence[str], texts: Sequence[Sequence[str]]
) -> Grid | None:
    """Returns a figure's values as a table, for readers who cannot see it; None if there are none, or too many."""
    if not 0 < len(rows) * len(columns) <= MOST_VALUES:
        return None
    body = tuple((Cell(name), *map(Cell, row)) for name, row in zip(rows, texts, strict=True))
    return Grid(title, (Cell(corner), *map(Cell, columns)), body)
