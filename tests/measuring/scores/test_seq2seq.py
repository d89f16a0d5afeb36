"""Evaluation of an encoder-decoder model: every candidate with a prompt of its own, against the plain model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedguild.data.batches import Seq2Seq
from fedguild.data.example import Example
from fedguild.data.rendering import encode
from fedguild.measuring.scores.likelihood import Candidates, candidate_losses, collate_singles, encode_candidates
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import make_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import random_adapter, tiny_model
from tests.oracles.switch import MergedSwitch

SKY = Example("How is the sky?", "blue", "", "sky", ("blue", "a deep dark grey", "red"), 0)
NUMBER = Example("One more than three:", "4", "", "count", ("4", "five"), 0)
FREE = Example("Say hello.", "hello you there", "", "talk")
EXAMPLES = [[SKY, FREE, NUMBER], [], [NUMBER, SKY]]
PLANS = [AdapterPlan((Lora(rank, 0.5, ("attention", "experts")),)) for rank in (4, 2, 3)]
TOKENS = {"vocab_size": 260, "pad_token_id": 258, "eos_token_id": 257, "decoder_start_token_id": 258}


@pytest.fixture(scope="module")
def network():
    return tiny_model("switch", **TOKENS)


@pytest.fixture(scope="module")
def backbone():
    return make_backbone(tiny_model("switch", **TOKENS), None, name="random Switch")


@pytest.fixture
def slots(backbone, tokenizer):
    """Three slots with adapters of their own."""
    backbone.tokenizer = tokenizer
    with SlotModel(backbone, PLANS) as model:
        for slot, plan in enumerate(PLANS):
            model.load(slot, random_adapter(backbone.info, plan, slot))
        yield model


def alone(network, model: SlotModel, slot: int) -> MergedSwitch:
    return MergedSwitch(network, PLANS[slot], model.read(slot))


@pytest.mark.parametrize("batch_tokens", [10_000, 60])
def test_candidates_score_as_each_alone_in_the_plain_model(network, slots, tokenizer, batch_tokens):
    rows = [[encode_candidates(example, tokenizer, 64) for example in own] for own in EXAMPLES]
    found = candidate_losses(slots, rows, batch_tokens, pad_id=258)
    assert [[len(row) for row in own] for own in found] == [[3, 1, 2], [], [2, 3]]
    for slot, examples in enumerate(EXAMPLES):
        plain = alone(network, slots, slot)
        for example, losses in zip(examples, found[slot], strict=True):
            for choice, loss in zip(example.choices or (example.response,), losses, strict=True):
                text = encode(replace(example, response=choice), tokenizer, 64)
                source = [*text.input_ids[: text.prompt_length], 257]
                response = text.input_ids[text.prompt_length :]
                with torch.no_grad():
                    expected = float(plain.losses(source, response, 258).sum())
                assert loss == pytest.approx(expected, rel=1e-4)


def test_the_layout_of_candidates_on_two_sides():
    """The prompts are closed by 7, the decoder starts from 6; the encoder is as wide as no decoder is."""
    rows = [[Candidates((1, 2), ((3,), (4, 5, 9)))], [Candidates((8,), ((4, 5),))]]
    batch = collate_singles(rows, 0, Seq2Seq(6, 7))
    assert batch.input_ids.tolist() == [[1, 2, 7, 0], [1, 2, 7, 0], [8, 7, 0, 0]]
    assert batch.mask.sum(dim=1).tolist() == [3, 3, 2]
    assert batch.decoder_ids.tolist() == [[6, 0, 0], [6, 4, 5], [6, 4, 0]]
    assert batch.decoder_mask.sum(dim=1).tolist() == [1, 3, 2]
    assert batch.predict_at.tolist() == [0, 3, 4, 5, 6, 7]
    assert batch.targets.tolist() == [3, 4, 5, 9, 4, 5]
    assert batch.group.tolist() == [0, 1, 1, 1, 2, 2]
    assert batch.rows_per_slot == (2, 1)
