"""The embedded corpus: small instruction tasks in ten families, thousands of questions in each.

Everything is drawn from a seed, so nothing is downloaded or licensed. One prompt in eight is held out by a hash of its
text, whatever the seed. A test question was therefore never in any training set, nor in that of the embedded
checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from numpy.random import Generator

from fedguild.core.errors import DataError, nearest
from fedguild.core.seeding import numpy_rng
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.corpora.tasks.families import FAMILIES, Family
from fedguild.data.example import Corpus, Example
from fedguild.data.prompts import render

__all__ = ["FAMILIES", "SEEN", "SPEC", "UNSEEN", "Family", "draw", "load"]

SEEN = tuple(name for name, family in FAMILIES.items() if family.seen)
"""Families that the embedded checkpoint was trained on."""

UNSEEN = tuple(name for name, family in FAMILIES.items() if not family.seen)
"""Families that are new to the embedded checkpoint."""

_HELD_OUT_SHARE = 8
_PATIENCE = 10_000


def load(
    *,
    train_examples: int = 4_000,
    test_examples: int = 400,
    families: Sequence[str] = tuple(FAMILIES),
    seed: int = 0,
) -> Corpus:
    """Draws the corpus.

    Args:
        train_examples: Number of training examples, spread evenly over the families.
        test_examples: Number of test examples, spread likewise; none is ever a training example
            of any seed.
        families: Names of the families to draw from.
        seed: The same seed draws the same corpus, and for each family the test examples do not
            depend on the number of training examples or on the other families.

    Raises:
        DataError: a family is unknown or named twice, a number is negative, or a family has
            fewer distinct questions than asked for.
    """
    _check(families, train_examples, test_examples)
    train: list[Example] = []
    test: list[Example] = []
    for index, name in enumerate(families):
        for split, held_out, total in ((train, False, train_examples), (test, True, test_examples)):
            count = total // len(families) + (index < total % len(families))
            examples = draw(name, numpy_rng(seed, "tasks", name, int(held_out)), held_out=held_out)
            split.extend(_distinct(name, examples, count))
    return Corpus(name="tasks", train=_shuffled(train, seed), test=_shuffled(test, seed))


def draw(name: str, rng: Generator, *, held_out: bool = False) -> Iterator[Example]:
    """Yields examples of one family without end, repeats included: test questions if `held_out`, else training ones."""
    family = FAMILIES[name]
    while True:
        question = family.draw(rng)
        prompt = render("plain", family.instruction, question.text)
        if _is_held_out(prompt) is held_out:
            yield Example(
                prompt=prompt,
                response=question.answer,
                label=name,
                task=name,
                choices=question.choices,
                answer=question.choices.index(question.answer) if question.choices else None,
            )


def _is_held_out(prompt: str) -> bool:
    return hashlib.sha256(prompt.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def _distinct(name: str, examples: Iterator[Example], count: int) -> list[Example]:
    """Returns the first `count` examples of a family with different prompts."""
    by_prompt: dict[str, Example] = {}
    repeats = 0
    while len(by_prompt) < count:
        example = next(examples)
        repeats = repeats + 1 if example.prompt in by_prompt else 0
        if repeats > _PATIENCE:
            raise DataError(
                f"Task family '{name}' has only {len(by_prompt)} distinct questions, but {count} are asked for."
            )
        by_prompt.setdefault(example.prompt, example)
    return list(by_prompt.values())


def _shuffled(examples: list[Example], seed: int) -> tuple[Example, ...]:
    order = numpy_rng(seed, "tasks", "order").permutation(len(examples))
    return tuple(examples[i] for i in order)


def _check(families: Sequence[str], *counts: int) -> None:
    if not families or len(set(families)) != len(families):
        raise DataError(f"families must name each task family once, but is {list(families)}.", nearest("", FAMILIES))
    for name in families:
        if name not in FAMILIES:
            raise DataError(f"Unknown task family '{name}'.", nearest(name, FAMILIES))
    if min(counts) < 0:
        raise DataError(f"The number of examples must not be negative, but is {min(counts)}.")


SPEC = CorpusSpec(
    kind="mixed",
    metric="exact_match",
    generate=load,
    options={
        "train_examples": "how many training examples to generate (4000)",
        "test_examples": "how many test examples to generate (400)",
        "families": "list of the task families to draw from (all)",
    },
)
