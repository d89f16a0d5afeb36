"""Number formatting: three digits and a unit."""

from __future__ import annotations

import math

from fedguild.measuring.scores.statistics import Spread, interval

MISSING = "–"
_SI_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def si(value: float | None, unit: str = "") -> str:
    """Returns a value with three significant digits and an SI prefix, `1.24 GB`; `–` for None."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    size, step = float(f"{value:.3g}"), 0
    while abs(size) >= 1000 and step < len(_SI_PREFIXES) - 1:
        size, step = size / 1000, step + 1
    whole = step == 0 and size == int(size)
    digits = 0 if whole else max(0, 2 - math.floor(math.log10(abs(size))))
    return f"{size:.{digits}f} {_SI_PREFIXES[step]}{unit}".rstrip()


def byte_count(value: float | None) -> str:
    return si(value, "B")


def flops(value: float | None) -> str:
    return si(value, "FLOP")


def duration(seconds: float | None) -> str:
    """Returns a time: `0.42 s`, `7.3 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds is None:
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest:02d} min"


def score(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def score_over(value: float | None, deviation: float | None) -> str:
    """Returns `0.612 ± 0.130`, a mean with its deviation; the mean alone without one."""
    return score(value) if value is None or deviation is None else f"{score(value)} ± {deviation:.3f}"


def signed(value: float) -> str:
    """Returns a difference of scores with its sign, `+0.203`, and a true minus."""
    text = f"{value:+.3f}".replace("-", "\u2212")
    return "0.000" if text[1:] == "0.000" else text


def score_spread(spread: Spread | None) -> str:
    """Returns `0.612 ± 0.013`, a mean over seeds with its sample deviation; the mean alone for one seed."""
    if spread is None:
        return MISSING
    return (
        score(spread.mean) if spread.count < 2 or math.isnan(spread.std) else f"{score(spread.mean)} ± {spread.std:.3f}"
    )


def difference(spread: Spread | None) -> str:
    """Returns `+0.013 [−0.002, +0.028]`, a mean difference with its 95 % interval; the mean alone if there is none."""
    if spread is None:
        return MISSING
    if spread.count < 2 or math.isnan(spread.std):
        return signed(spread.mean)
    low, high = interval(spread)
    return f"{signed(spread.mean)} [{signed(low)}, {signed(high)}]"


def ratio(numerator: float, denominator: float) -> str:
    """Returns how many times as large one number is, `4.8` or `12`; `–` for a zero denominator."""
    if not denominator:
        return MISSING
    times = numerator / denominator
    return f"{times:.0f}" if times >= 10 else f"{times:.1f}"


def count(number: int) -> str:
    return f"{number:,}".replace(",", "\u2009")


def count_of(number: int, singular: str) -> str:
    """Returns `1 client`, `8 clients`."""
    return f"{count(number)} {singular}{'' if number == 1 else 's'}"
