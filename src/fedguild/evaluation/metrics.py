"""Measures as pure functions: text against text, clients and seeds together, experts in use."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any

import torch
from rouge_score.rouge_scorer import RougeScorer
from torch import Tensor

from fedguild.errors import DataError
from fedguild.server.utilisation import gini, rate_entropy, share_entropy


def normalised(text: str) -> str:
    """Returns the text in lower case, with single spaces between words and none around."""
    return " ".join(text.lower().split())


def exact_match(prediction: str, reference: str) -> float:
    """Returns 1.0 where the texts agree up to case and white space, else 0.0."""
    return float(normalised(prediction) == normalised(reference))


def rouge_l(prediction: str, reference: str) -> float:
    """Returns the F-measure of ROUGE-L (Lin, 2004), from 0 to 1, without stemming.

    rouge-score sees Latin letters and digits only, so a reference of other characters would
    always score 0; texts that match exactly score 1 whatever they are written in.
    """
    if exact_match(prediction, reference):
        return 1.0
    return float(_rouge_scorer().score(reference, prediction)["rougeL"].fmeasure)


def parse_label(text: str, choices: Sequence[str]) -> int | None:
    """Returns the index of the choice that a generated text names, or None where it names none.

    The choice that the text mentions first, as whole words, wins; of several that begin at the
    same place (`New`, `New York`) the longest.
    """
    said = normalised(text)
    mentions = []
    for index, choice in enumerate(choices):
        mention = re.search(rf"(?<!\w){re.escape(normalised(choice))}(?!\w)", said)
        if mention:
            mentions.append((mention.start(), -mention.end(), index))
    return min(mentions)[2] if mentions else None


def mtal(own_test_scores: Iterable[float | None]) -> float:
    """Returns the mean over clients of each client's score on its own test set (FedAMoLE, Eq. 22-23).

    Clients count equally. None stands for a client without test examples, which does not count.

    Raises:
        DataError: no client has a score.
    """
    scores = [score for score in own_test_scores if score is not None]
    if not scores:
        raise DataError("No client has test examples, so there is no mean over clients.")
    return fmean(scores)


def mean_over_budgets(scores: Mapping[str, float]) -> float:
    """Returns the mean of budget name -> score, every budget counting equally.

    Raises:
        DataError: there is no budget.
    """
    if not scores:
        raise DataError("No budget was evaluated, so there is no mean over budgets.")
    return fmean(scores.values())


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over seeds with its sample standard deviation (divisor n - 1; 0 for one seed)."""

    mean: float
    std: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.std:.3f}"


def spread(values: Sequence[float]) -> Spread:
    """Returns mean and sample standard deviation of one value per seed.

    Raises:
        DataError: there is no value.
    """
    if not values:
        raise DataError("A mean over seeds needs at least one seed.")
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Spread:
    """Returns the spread of `values[seed] - reference[seed]`, which cancels what a seed does to both.

    Raises:
        DataError: the two were not run with the same seeds.
    """
    if values.keys() != reference.keys():
        raise DataError(
            f"A paired difference needs equal seeds, but one side has {sorted(values)} "
            f"and the other {sorted(reference)}.",
            "Run both with the same list of seeds.",
        )
    return spread([values[seed] - reference[seed] for seed in sorted(values)])


@dataclass(frozen=True, slots=True)
class Utilisation:
    """How evenly each of L layers uses its M experts.

    Where no token was seen, and in a layer whose counts are all zero, every figure is 0.

    Attributes:
        frequency: [L, M] share of tokens that activated an expert, the utilisation rate; a row
            sums to the active experts per token.
        rate_entropy: [L] entropy of the rates as they are, in nats, which exceeds ln M where several
            experts are active per token (UB-SMoE, section 6.3.3).
        entropy: [L] entropy of the rates scaled to sum 1, in nats, from 0 to ln M.
        normalised_entropy: [L] `entropy` divided by ln M, from 0 (one expert) to 1 (all alike);
            0 where a layer has a single expert.
        gini: [L] Gini coefficient of the rates, from 0 (all alike) to 1 - 1/M (UB-SMoE, Eq. 62).
    """

    frequency: Tensor
    rate_entropy: Tensor
    entropy: Tensor
    normalised_entropy: Tensor
    gini: Tensor


def expert_utilisation(counts: Tensor, tokens: int) -> Utilisation:
    """Returns how evenly the experts are used.

    Args:
        counts: [L, M] tokens that activated each expert, padding excluded.
        tokens: Tokens seen.
    """
    frequency = counts.double() / max(tokens, 1)
    entropy = share_entropy(frequency)
    experts = counts.shape[-1]
    return Utilisation(
        frequency=frequency,
        rate_entropy=rate_entropy(frequency),
        entropy=entropy,
        normalised_entropy=entropy / math.log(experts) if experts > 1 else torch.zeros_like(entropy),
        gini=gini(frequency),
    )


@cache
def _rouge_scorer() -> Any:
    return RougeScorer(["rougeL"], use_stemmer=False)
