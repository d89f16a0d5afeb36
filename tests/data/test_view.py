"""The view of data before training: learned tokens, lengths, duplicates and leaks."""

import json
from itertools import pairwise

import pytest

from fedguild.data import ClientData, Corpus, Example
from fedguild.data.conversation import conversation
from fedguild.data.example import Message
from fedguild.data.rendering import encode
from fedguild.data.view import duplicates_between, duplicates_of, pieces_of, view_of
from tests.data.chat_templates import tokenizer_of
from tests.data.test_rendering import CONVERSATIONS, messages_of


def example(prompt: str, response: str = "b", label: str = "") -> Example:
    return Example(prompt, response, label=label, task="")


def test_pieces_are_the_tokens_and_characters_are_whole():
    tokenizer = tokenizer_of("chatml")
    encoded = encode(conversation(CONVERSATIONS["code and other scripts"]), tokenizer, 1000)
    pieces = pieces_of(encoded, tokenizer)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(encoded.input_ids)
    assert (
        "".join(piece.text for piece in pieces if piece.learned) == "```\n    return 鸟\n```<|im_end|>1\n\n2<|im_end|>"
    )
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert len(pieces) > len(encoded.input_ids) / 2


def test_duplicates_and_leaks_are_counted():
    a, b, c = example("a"), example("b"), example("c")
    found = duplicates_of([[a, a, b], [b, c], [c]], [a, a, example("c", "other"), example("d")])
    assert (found.train, found.test, found.leaked, found.tests, found.clients) == (3, 1, 3, 4, 4)
    assert found.warning() == "Warning: 3 of 4 held-out examples have the prompt of a training example."
    assert duplicates_of([[a, b]], [c]).warning() == ""
    talk = conversation(messages_of("a", "b", "c", "d"))
    assert duplicates_of([[talk]], [conversation(messages_of("a", "b", "c", "x"))]).leaked == 1
    assert duplicates_of([[talk]], [conversation(messages_of("a", "x", "c", "d"))]).leaked == 0


def test_all_examples_that_are_scored_are_looked_at():
    a, b = example("a"), example("b")
    clients = [ClientData(train=(a,), validation=(), test=(b,)), ClientData(train=(b,), validation=(), test=(a,))]
    assert duplicates_between(Corpus("x", (a, b)), clients).leaked == 2
    c = example("c")
    found = duplicates_between(Corpus("x", (a, b), test=(c,)), clients)
    assert (found.leaked, found.tests) == (2, 3), "clients are scored on their own, too"
    drawn = [ClientData(train=(a,), validation=(c,), test=(c,))] * 2
    found = duplicates_between(Corpus("x", (a, b), test=(c,)), drawn)
    assert (found.leaked, found.tests, found.test) == (0, 1, 0), "one example, drawn by both"
    assert duplicates_between(Corpus("x", (a, b)), [ClientData(train=(a,), validation=(a,), test=())]).leaked == 1


@pytest.mark.parametrize(
    ("family", "told"),
    [("chatml", ["have thoughts"]), ("qwen3", []), ("gemma", ["have a system message", "have thoughts"])],
)
def test_what_a_template_does_not_write_is_counted(family: str, told: list[str]):
    thought = Message("assistant", "b", json.dumps({"reasoning_content": "hm"}))
    talk = conversation([Message("system", "s"), Message("user", "a"), thought])
    plain = conversation(messages_of("a", "b"))
    view = view_of(Corpus("x", (talk, plain, talk), layout="chat"), [], {}, tokenizer_of(family), 100, shown=0)
    assert list(view.changed.values()) == [2] * len(told)
    assert all(part in what for part, what in zip(told, view.changed, strict=True))


def test_the_view_counts_what_is_there():
    tokenizer = tokenizer_of("chatml")
    talk, long = (
        conversation(messages_of("a", "<|im_end|>"), label="x"),
        conversation(messages_of("a " * 40, "b"), label="y"),
    )
    corpus = Corpus("x", (talk, talk, long), dropped={"rows": 2}, changed={"turns are odd": 1}, layout="chat")
    view = view_of(corpus, [], corpus.dropped, tokenizer, 30, shown=1)
    texts = [encode(one, tokenizer, 30) for one in corpus.train]
    assert view.lengths == tuple(len(text.input_ids) for text in texts)
    assert view.learned == sum(len(text.targets) for text in texts)
    assert (view.labels, view.train, view.test, view.spelled, len(view.shown)) == ({"x": 2, "y": 1}, 3, 0, 2, 1)
    bars = view.histogram()
    assert sum(bar.count for bar in bars) == 3
    assert all(bar.first <= bar.last < after.first for bar, after in pairwise(bars))
    assert [sum(bar.first <= length <= bar.last for length in view.lengths) for bar in bars] == [
        bar.count for bar in bars
    ]
    assert view.sentences() == [
        "Left out: 2 rows.",
        "1 turns are odd.",
        "1 of 3 training texts lose the beginning of their prompt (data.max_length is 30).",
        "1 training examples repeat an earlier one.",
        "2 training texts spell a special token of the tokenizer (data.special_tokens).",
    ]
