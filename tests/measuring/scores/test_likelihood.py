from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from fedguild.core.errors import DataError
from fedguild.data.batches import collate
from fedguild.data.example import Example
from fedguild.data.rendering import encode
from fedguild.measuring.scores.batching import Item, token_batches
from fedguild.measuring.scores.likelihood import Candidates, collate_candidates, encode_candidates
from fedguild.model.inputs import prefix_shared

WEATHER = Example("How is the sky?", "blue", "", "sky", ("blue", "a deep dark grey", "red"), 0)
FREE = Example("Say hello.", "hello you there", "", "talk")


def test_single_candidates_are_the_training_batch(tokenizer):
    rows = [[encode_candidates(FREE, tokenizer, 64)], [encode_candidates(replace(FREE, prompt="Go"), tokenizer, 64)]]
    ours = collate_candidates(rows, pad_id=258)
    training = collate([[encode(FREE, tokenizer, 64)], [encode(replace(FREE, prompt="Go"), tokenizer, 64)]], pad_id=258)
    assert ours.segments is None
    assert ours.position_ids is None
    for name in ("input_ids", "mask", "predict_at", "targets", "group"):
        assert torch.equal(getattr(ours, name), getattr(training, name)), name
    assert ours.rows_per_slot == training.rows_per_slot


def test_the_layout_of_a_packed_row():
    batch = collate_candidates([[Candidates((7, 8), ((1,), (2, 3)))], [Candidates((9,), ((4,), (5,)))]], pad_id=0)
    assert batch.input_ids.tolist() == [[7, 8, 1, 2, 3], [9, 4, 5, 0, 0]]
    assert batch.mask.tolist() == [[True] * 5, [True, True, True, False, False]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 2, 3], [0, 1, 1, 0, 0]]
    assert batch.predict_at.tolist() == [1, 1, 3, 5, 5]
    assert batch.targets.tolist() == [1, 2, 3, 4, 5]
    assert batch.group.tolist() == [0, 1, 1, 2, 3]
    assert batch.segments.tolist() == [[0, 0, 1, 2, 2], [0, 1, 2, -1, -1]]
    attention = prefix_shared(batch.segments)
    assert attention.shape == (2, 1, 5, 5)
    assert attention[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert attention.any(dim=-1).all()


def test_a_batch_carries_no_mask_and_the_device_makes_it():
    """What travels grows by the tokens, not by their square; the mask is made where the segments are."""
    sizes = []
    for length in (50, 200):
        rows = [[Candidates(tuple(range(length)), ((1,) * length, (2,) * length))]]
        batch = collate_candidates(rows, pad_id=0)
        tensors = [value for field in fields(batch) if isinstance(value := getattr(batch, field.name), torch.Tensor)]
        sizes.append(sum(tensor.nbytes for tensor in tensors))
    assert sizes[1] == 4 * sizes[0]
    assert prefix_shared(batch.segments.to("meta")).is_meta


def test_a_long_prompt_is_shortened_for_all_candidates_alike(tokenizer):
    candidates = encode_candidates(replace(WEATHER, prompt="x" * 100 + "end"), tokenizer, 30)
    longest = max(map(len, candidates.responses))
    assert len(candidates.prompt) + longest == 30
    assert bytes(candidates.prompt).endswith(b"xend")
    assert [bytes(response[:-1]).decode() for response in candidates.responses] == [
        f" {choice}" for choice in WEATHER.choices
    ]


def test_an_empty_prompt_is_an_error(tokenizer):
    tokenizer.encode = lambda text, add_special_tokens, verbose=True: list(text.encode())
    with pytest.raises(DataError, match="task 'talk' has no prompt token"):
        encode_candidates(replace(FREE, prompt=""), tokenizer, 64)


def test_batches_hold_every_item_once_within_the_bound():
    items = [Item(slot, index, 1 + (7 * slot + 5 * index) % 11) for slot in range(3) for index in range(9)]
    batches = token_batches([*items, Item(3, 0, 90)], batch_tokens=30)
    assert [batch for batch in batches if batch[0].tokens == 90] == [[Item(3, 0, 90)]]
    assert sorted((item.slot, item.index) for batch in batches for item in batch) == [
        *((item.slot, item.index) for item in items),
        (3, 0),
    ]
    for batch in batches[1:]:
        assert len(batch) * max(item.tokens for item in batch) <= 30
        assert batch == sorted(batch, key=lambda item: (item.slot, item.index))
    padded = sum(len(batch) * max(item.tokens for item in batch) for batch in batches[1:])
    assert padded <= 1.2 * sum(item.tokens for item in items)
