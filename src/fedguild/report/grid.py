"""A printable table: a header, rows of text, and the same cells for a terminal, Markdown and HTML."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Cell:
    """One entry of a grid.

    Attributes:
        text: The content.
        note: A second, smaller line, on a page only; a terminal and Markdown leave it out.
        strong: Whether it stands out, for example as the best of its column.
    """

    text: str
    note: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Grid:
    """A table of text. The first column is left-aligned, all others right-aligned.

    Attributes:
        title: What the table shows, with the units.
        header: Column names; a cell's note says what the column stands for.
        rows: The body; every row is as long as the header.
        rules_before: Indices of rows with a rule above them.
    """

    title: str
    header: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    rules_before: frozenset[int] = frozenset()

    def to_rich(self) -> Table:
        """Returns the table for a terminal; it reads the same without colour."""
        table = Table(title=self.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for index, cell in enumerate(self.header):
            lines = [*cell.text.split(), *cell.note.split(", ")]
            table.add_column(Text("\n".join(lines).strip()), justify="left" if index == 0 else "right", no_wrap=True)
        for number, row in enumerate(self.rows):
            if number in self.rules_before:
                table.add_section()
            table.add_row(*(Text(cell.text, style="bold" if cell.strong else "") for cell in row))
        return table

    def to_markdown(self) -> str:
        """Returns the table as GitHub-flavoured Markdown, ending with a newline."""
        header = [f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in self.header]
        body = [[f"**{cell.text}**" if cell.strong else cell.text for cell in row] for row in self.rows]
        rule = [":---", *["---:"] * (len(header) - 1)]
        lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in [header, rule, *body]]
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n"
