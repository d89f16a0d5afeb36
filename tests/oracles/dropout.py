"""Dropout's masks written out with Python's integers: SplitMix64 for the layer, for each token and for each feature."""

from __future__ import annotations

from collections.abc import Sequence

from fedguild.core.seeding import derive

WORD = 2**64
GAMMA = 0x9E3779B97F4A7C15


class SplitMix64:
    """The generator of Steele, Lea and Flood (2014), Figure 17."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def next(self) -> int:
        """Returns the next output, below 2^64."""
        self.state = (self.state + GAMMA) % WORD
        return mix64(self.state)


def mix64(value: int) -> int:
    """Returns the output function of a state."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB % WORD
    return value ^ value >> 31


def numbers(seed: int, layer: str, tokens: int, features: int) -> list[list[int]]:
    """Returns [tokens][features] numbers below 2^32 of one slot's real tokens."""
    of_layer = SplitMix64(mix64(seed ^ derive(0, "dropout", layer)))
    table = []
    for _ in range(tokens):
        of_token = SplitMix64(of_layer.next())
        words = [of_token.next() for _ in range((features + 1) // 2)]
        halves = [half for word in words for half in (word % 2**32, word // 2**32)]
        table.append(halves[:features])
    return table


def dropped(rows: Sequence[Sequence[float]], seed: int, layer: str, rate: float) -> list[list[float]]:
    """Returns a slot's rows with dropout: an element is kept if its number, read as signed, is at least the limit."""
    least = round(rate * 2**32) - 2**31
    drawn = numbers(seed, layer, len(rows), len(rows[0]))
    return [
        [value / (1 - rate) if signed(number) >= least else 0.0 for value, number in zip(row, own, strict=True)]
        for row, own in zip(rows, drawn, strict=True)
    ]


def signed(number: int) -> int:
    """Returns the 32-bit two's complement."""
    return number - 2**32 if number >= 2**31 else number
