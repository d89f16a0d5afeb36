"""Results of an evaluation: a score per example, and summaries over all examples and by task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Self

from fedguild.core.score_names import joined
from fedguild.measuring.scores.statistics import mean_of_known


@dataclass(frozen=True, slots=True)
class ExampleScore:
    """The score of one example. A measure that does not apply to its kind is None.

    Attributes:
        primary: The measure for the example's kind, from 0 to 1: right or wrong if it has choices or is a preference
            pair, else a metric of the generated text.
        measure: Name of the metric that `primary` is.
        response_nll: Negative log-likelihood of the right response, in nats.
        response_tokens: Tokens that `response_nll` sums over.
        correct: 1.0 if the predicted choice is the right one, else 0.0.
        metrics: Metrics by name, of the generated text or of a preference pair.
        predicted: Index of the predicted choice; None if the text names none.
        choices, answer: The example's choices, and the index of the right one.
    """

    task: str
    primary: float
    response_nll: float
    response_tokens: int
    correct: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    predicted: int | None = None
    generated: str | None = None
    measure: str = ""
    choices: tuple[str, ...] = ()
    answer: int | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over examples. A measure that applies to none of them is None.

    Attributes:
        score: Mean of the examples' primary measures, from 0 to 1.
        metric: Name of the metric that the score is the mean of; several are joined by `and`.
        accuracy: Over the examples with choices.
        macro_f1: Mean of the labels' F1, if all examples have the same choices.
        metrics: By name, over the examples without choices.
        nats: Mean negative log-likelihood over all response tokens.
        perplexity: exp of it.
    """

    count: int
    score: float | None
    accuracy: float | None
    metrics: Mapping[str, float]
    perplexity: float | None
    nats: float | None = None
    macro_f1: float | None = None
    metric: str = ""

    @classmethod
    def of(cls, examples: Sequence[ExampleScore]) -> Self:
        tokens = sum(example.response_tokens for example in examples)
        nll = math.fsum(example.response_nll for example in examples)
        return cls(
            count=len(examples),
            score=mean_of_known(example.primary for example in examples),
            accuracy=mean_of_known(example.correct for example in examples),
            metrics=_means(example.metrics for example in examples),
            perplexity=_exp(nll / tokens) if tokens else None,
            nats=nll / tokens if tokens else None,
            macro_f1=macro_f1(examples),
            metric=joined(example.measure for example in examples),
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one slot.

    Attributes:
        by_task: Task -> summary, in alphabetical order.
        examples: The examples' scores, in the order they were given.
    """

    overall: Summary
    by_task: Mapping[str, Summary]
    examples: tuple[ExampleScore, ...]

    @classmethod
    def of(cls, examples: Sequence[ExampleScore]) -> Self:
        tasks = sorted({example.task for example in examples})
        by_task = {task: Summary.of([example for example in examples if example.task == task]) for task in tasks}
        return cls(Summary.of(examples), by_task, tuple(examples))


def macro_f1(examples: Sequence[ExampleScore]) -> float | None:
    """Returns the mean over the labels that occur of 2 TP / (2 TP + FP + FN); None without labels.

    Labels are the choices, if all examples have the same ones; a text that names none predicts no label.
    """
    labels = {example.choices for example in examples}
    if len(labels) != 1 or labels == {()}:
        return None
    scores = []
    for label in range(len(next(iter(labels)))):
        pairs = [(example.predicted == label, example.answer == label) for example in examples]
        right, said, meant = (sum(found) for found in ((a and b for a, b in pairs), *zip(*pairs, strict=True)))
        if said or meant:
            scores.append(2 * right / (said + meant))
    return fmean(scores)


def _means(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for measured in metrics:
        for name, value in measured.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(each) for name, each in values.items()}


def _exp(value: float) -> float:
    """Returns e^value, infinity if that overflows a float (a model that has diverged)."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
