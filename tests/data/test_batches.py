"""Tokens, truncation, and where the loss lies in a batch of several slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedguild.data.batches import Encoded, Seq2Seq, collate, epoch_order
from fedguild.data.example import Example
from fedguild.data.rendering import encode, encode_prompt, response_text


class Letters:
    """A tokenizer of one token per character, with a beginning and an end token."""

    eos_token_id = 1

    def encode(self, text: str, add_special_tokens: bool, verbose: bool) -> list[int]:
        ids = [ord(letter) for letter in text]
        return [2, *ids, 1] if add_special_tokens else ids


def example(prompt: str, response: str) -> Example:
    return Example(prompt, response, label="", task="")


def test_the_response_is_closed_and_the_prompt_is_not() -> None:
    found = encode(example("ab\n", "c"), Letters(), 100)
    assert found == Encoded((2, ord("a"), ord("b"), ord("\n"), ord("c"), 1), 4)
    assert found.response_tokens == 2
    assert encode_prompt("ab", Letters()) == [2, ord("a"), ord("b")]


@pytest.mark.parametrize(
    ("prompt", "response", "expected"), [("a:", "b", " b"), ("a:\n", "b", "b"), ("a:", " b", " b"), ("", "b", "b")]
)
def test_a_space_joins_prompt_and_response_once(prompt: str, response: str, expected: str) -> None:
    assert response_text(prompt, response) == expected


def test_a_long_text_loses_the_beginning_of_its_prompt() -> None:
    found = encode(example("abcdef\n", "xy"), Letters(), 6)
    assert "".join(map(chr, found.input_ids)) == "ef\nxy\x01"
    assert found.prompt_length == 3
    cut = encode(example("abc\n", "uvwxyz"), Letters(), 4)
    assert "".join(map(chr, cut.input_ids)) == "\nuvw"
    assert cut.prompt_length == 1


def test_targets_are_the_response_tokens_of_each_slot() -> None:
    rows = [[Encoded((5, 6, 7, 8), 2)], [], [Encoded((9, 10), 1), Encoded((11, 12, 13), 1)]]
    batch = collate(rows, pad_id=0)
    assert batch.rows_per_slot == (1, 0, 2)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]]
    assert batch.mask.sum(1).tolist() == [4, 2, 3]
    assert batch.predict_at.tolist() == [1, 2, 4, 8, 9]
    assert batch.targets.tolist() == [7, 8, 10, 12, 13]
    assert batch.group.tolist() == [0, 0, 2, 2, 2]
    assert batch.to(torch.device("cpu")) is batch


def test_what_is_skipped_is_read_and_not_predicted() -> None:
    """Prompt 5 6, answer 7 8, then 9 of the user, answer 3 1, and 4 after it; a text that is skipped from its start."""
    rows = [[Encoded((5, 6, 7, 8, 9, 3, 1, 4), 2, ((4, 5), (7, 8)))], [Encoded((5, 6, 7), 0, ((0, 2),))]]
    batch = collate(rows, pad_id=0)
    assert batch.mask.sum(1).tolist() == [8, 3]
    assert batch.targets.tolist() == [7, 8, 3, 1, 7]
    assert batch.predict_at.tolist() == [1, 2, 4, 5, 8 + 1]
    assert batch.group.tolist() == [0, 0, 0, 0, 1]
    assert [row.response for (row,) in rows] == [(7, 8), ()]
    assert [row.response_tokens for (row,) in rows] == [4, 1]
    decoded = collate(rows[:1], 0, Seq2Seq(start=2, end=None))
    assert decoded.input_ids.tolist()[0][:2] == [5, 6]
    assert decoded.decoder_ids.tolist() == [[2, 7, 8, 9, 3, 1]]
    assert decoded.targets.tolist() == [7, 8, 3, 1]
    assert decoded.predict_at.tolist() == [0, 1, 3, 4]


def test_an_epoch_visits_every_example_once() -> None:
    batches = epoch_order(10, 4, np.random.default_rng(3))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(index for batch in batches for index in batch) == list(range(10))
    assert batches == epoch_order(10, 4, np.random.default_rng(3))
    assert batches != epoch_order(10, 4, np.random.default_rng(4))


def test_an_encoder_reads_the_prompt_and_a_decoder_predicts_the_response() -> None:
    """Slot 0: prompt 5 6, response 7 8 1. Slot 2 has a text without prompt, whose first token goes to the encoder."""
    rows = [[Encoded((5, 6, 7, 8, 1), 2)], [], [Encoded((9, 1), 1), Encoded((3, 4, 1), 0)]]
    batch = collate(rows, 0, Seq2Seq(start=2, end=1))
    assert batch.rows_per_slot == (1, 0, 2)
    assert batch.input_ids.tolist() == [[5, 6, 1, 0], [9, 1, 0, 0], [3, 1, 0, 0]]
    assert batch.mask.sum(1).tolist() == [3, 2, 2]
    assert batch.decoder_ids.tolist() == [[2, 7, 8], [2, 0, 0], [2, 4, 0]]
    assert batch.decoder_mask.sum(1).tolist() == [3, 1, 2]
    assert batch.predict_at.tolist() == [0, 1, 2, 3, 6, 7]
    assert batch.targets.tolist() == [7, 8, 1, 1, 4, 1]
    assert batch.group.tolist() == [0, 0, 0, 2, 2, 2]
    moved = batch.to(torch.device("meta"))
    assert (moved.decoder_ids.device.type, moved.decoder_mask.device.type) == ("meta", "meta")


def test_the_two_sides_differ_in_width() -> None:
    equal = collate([[Encoded((5, 6, 7, 1), 1)]], 0, Seq2Seq(start=2, end=None))
    assert (equal.input_ids.shape[1], equal.decoder_ids.shape[1]) == (1, 3)
    padded_by_one = collate([[Encoded((5, 6, 7, 8), 2)]], 0, Seq2Seq(start=2, end=None))
    assert (padded_by_one.input_ids.shape[1], padded_by_one.decoder_ids.shape[1]) == (3, 2)
    assert padded_by_one.mask.tolist() == [[True, True, False]]
    nothing = collate([[], []], 0, Seq2Seq(start=2, end=1))
    assert nothing.input_ids.shape[0] == nothing.targets.numel() == 0
