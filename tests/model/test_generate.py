"""Greedy generation of several slots against whole forward passes of merged weights, one prompt at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import END, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.oracles.lora import MergedModel

LENGTH = 10
PROMPTS = [random_rows(lengths, seed) for seed, lengths in enumerate([[5, 2, 9, 4], [], [3, 7], [1, 6, 6]])]


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "deepseek_v2 greedy", "qwen2"])
def test_slots_generate_what_each_prompt_gives_alone(family):
    backbone = tiny_backbone(family)
    moe = bool(backbone.info.moe)
    plan = AdapterPlan((Lora(4, 0.5, ("attention", "experts") if moe else ("attention", "mlp")),))
    plans = [
        replace(plan.with_lora(rank=r), active_experts=k if moe else None) for k, r in ((4, 4), (2, 1), (1, 3), (3, 2))
    ]
    adapters = [random_adapter(backbone.info, own, seed) for seed, own in enumerate(plans)]
    with SlotModel(backbone, plans) as model:
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        found = model.generate(PROMPTS, LENGTH)
    plain = tiny_model(family)
    expected = []
    for own, adapter, prompts in zip(plans, adapters, PROMPTS, strict=True):
        alone = MergedModel(plain, backbone.info, own, {name: value.float() for name, value in adapter.items()})
        expected.append([alone.greedy(prompt, LENGTH, END) for prompt in prompts])
    assert found == expected
    assert len({tuple(text) for texts in found for text in texts}) > 3


def test_a_text_ends_before_its_end_token(olmoe_backbone, monkeypatch):
    """With the end token's logit raised after two tokens in one row only, that row alone is cut."""
    head = olmoe_backbone.model.get_output_embeddings()
    calls = []

    def favour_end(_, __, logits):
        calls.append(None)
        logits = logits.clone()
        logits[0, :, END] += 1e4 * (len(calls) == 3)
        logits[1:, :, END] -= 1e4
        return logits

    handle = head.register_forward_hook(favour_end)
    try:
        with SlotModel(olmoe_backbone, [AdapterPlan((Lora(2, 1.0, ("attention",)),))] * 2) as model:
            texts = model.generate([random_rows([4], 1), random_rows([3, 5], 2)], 6)
    finally:
        handle.remove()
    assert [[len(text) for text in slot] for slot in texts] == [[2], [6, 6]]


def test_no_prompts_give_no_texts(olmoe_backbone):
    with SlotModel(olmoe_backbone, [AdapterPlan((Lora(2, 1.0, ("attention",)),))] * 2) as model:
        assert model.generate([[], []], 4) == [[], []]


def test_activations_in_generation_are_counted_without_padding(olmoe_backbone):
    plans = [AdapterPlan((Lora(2, 1.0, ("attention",)),), k) for k in (4, 1)]
    with SlotModel(olmoe_backbone, plans) as model, model.collect_routing() as statistics:
        texts = model.generate([[[5, 6, 7]], [[8]]], 1)
    assert [len(text) for slot in texts for text in slot] == [1, 1]
    assert statistics.tokens.tolist() == [3, 1]
    assert statistics.counts.sum(dim=2).tolist() == [[12, 1]] * 2
