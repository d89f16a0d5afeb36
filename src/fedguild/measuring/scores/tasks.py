"""Scoring of the examples of every slot at once: choices and pairs by likelihood, responses by generation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fedguild.core.errors import DataError
from fedguild.data.batches import Encoded
from fedguild.data.example import Example
from fedguild.data.rendering import encode
from fedguild.measuring.scores.generation import GenerativeModel, generate_texts
from fedguild.measuring.scores.likelihood import Candidates, LikelihoodModel, candidate_losses, encode_candidates
from fedguild.measuring.scores.metrics import Metric, load_metrics, measure
from fedguild.measuring.scores.metrics.exact_match import normalised
from fedguild.measuring.scores.preferences import ACCURACY, Losses, pair_losses, preference_scores
from fedguild.measuring.scores.scores import ExampleScore, Scores


class EvaluatedModel(LikelihoodModel, GenerativeModel, Protocol):
    """The interface that evaluation requires of a model."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How examples are scored.

    Attributes:
        choices: An example with choices is answered by the likeliest one, or by generating a text that names one.
        length_normalization: A choice's likelihood is the mean over its tokens, or their sum, which favours short
            choices.
        metrics: The metrics of an example without choices, by name.
        responses: Name of the metric that is its primary measure.
        beta: Factor of the margins of preference pairs.
    """

    choices: Literal["likelihood", "generation"] = "likelihood"
    length_normalization: Literal["mean", "sum"] = "mean"
    metrics: Mapping[str, Metric] = field(default_factory=lambda: load_metrics(("exact_match", "rouge_l")))
    responses: str = "rouge_l"
    beta: float = 0.1

    def generates(self, example: Example) -> bool:
        return example.is_open or (bool(example.choices) and self.choices == "generation")


def evaluate(
    model: EvaluatedModel,
    examples: Sequence[Sequence[Example]],
    tokenizer: Any,
    *,
    max_tokens: int,
    max_new_tokens: int = 128,
    batch_tokens: int = 16384,
    scoring: Scoring | None = None,
    references: Sequence[Sequence[Losses]] | None = None,
) -> list[Scores]:
    """Returns the scores of every slot.

    Args:
        model: Runs `examples[s]` in its slot s, adapters in evaluation mode.
        examples: The test examples of each slot: one pooled set under several budgets, or each client's own. A slot may
            have none.
        max_tokens: Longest text, prompt and response together, as in training.
        batch_tokens: Bound on the tokens of one forward pass, padding included.
        references: Of every slot's preference pairs, in their order, the losses under the reference.

    Raises:
        DataError: the slots do not match, an example's answer is not among its choices, or it has no prompt.
        ConfigError: `max_new_tokens` leaves no room for a prompt.
    """
    scoring = scoring or Scoring()
    if len(examples) != model.slots:
        raise DataError(f"The model has {model.slots} slots, but {len(examples)} lists of test examples were given.")
    answered = [[example for example in own if example.rejected is None] for own in examples]
    rows = _encoded(answered, tokenizer, max_tokens)
    texts = generate_texts(
        model,
        [[example for example in slot_examples if scoring.generates(example)] for slot_examples in examples],
        tokenizer,
        max_tokens=max_tokens,
        max_new_tokens=max_new_tokens,
        batch_tokens=batch_tokens,
    )
    losses = candidate_losses(model, rows, batch_tokens, pad_id(tokenizer))
    found = [_slot_scores(*slot, scoring) for slot in zip(answered, rows, losses, texts, strict=True)]
    pairs = encoded_pairs(examples, tokenizer, max_tokens)
    own_losses = pair_losses(model, pairs, batch_tokens, pad_id(tokenizer))
    scored = []
    for slot, own in enumerate(examples):
        others = iter(found[slot])
        compared = iter(zip(pairs[slot], own_losses[slot], references[slot] if references else (), strict=True))
        scored.append(
            [next(others) if one.rejected is None else _pair_score(one, *next(compared), scoring) for one in own]
        )
    return list(map(Scores.of, scored))


def encoded_pairs(examples: Sequence[Sequence[Example]], tokenizer: Any, max_tokens: int) -> list[list[Encoded]]:
    """Returns every slot's preference pairs as token ids."""
    encoded: dict[Example, Encoded] = {}
    for example in (one for own in examples for one in own if one.rejected is not None):
        if example not in encoded:
            encoded[example] = encode(example, tokenizer, max_tokens)
    return [[encoded[one] for one in own if one.rejected is not None] for own in examples]


def _pair_score(example: Example, pair: Encoded, own: Losses, reference: Losses, scoring: Scoring) -> ExampleScore:
    measured = preference_scores(own, reference, scoring.beta)
    return ExampleScore(
        task=example.task,
        primary=measured[ACCURACY],
        measure=ACCURACY,
        response_nll=own[0],
        response_tokens=len(pair.targets),
        metrics=measured,
    )


def _encoded(examples: Sequence[Sequence[Example]], tokenizer: Any, max_tokens: int) -> list[list[Candidates]]:
    """Returns the examples as token ids, each encoded once however many slots hold it."""
    encoded: dict[Example, Candidates] = {}
    for slot_examples in examples:
        for example in slot_examples:
            if example not in encoded:
                _check_answer(example)
                encoded[example] = encode_candidates(example, tokenizer, max_tokens)
    return [[encoded[example] for example in slot_examples] for slot_examples in examples]


def _check_answer(example: Example) -> None:
    valid = range(len(example.choices)) if example.choices else [None]
    if example.answer not in valid:
        raise DataError(
            f"An example of task '{example.task}' has {len(example.choices)} choices, but its answer is "
            f"{example.answer}.",
            f"The answer must be {f'an index from 0 to {len(example.choices) - 1}' if example.choices else None}.",
        )


def _slot_scores(
    examples: Sequence[Example],
    rows: Sequence[Candidates],
    losses: Sequence[Sequence[float]],
    texts: Sequence[str],
    scoring: Scoring,
) -> list[ExampleScore]:
    remaining = iter(texts)
    return [
        _score(example, candidates, nll, next(remaining) if scoring.generates(example) else None, scoring)
        for example, candidates, nll in zip(examples, rows, losses, strict=True)
    ]


def _score(
    example: Example, candidates: Candidates, nll: Sequence[float], text: str | None, scoring: Scoring
) -> ExampleScore:
    """Returns the score of one example.

    Args:
        candidates: Its choices, or the response alone.
        nll: Summed negative log-likelihood of each candidate, in nats.
        text: The generated response, if there is one.
    """
    lengths = [len(response) for response in candidates.responses]
    right = example.answer or 0
    predicted: int | None = None
    correct: float | None = None
    measured: dict[str, float] = {}
    if example.choices:
        predicted = likeliest(nll, lengths, scoring) if text is None else parse_label(text, example.choices)
        primary = correct = float(predicted == right)
    else:
        measured = measure(scoring.metrics, text or "", example.response)
        primary = measured[scoring.responses]
    return ExampleScore(
        task=example.task,
        primary=primary,
        response_nll=nll[right],
        response_tokens=lengths[right],
        correct=correct,
        metrics=measured,
        predicted=predicted,
        generated=text,
        measure="accuracy" if example.choices else scoring.responses,
        choices=example.choices,
        answer=example.answer,
    )


def likeliest(nll: Sequence[float], lengths: Sequence[int], scoring: Scoring) -> int:
    """Returns the index of the likeliest candidate, from their losses in nats and their lengths in tokens."""
    costs = [
        loss / length if scoring.length_normalization == "mean" else loss
        for loss, length in zip(nll, lengths, strict=True)
    ]
    return costs.index(min(costs))


def pad_id(tokenizer: Any) -> int:
    """Returns a token id for padding; padding is masked out, so any valid id will do."""
    return next((int(i) for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def parse_label(text: str, choices: Sequence[str]) -> int | None:
    """Returns the index of the choice that a generated text names; None if it names none.

    The choice that is mentioned first, as whole words, wins. If several begin at the same place (`New`, `New York`),
    the longest of them does.
    """
    said = normalised(text)
    mentions = []
    for index, choice in enumerate(choices):
        mention = re.search(rf"(?<!\w){re.escape(normalised(choice))}(?!\w)", said)
        if mention:
            mentions.append((mention.start(), -mention.end(), index))
    return min(mentions)[2] if mentions else None
