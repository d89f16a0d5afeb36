"""ROUGE-L: the longest common subsequence of words (Lin, 2004)."""

from __future__ import annotations

from functools import cache
from typing import Any

from fedguild.measuring.scores.metrics import exact_match


def score(prediction: str, reference: str) -> float:
    """Returns the F-measure of ROUGE-L, from 0 to 1, without stemming.

    rouge-score sees Latin letters and digits only, so a reference in other characters would always score 0. Texts that
    match exactly score 1 in any script.
    """
    if exact_match.score(prediction, reference):
        return 1.0
    return float(_scorer().score(reference, prediction)["rougeL"].fmeasure)


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # it imports nltk, which takes a second

    return RougeScorer(["rougeL"], use_stemmer=False)
