"""The ten task families, each with the function that draws one of its questions.

The embedded checkpoint was trained on five. The other five are new to it, but close enough in skill to be learnt in a
short fine-tuning. Both halves have classified, generated and multiple-choice families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from numpy.random import Generator

from fedguild.data.corpora.tasks import words

Kind = Literal["classified", "generated", "multiple_choice"]


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a family: the input under its instruction, the answer, and the candidates if any."""

    text: str
    answer: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """A task family.

    Attributes:
        kind: `classified` has the same candidates in every question, `multiple_choice` its own in each, `generated`
            none: the response must match exactly.
        seen: Whether the embedded checkpoint was trained on it.
        instruction: Opening line of every question of the family.
    """

    kind: Kind
    seen: bool
    instruction: str
    draw: Callable[[Generator], Question]


def _sample(rng: Generator, pool: Sequence[str], count: int) -> list[str]:
    return [pool[i] for i in rng.permutation(len(pool))[:count]]


def _listed(items: Sequence[str], noun: str = "Words") -> str:
    return f"{noun}: {' '.join(items)}"


def _mixed_words(rng: Generator, least: int, most: int) -> list[str]:
    pool = [word for category in words.CATEGORIES.values() for word in category]
    return _sample(rng, pool, int(rng.integers(least, most + 1)))


def _reverse(rng: Generator) -> Question:
    drawn = _mixed_words(rng, 3, 4)
    return Question(_listed(drawn), " ".join(reversed(drawn)))


def _rotate(rng: Generator) -> Question:
    drawn = _mixed_words(rng, 3, 4)
    return Question(_listed(drawn), " ".join([*drawn[1:], drawn[0]]))


def _translate(rng: Generator) -> Question:
    english = _sample(rng, list(words.DICTIONARY), 3)
    return Question(_listed(english), " ".join(words.DICTIONARY[word] for word in english))


def _translate_back(rng: Generator) -> Question:
    english = _sample(rng, list(words.DICTIONARY), 3)
    return Question(_listed([words.DICTIONARY[word] for word in english]), " ".join(english))


def _sentiment(rng: Generator) -> Question:
    adjective = str(rng.choice((*words.POSITIVE, *words.NEGATIVE)))
    negated = bool(rng.random() < 0.3)
    speaker, place, degree = (str(rng.choice(pool)) for pool in (words.SPEAKERS, words.PLACES, words.DEGREES))
    text = f"Review:{speaker} the {place} was{' not' if negated else ''}{degree} {adjective}"
    good = (adjective in words.POSITIVE) != negated
    return Question(text, "positive" if good else "negative", ("positive", "negative"))


def _topic(rng: Generator) -> Question:
    topic = str(rng.choice(list(words.CATEGORIES)))
    return Question(_listed(_sample(rng, words.CATEGORIES[topic], 3)), topic, tuple(words.CATEGORIES))


def _odd_one_out(rng: Generator) -> Question:
    common, odd = _sample(rng, list(words.CATEGORIES), 2)
    stranger = str(rng.choice(words.CATEGORIES[odd]))
    drawn = _sample(rng, [*_sample(rng, words.CATEGORIES[common], 3), stranger], 4)
    return Question(_listed(drawn), stranger, tuple(drawn))


def _repeated(rng: Generator) -> Question:
    drawn = _mixed_words(rng, 4, 4)
    twice = str(rng.choice(drawn))
    shuffled = _sample(rng, [*drawn, twice], 5)
    return Question(_listed(shuffled), twice, tuple(drawn))


def _digits(rng: Generator) -> list[int]:
    return [int(digit) for digit in rng.integers(1, 10, size=4)]


def _sum(rng: Generator) -> Question:
    digits = _digits(rng)
    return Question(_listed([str(digit) for digit in digits], "Numbers"), str(sum(digits)))


def _above_twenty(rng: Generator) -> Question:
    digits = _digits(rng)
    answer = "yes" if sum(digits) > 20 else "no"
    return Question(_listed([str(digit) for digit in digits], "Numbers"), answer, ("yes", "no"))


FAMILIES: dict[str, Family] = {
    "reverse": Family("generated", True, "Reverse the words.", _reverse),
    "translate": Family("generated", True, "Translate the words to Lumo.", _translate),
    "sentiment": Family("classified", True, "Is the review positive or negative?", _sentiment),
    "odd_one_out": Family("multiple_choice", True, "Which word does not belong?", _odd_one_out),
    "sum": Family("generated", True, "Add the numbers.", _sum),
    "rotate": Family("generated", False, "Move the first word to the end.", _rotate),
    "translate_back": Family("generated", False, "Translate the words to English.", _translate_back),
    "topic": Family("classified", False, "Are these animal, color, food or tool?", _topic),
    "above_twenty": Family("classified", False, "Is the sum more than 20?", _above_twenty),
    "repeated": Family("multiple_choice", False, "Which word is written twice?", _repeated),
}
"""Family name -> family; the names are also the corpus's labels."""
