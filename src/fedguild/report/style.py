"""Common style of all figures, and their rendering as SVG for a page.

Methods take the colours of Okabe and Ito (2008), which colour-blind readers can tell apart. Budgets are ordered, so
they take one scale from dark to light. Text stays text: it follows the page's font and can be selected and searched.
"""

from __future__ import annotations

import colorsys
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, Self

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from fedguild.core.files import write_bytes, write_text

FULL_WIDTH = 9.0
"""Inches; at 96 pixels each the width of the page's text block."""
NARROW_WIDTH = 3.7
"""Inches; the width of the text on a phone of 390 pixels."""
_CHARACTERS_PER_INCH = 14.5
"""Of the names below a figure, an inch of whose width belongs to the axis beside it."""
FIGURE_FORMATS: Final = (".svg", ".pdf", ".png")
DOTS_PER_INCH = 200
INK = "#1d2733"
MUTED = "#5c6773"
RULE = "#d5dbe1"
METHOD_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b4c9a", "#4d4d4d")
ON_LIGHT, ON_DARK = "#1c2632", "#fdfdfe"
"""Text on a field of `HEAT`, which a dark page leaves as it is, unlike the page's own colours."""
HEAT = LinearSegmentedColormap.from_list("heat", ["#f6f8fa", "#bcd4e6", "#5b9dc9", "#1b5e93", "#0a2a4a"])
_ORDERED = LinearSegmentedColormap.from_list("ordered", ["#12355b", "#1f77a4", "#3aa88f", "#c79a14"])
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,  # a $ is a dollar
}
_PAGE_FONT = "'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"


def trend_limits(values: Iterable[float], bounds: tuple[float, float] = (-math.inf, math.inf)) -> tuple[float, float]:
    """Returns the limits of an axis that shows how values differ: a little beyond the smallest and the largest.

    Bars start at zero instead, since they are read by their length.

    Args:
        values: The values drawn; non-finite ones are ignored.
        bounds: The smallest and largest possible value.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return (0.0, 1.0)
    low, high = min(finite), max(finite)
    room = 0.07 * (high - low) or 0.05 * abs(high) or 0.05
    return max(bounds[0], low - room), min(bounds[1], high + room)


def text_on(share: float) -> str:
    """Returns the colour of text on a field of `HEAT` at a share of its range, from 0 to 1."""
    return ON_DARK if share > 0.5 else ON_LIGHT


def wide_and_narrow(draw: Callable[[float], Svg]) -> Markup:
    """Returns a figure drawn for a wide page and for a phone; the page shows the one that fits.

    Args:
        draw: Returns the figure at a width in inches, under ids that depend on it (`key_at`).
    """
    wide, narrow = draw(FULL_WIDTH), draw(NARROW_WIDTH)
    return Markup('<div class="on-wide">{}</div><div class="on-narrow">{}</div>').format(wide, narrow)


def key_at(key: str, width: float) -> str:
    return key if width == FULL_WIDTH else f"{key}-narrow"


_PAGE_COLOURS = {INK: "--ink", MUTED: "--muted", RULE: "--rule", "#ffffff": "--paper", "#000000": "--ink"}


def following(page: str) -> str:
    """Adapts the figures' colours to the page, also on a dark one."""
    drawn = re.sub(r"<svg\b.*?</svg>", lambda svg: _DRAWN_IN.sub(_from_page, svg[0]), page, flags=re.DOTALL)
    known = sorted(set(re.findall(r"var\(--c-([0-9a-f]{6})\)", drawn)))
    light, dark = (" ".join(f"--c-{colour}: {of(colour)};" for colour in known) for of in ("#{}".format, _on_dark))
    rules = f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    return drawn.replace("</style>", f"{rules if known else ''}</style>", 1)


_DRAWN_IN = re.compile(r"((?:fill|stroke): ?)(#[0-9a-fA-F]{6})\b")


def _from_page(found: re.Match[str]) -> str:
    colour = found[2].lower()
    if colour in (ON_LIGHT, ON_DARK):
        return found[0]
    return f"{found[1]}var({_PAGE_COLOURS.get(colour, f'--c-{colour[1:]}')})"


def _on_dark(colour: str) -> str:
    """Returns a colour with the same contrast on a dark page as this one has on a light page."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*(int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)))
    lighter = min(max(1 - 0.8 * lightness, 0.58), 0.86)
    return to_hex(colorsys.hls_to_rgb(hue, lighter, saturation))


@contextmanager
def styled(key: str) -> Iterator[None]:
    """Draws everything inside the block in the house style; `key` makes the SVG's ids repeatable."""
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": key}):
        yield


def ordered_colours(number: int) -> list[str]:
    """Returns colours for `number` ordered things, from dark (large) to light (small)."""
    return [to_hex(_ORDERED(place / max(number - 1, 1))) for place in range(number)]


def method_colours(number: int) -> list[str]:
    """Returns colours for `number` methods; beyond eight they repeat."""
    return [METHOD_COLOURS[place % len(METHOD_COLOURS)] for place in range(number)]


def gridlines(axes: Axes, axis: Literal["x", "y", "both"] = "y") -> None:
    """Draws faint lines behind the data along one axis."""
    axes.grid(axis=axis, color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def scale_beside(figure: Figure, axes: Axes, image: AxesImage, width: float, **options: Any) -> Colorbar:
    """Draws the colour scale of a heat map next to it, or below it in a narrow figure."""
    if width == FULL_WIDTH:
        bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=14, **options)
    else:
        bar = figure.colorbar(image, ax=axes, location="bottom", aspect=30, **options)
    bar.outline.set_visible(False)
    return bar


def tilt_if_long(axes: Axes, width: float, degrees: float = 40.0) -> bool:
    """Tilts the names below a figure if neighbours would touch; upright in a narrow figure.

    Args:
        axes: The figure's axes, with their ticks set.
        width: The figure's width in inches.
        degrees: The angle on a wide page.

    Returns:
        Whether they were tilted.
    """
    labels = axes.get_xticklabels()
    lengths = [len(label.get_text()) for label in labels]
    longest = max(((one + next) / 2 for one, next in pairwise(lengths)), default=0) + 1.5
    if longest * len(labels) <= _CHARACTERS_PER_INCH * (width - 1):
        return False
    for label in labels:
        if width < FULL_WIDTH:
            label.set(rotation=90)
        else:
            label.set(rotation=degrees, ha="right", rotation_mode="anchor")
    return True


def spread_apart(places: Sequence[float], gap: float) -> list[float]:
    """Moves the places apart by at least `gap`, by as little as an upward sweep allows."""
    moved = list(places)
    order = sorted(range(len(places)), key=lambda index: places[index])
    for below, above in pairwise(order):
        moved[above] = max(moved[above], moved[below] + gap)
    shift = sum(moved) - sum(places)
    return [place - shift / len(places) for place in moved] if places else []


class Svg(str):
    """An `<svg>` element, safe to place in a page as matplotlib has escaped its text, and the figure that it shows.

    Args:
        text: The element.
        figure: The figure, drawn within `styled(key)`.
        key: The key.
    """

    _figure: Figure
    _key: str

    def __new__(cls, text: str, figure: Figure, key: str) -> Self:
        made = super().__new__(cls, text)
        made._figure, made._key = figure, key
        return made

    def __html__(self) -> Markup:
        return Markup(str(self))

    def save(self, path: Path) -> None:
        """Writes the figure in the format of the path's suffix, one of `FIGURE_FORMATS`.

        Raises:
            FedGuildError: the file cannot be written.
        """
        if path.suffix == ".svg":
            return write_text(path, f"{self}\n")
        buffer = io.BytesIO()
        with styled(self._key):
            self._figure.savefig(buffer, format=path.suffix[1:], dpi=DOTS_PER_INCH)
        return write_bytes(path, buffer.getvalue())


def to_svg(figure: Figure, key: str, description: str) -> Svg:
    """Returns the figure as an `<svg>` element to place inside a page.

    Args:
        figure: A figure drawn within `styled(key)`.
        key: Prefix of every id, so that several figures share a page.
        description: Text alternative for readers who cannot see the figure; becomes the accessible name.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{key}-", text)
    text = re.sub(r"'DejaVu Sans'(?:, [^;\"]*)?", _PAGE_FONT, text)
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])  # type: ignore[index]
    label = html.escape(description, quote=True)
    opening = f'<svg class="figure" role="img" aria-label="{label}" style="width: {width * 96 / 72:.0f}px"'
    head, rest = text.split(">", 1)
    attributes = re.sub(r'\s(?:width|height)="[^"]*"', "", head.removeprefix("<svg"))
    return Svg(f"{opening}{attributes}>{rest}", figure, key)
