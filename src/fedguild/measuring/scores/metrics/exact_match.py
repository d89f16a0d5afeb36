"""Exact match, up to case and white space."""

from __future__ import annotations


def score(prediction: str, reference: str) -> float:
    return float(normalised(prediction) == normalised(reference))


def normalised(text: str) -> str:
    """Returns the text in lower case, with white space collapsed."""
    return " ".join(text.lower().split())
