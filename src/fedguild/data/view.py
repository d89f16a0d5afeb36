"""View of a data set before training: counts, lengths, labels, duplicates, and the tokens that are learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fedguild.data.batches import Cut, Encoded
from fedguild.data.example import Corpus, Example
from fedguild.data.rendering import chat_of, count_cut, encode, spells_special
from fedguild.data.split import ClientData

MOST_BARS = 10


@dataclass(frozen=True)
class Duplicates:
    """Examples that are there more than once.

    Attributes:
        train: Training examples that repeat an earlier one.
        test: The same for test examples.
        leaked: Test examples whose prompt is also a training example's.
        tests: Number of test examples.
        clients: Training examples that another client has, too.
    """

    train: int
    test: int
    leaked: int
    tests: int
    clients: int

    def warning(self) -> str:
        """Returns a sentence about test examples that are trained on; empty if there are none."""
        if not self.leaked:
            return ""
        return f"Warning: {self.leaked} of {self.tests} held-out examples have the prompt of a training example."


@dataclass(frozen=True)
class Piece:
    """One token as text, or several that make up one character."""

    text: str
    learned: bool


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram: texts of `first` to `last` tokens."""

    first: int
    last: int
    count: int


@dataclass(frozen=True)
class DataView:
    """What a config makes of its data.

    Attributes:
        layout: What the training data was recognised as; empty for a corpus of one layout.
        train, test: Numbers of examples.
        dropped: Why examples were left out -> how many.
        changed: Why examples are not used as they are -> how many.
        labels: Label -> number of training examples, the most frequent first.
        duplicates: Examples that are there more than once.
        lengths: Tokens of each training text; empty without a tokenizer.
        learned: Number of the training texts' tokens that the loss covers.
        cut: Training texts longer than `data.max_length`; None without a tokenizer.
        spelled: Training texts that spell a special token of the tokenizer.
        shown: The first training texts, token by token.
    """

    layout: str
    train: int
    test: int
    dropped: Mapping[str, int]
    changed: Mapping[str, int]
    labels: Mapping[str, int]
    duplicates: Duplicates
    lengths: tuple[int, ...] = ()
    learned: int = 0
    cut: Cut | None = None
    spelled: int = 0
    shown: tuple[tuple[Piece, ...], ...] = field(default=(), repr=False)

    def histogram(self) -> list[Bar]:
        """Returns the lengths in bars of equal width."""
        if not self.lengths:
            return []
        low, high = min(self.lengths), max(self.lengths)
        width = -(-(high - low + 1) // MOST_BARS)
        counts = Counter((length - low) // width for length in self.lengths)
        bars = range((high - low) // width + 1)
        return [Bar(low + bar * width, low + (bar + 1) * width - 1, counts[bar]) for bar in bars]

    def sentences(self) -> list[str]:
        """Returns what is remarkable, a sentence each."""
        twice = self.duplicates
        counted = (
            (twice.train, "training examples repeat an earlier one"),
            (twice.test, "held-out examples repeat an earlier one"),
            (twice.clients, "training examples are on several clients"),
            (self.spelled, "training texts spell a special token of the tokenizer (data.special_tokens)"),
        )
        return [
            *(f"Left out: {count} {reason}." for reason, count in self.dropped.items()),
            *(f"{count} {what}." for what, count in self.changed.items()),
            *(self.cut.sentences() if self.cut else ()),
            *(f"{count} {what}." for count, what in counted if count),
            *([twice.warning()] if twice.leaked else []),
        ]


def duplicates_of(training: Sequence[Sequence[Example]], testing: Iterable[Example]) -> Duplicates:
    """Counts the examples that are there more than once.

    Args:
        training: The training examples of each client.
    """
    everyone = [example for own in training for example in own]
    tests = list(testing)
    asked = {_asked(example) for example in everyone}
    holders = Counter(key for own in training for key in {_whole(example) for example in own})
    return Duplicates(
        train=len(everyone) - len({_whole(example) for example in everyone}),
        test=len(tests) - len({_whole(example) for example in tests}),
        leaked=sum(_asked(example) in asked for example in tests),
        tests=len(tests),
        clients=sum(holders[_whole(example)] > 1 for example in everyone),
    )


def duplicates_between(corpus: Corpus, clients: Sequence[ClientData]) -> Duplicates:
    """Counts the duplicates in what clients train on and in what they or the global model are scored on."""
    held_out = [*corpus.test, *(example for client in clients for example in (*client.validation, *client.test))]
    once = {id(example): example for example in held_out}  # clients may draw the same of the corpus's tests
    return duplicates_of([client.train for client in clients], once.values())


def view_of(
    corpus: Corpus,
    clients: Sequence[ClientData],
    dropped: Mapping[str, int],
    tokenizer: Any,
    max_tokens: int,
    shown: int,
) -> DataView:
    """Returns the view of a corpus.

    Args:
        clients: The clients' shares of it; empty if it has not been partitioned.
        dropped: Why examples were left out -> how many.
        tokenizer: The model's; None if it is not on this machine.
        max_tokens: The longest text.
        shown: How many examples to show token by token.
    """
    training = [example for client in clients for example in client.train] or list(corpus.train)
    tests = corpus.test or [example for client in clients for example in client.test]
    encoded = [] if tokenizer is None else [encode(one, tokenizer, max_tokens) for one in training]
    texts = [row for one in encoded for row in one.rows]
    chats = [one for one in training if one.messages and encoded]
    rewritten = Counter(what for one in chats for what in chat_of(tokenizer).rewritten(one))
    return DataView(
        layout=corpus.layout,
        train=len(training),
        test=len(tests),
        dropped=dict(dropped),
        changed={**corpus.changed, **rewritten},
        labels=dict(Counter(example.label for example in training).most_common()),
        duplicates=duplicates_between(corpus, clients) if clients else duplicates_of([training], tests),
        lengths=tuple(len(text.input_ids) for text in texts),
        learned=sum(len(text.targets) for text in texts),
        cut=count_cut(zip(training, encoded, strict=True), tokenizer, max_tokens) if texts else None,
        spelled=sum(_spells(example, tokenizer) for example in training) if texts else 0,
        shown=tuple(pieces_of(text, tokenizer) for text in texts[:shown]),
    )


def pieces_of(text: Encoded, tokenizer: Any) -> tuple[Piece, ...]:
    """Returns a text token by token; tokens of one character stay together."""
    targets = set(text.targets.tolist())
    ends, whole = [0], [""]
    for end in range(1, len(text.input_ids) + 1):
        found = tokenizer.decode(text.input_ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if found.endswith("\ufffd") and end < len(text.input_ids):
            continue
        ends.append(end)
        whole.append(found)
    return tuple(
        Piece(after[len(before) :], last - 1 in targets)
        for (before, after), (_, last) in zip(pairwise(whole), pairwise(ends), strict=True)
    )


def _spells(example: Example, tokenizer: Any) -> bool:
    texts = (one.content for one in example.messages) if example.messages else (example.prompt, example.response)
    return any(spells_special(text, tokenizer) for text in texts) or (
        example.rejected is not None and _spells(example.rejected, tokenizer)
    )


def _whole(example: Example) -> Hashable:
    own = example.messages or (example.prompt, example.response)
    return own if example.rejected is None else (own, _whole(example.rejected))


def _asked(example: Example) -> Hashable:
    return example.messages[:-1] or example.prompt or example.response
