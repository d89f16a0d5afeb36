"""Token F1 of SQuAD: the words that an answer shares with the reference (Rajpurkar et al., 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(prediction: str, reference: str) -> float:
    """Returns the F1 of the words, without case, punctuation and articles, as SQuAD's script computes it."""
    said, meant = (_words(text) for text in (prediction, reference))
    common = sum((Counter(said) & Counter(meant)).values())
    if not (said and meant):
        return float(said == meant)
    return 2 * common / (len(said) + len(meant))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
