"""Baselines without a language model: bag of words, the hypothesis alone, the majority answer.

Sets with choices are answered, the others get a response from the training data. All of them take examples as
FedGuild reads them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from fedguild.data import Example

Text = Callable[[Example], str]
"""What a baseline reads of an example."""
STRENGTHS = (0.01, 0.1, 1.0)
"""The values of C, the inverse of the regularisation, that are tried on the validation examples."""
MOST_CLASSES = 50
"""With more responses than this in the training data, the choices differ from question to question."""
_HYPOTHESIS = re.compile(r'Can we infer that "(.*)"\? Yes, No, or Maybe\?\s*$', re.DOTALL)


def hypothesis(example: Example) -> str:
    """Returns the hypothesis of an SNLI question in its usual wording.

    Raises:
        ValueError: the prompt is worded otherwise.
    """
    match = _HYPOTHESIS.search(example.prompt)
    if match is None:
        raise ValueError(f"This is not SNLI's question: {example.prompt!r:.200}.")
    return match[1]


def prompt(example: Example) -> str:
    """Returns all that a model reads before it answers."""
    return example.prompt


def premise_and_hypothesis(example: Example) -> str:
    """Returns both sentences of an SNLI question, the words of the premise marked as such."""
    tail = hypothesis(example)
    premise = example.prompt[: example.prompt.rindex("Can we infer that")]
    return " ".join([*(f"premise_{word}" for word in re.findall(r"\w+", premise)), tail])


def majority_answers(train: Sequence[Example], test: Sequence[Example]) -> list[int]:
    """Returns for each question the choice that is most often right in training; for new choices, its place."""
    responses = Counter(example.response for example in train)
    if len(responses) <= MOST_CLASSES:
        return [_first_best([responses[choice] for choice in example.choices]) for example in test]
    places = Counter(example.answer for example in train)
    return [_first_best([places[index] for index in range(len(example.choices))]) for example in test]


def words_answers(
    train: Sequence[Example], validation: Sequence[Example], test: Sequence[Example], text: Text
) -> tuple[list[int], float]:
    """Returns the answers of a logistic regression on which words occur, and the C that validation chose.

    Where the choices are the same few for all questions, the words of the question predict the response, and the
    likeliest of the question's choices is the answer. Where every question has choices of its own, the words of a
    choice predict whether it is right; those of the question are the same for all of its choices.
    """
    fixed = len({example.response for example in train}) <= MOST_CLASSES
    fit = partial(_classes, text=text) if fixed else _ranking
    scored = []
    for strength in STRENGTHS:
        answer = fit(train, strength=strength)
        scored.append((accuracy(answer(validation), validation), -strength, answer))
    _, negative, answer = max(scored, key=lambda entry: entry[:2])
    return answer(test), -negative


def _classes(train: Sequence[Example], *, strength: float, text: Text) -> Callable[[Sequence[Example]], list[int]]:
    vectorizer = CountVectorizer(binary=True)
    features = vectorizer.fit_transform([text(example) for example in train])
    model = LogisticRegression(C=strength, max_iter=2000).fit(features, [example.response for example in train])
    place = {response: index for index, response in enumerate(model.classes_)}

    def answer(examples: Sequence[Example]) -> list[int]:
        rows = model.predict_proba(vectorizer.transform([text(example) for example in examples]))
        return [
            _first_best([row[place[choice]] if choice in place else 0.0 for choice in example.choices])
            for row, example in zip(rows, examples, strict=True)
        ]

    return answer


def _ranking(train: Sequence[Example], *, strength: float) -> Callable[[Sequence[Example]], list[int]]:
    vectorizer = CountVectorizer(binary=True)
    choices = [choice for example in train for choice in example.choices]
    right = [index == example.answer for example in train for index in range(len(example.choices))]
    model = LogisticRegression(C=strength, max_iter=2000).fit(vectorizer.fit_transform(choices), right)

    def answer(examples: Sequence[Example]) -> list[int]:
        return [
            _first_best(model.decision_function(vectorizer.transform(example.choices)).tolist()) for example in examples
        ]

    return answer


def accuracy(answers: Sequence[int], examples: Sequence[Example]) -> float:
    """Returns the share of right answers."""
    return float(np.mean([answer == example.answer for answer, example in zip(answers, examples, strict=True)]))


def majority_responses(train: Sequence[Example], test: Sequence[Example]) -> list[str]:
    """Returns for each question the most frequent training response of its task (ties: the first)."""
    by_task: dict[str, Counter[str]] = defaultdict(Counter)
    for example in train:
        by_task[example.task][example.response] += 1
    overall = sum(by_task.values(), Counter())
    return [by_task.get(example.task, overall).most_common(1)[0][0] for example in test]


def nearest_responses(train: Sequence[Example], test: Sequence[Example]) -> list[str]:
    """Returns for each question the response to the training prompt that is most similar (cosine of TF-IDF)."""
    vectorizer = TfidfVectorizer(sublinear_tf=True)
    known = vectorizer.fit_transform([example.prompt for example in train])
    similar = vectorizer.transform([example.prompt for example in test]) @ known.T
    return [train[int(row.argmax())].response for row in similar.toarray()]


def token_frequency_nats(train: Sequence[Sequence[int]], test: Sequence[Sequence[int]], vocabulary: int) -> float:
    """Returns the nats per token of test responses by the training responses' token frequencies, each plus one.

    Args:
        train: Token ids of each training response.
        test: The same of each test response.
        vocabulary: Number of tokens.
    """
    counts = np.bincount(np.concatenate([np.asarray(row) for row in train]), minlength=vocabulary) + 1.0
    nats = -np.log(counts / counts.sum())
    return float(nats[np.concatenate([np.asarray(row) for row in test])].mean())


def _first_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: (values[index], -index))
