"""Evaluation against the real SlotModel: what it scores, and what it keeps in memory."""

from __future__ import annotations

import pytest
import torch

import tests.undescribed
from fedguild.data.batches import Encoded, collate
from fedguild.data.example import Example
from fedguild.measuring.costs.memory import memory
from fedguild.measuring.scores.likelihood import Candidates, candidate_losses, encode_candidates
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone
from tests.undescribed import UNDESCRIBED, as_backbone, plain

SKY = Example("How is the sky?", "blue", "", "sky", ("blue", "a deep dark grey", "red"), 0)
NUMBER = Example("One more than three:", "4", "", "count", ("4", "five"), 0)
FREE = Example("Say hello.", "hello you there", "", "talk")


@pytest.fixture(scope="module")
def backbone():
    return tiny_backbone("olmoe", vocab_size=260, hidden_size=32, intermediate_size=16)


def test_packed_candidates_score_as_each_alone_under_every_budget_and_in_any_batch(backbone, tokenizer):
    plans = [
        AdapterPlan((Lora(4, 1.0, ("attention", "router", "experts")), OutputScale("per_layer")), k) for k in (2, 1, 2)
    ]
    examples = [[SKY, FREE, NUMBER], [NUMBER, SKY], []]
    rows = [[encode_candidates(example, tokenizer, 64) for example in slot] for slot in examples]
    with SlotModel(backbone, plans) as model:
        for slot, plan in enumerate(plans):
            model.load(slot, random_adapter(backbone.info, plan, slot))
        packed = candidate_losses(model, rows, batch_tokens=10_000, pad_id=258)
        apart = candidate_losses(model, rows, batch_tokens=1, pad_id=258)
        assert [[pytest.approx(losses, rel=1e-5) for losses in own] for own in packed] == apart
        for slot, slot_rows in enumerate(rows):
            for row, losses in zip(slot_rows, packed[slot], strict=True):
                for response, loss in zip(row.responses, losses, strict=True):
                    alone = [[] for _ in plans]
                    alone[slot] = [Encoded(row.prompt + response, len(row.prompt))]
                    with torch.no_grad():
                        expected = model.token_losses(collate(alone, pad_id=258)).sum().item()
                    assert loss == pytest.approx(expected, rel=1e-5)


WINDOWED = {
    "mistral": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4},
}


@pytest.mark.parametrize("family", [*UNDESCRIBED, *WINDOWED])
def test_candidates_share_a_row_only_where_a_mask_keeps_them_apart(family, monkeypatch):
    """No recurrent state passes from one to the next, and a sliding window of 7 holds in rows of 14 tokens."""
    monkeypatch.setitem(tests.undescribed.UNDESCRIBED, family, {**WINDOWED, **UNDESCRIBED}[family])
    backbone = as_backbone(plain(family), monkeypatch)
    groups = tuple({linear.group for linear in backbone.info.linears})
    rows = [
        Candidates(tuple(prompt), tuple(map(tuple, random_rows(lengths, 2))))
        for prompt, lengths in zip(random_rows([2, 7], 1), ([2, 2], [3, 4]), strict=True)
    ]
    with SlotModel(backbone, [AdapterPlan((Lora(2, 1.0, groups),))]) as model:
        together = candidate_losses(model, [rows], batch_tokens=1000, pad_id=PAD)
        alone = [
            [candidate_losses(model, [[one]], batch_tokens=1000, pad_id=PAD)[0][0][0] for one in row.singles]
            for row in rows
        ]
    assert together == [[pytest.approx(losses, rel=1e-6) for losses in alone]]


@pytest.mark.parametrize("experts", [1, 2])
def test_the_memory_estimate_is_near_what_autograd_keeps(backbone, experts):
    """Saved tensors are what a forward pass keeps; the working memory of its backward pass comes on top."""
    plan = AdapterPlan((Lora(4, 1.0, ("attention", "router", "experts")),), experts)
    texts = [Encoded(tuple(range(64)), 1) for _ in range(16)]
    kept: dict[int, int] = {}
    with SlotModel(backbone, [plan]) as model:
        model.load(0, random_adapter(backbone.info, plan, 0))
        owned = {t.data_ptr() for t in backbone.model.parameters()}
        owned |= {t.stored.data_ptr() for t in model.trainables.values()}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            losses = model.token_losses(collate([texts], pad_id=258))
    assert losses.requires_grad
    estimate = memory(backbone.info, plan, 16 * 64, dtype=torch.float32).activations_bytes
    assert 0.6 < sum(kept.values()) / estimate < 1.2
