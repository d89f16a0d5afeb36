"""Text for a terminal and a log: lists cut short, and a peer's text made harmless."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

LONGEST = 1000
"""Characters of a peer's text that are shown."""
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move the cursor, change the direction of writing, or cannot be encoded."""


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def without_colour(text: str) -> str:
    """Returns a program's output without the escape sequences that colour it on a terminal."""
    return _COLOUR.sub("", text)


def few(names: Sequence[str], most: int = 3) -> str:
    """Returns the first names and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def is_plain(text: str) -> bool:
    return not any(unicodedata.category(character) in _HIDDEN for character in text)


def without_control(text: str) -> str:
    """Returns lines of text with a space in place of each character that could move a terminal's cursor within them."""
    return "".join(character if character == "\n" or is_plain(character) else " " for character in text)


def printable(text: str, longest: int = LONGEST) -> str:
    """Returns a peer's text on one line, without control characters, cut to `longest` characters.

    The result cannot move a terminal's cursor, end a line or reverse the writing direction; its content is still
    untrusted.
    """
    shown = "".join(character if is_plain(character) else " " for character in text[:longest])
    return " ".join(shown.split()) + ("…" if len(text) > longest else "")
