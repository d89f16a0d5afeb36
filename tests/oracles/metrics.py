"""The measures of evaluation once more, slowly, as loops over their definitions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def entropy(weights: Sequence[float]) -> float:
    """-Σ w ln w, terms with w = 0 left out."""
    total = 0.0
    for weight in weights:
        if weight > 0:
            total -= weight * math.log(weight)
    return total


def gini(rates: Sequence[float]) -> float:
    """UB-SMoE, Eq. 62: ΣΣ|u_i - u_j| / (2 M Σ u_i); 0 where nothing was used."""
    total = 0.0
    for one in rates:
        for other in rates:
            total += abs(one - other)
    return total / (2 * len(rates) * sum(rates)) if sum(rates) else 0.0


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words, by the textbook recursion."""
    said, meant = (re.findall(r"[a-z0-9]+", text.lower()) for text in (prediction, reference))
    longest = [[0] * (len(meant) + 1) for _ in range(len(said) + 1)]
    for i, word in enumerate(said):
        for j, other in enumerate(meant):
            longest[i + 1][j + 1] = longest[i][j] + 1 if word == other else max(longest[i][j + 1], longest[i + 1][j])
    common = longest[-1][-1]
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(meant)
    return 2 * precision * recall / (precision + recall)


def macro_f1(pairs: Sequence[tuple[int | None, int]]) -> float:
    """The mean of the labels' harmonic means of precision and recall; `pairs` are (predicted, right)."""
    scores = []
    for label in {one for pair in pairs for one in pair if one is not None}:
        hits = sum(said == meant == label for said, meant in pairs)
        precision = hits / max(1, sum(said == label for said, _ in pairs))
        recall = hits / max(1, sum(meant == label for _, meant in pairs))
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    return sum(scores) / len(scores)
