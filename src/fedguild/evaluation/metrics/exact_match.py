"""Exact match, up to case and white space."""

from __future__ import annotations


def score(prediction: str, reference: str) -> float:
    """Returns 1.0 where the texts agree up to case and white space, else 0.0."""
    return float(normalised(prediction) == normalised(reference))


def normalised(text: str) -> str:
    """Returns the text in lower case, with single spaces between words and none at the ends."""
    return " ".join(text.lower().split())
