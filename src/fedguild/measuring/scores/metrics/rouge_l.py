"""ROUGE-L: the longest common subsequence of words (Lin, 2004)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedguild.measuring.scores.metrics import exact_match

WORD = re.compile("[a-z0-9]+")


def score(prediction: str, reference: str) -> float:
    """Returns the F-measure of ROUGE-L, from 0 to 1, without stemming.

    Words are those of Google's `rouge-score`: Latin letters and digits only, so a reference in other characters would
    always score 0. Texts that match exactly score 1 in any script.
    """
    if exact_match.score(prediction, reference):
        return 1.0
    said, wanted = WORD.findall(prediction.lower()), WORD.findall(reference.lower())
    common = longest_common_subsequence(said, wanted)
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def longest_common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Returns the number of words, row by row of the usual table."""
    above = [0] * (len(right) + 1)
    for one in left:
        row = [0]
        for index, other in enumerate(right):
            row.append(above[index] + 1 if one == other else max(above[index + 1], row[index]))
        above = row
    return above[-1]
