"""Means over clients, budgets and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedguild.errors import DataError


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
