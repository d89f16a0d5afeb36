"""Rows packed without padding: the same losses and gradients, fewer tokens, and which models can."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from fedguild.data.batches import Encoded, collate
from fedguild.model import kernels, packed_rows
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.soft_prompt import SoftPrompt
from fedguild.model.backbone import make_backbone
from fedguild.model.packed_rows import ATTENTION, PackedRows, allow_packing, packed, pays
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import (
    FAMILIES,
    MOE_FAMILIES,
    PAD,
    random_adapter,
    random_rows,
    tiny_backbone,
    tiny_model,
)

LENGTHS = ([12, 3], [], [7], [2, 2, 9])
"""Tokens of each slot's rows; the second slot has none."""


def rows_of(lengths=LENGTHS) -> list[list[Encoded]]:
    return [[Encoded(tuple(ids), 1) for ids in random_rows(own, slot)] for slot, own in enumerate(lengths)]


def plans_of(family: str, dropout: float = 0.0) -> list[AdapterPlan]:
    moe = family in MOE_FAMILIES
    plan = AdapterPlan((Lora(4, 0.5, ("attention", "router", "experts") if moe else ("attention", "mlp"), dropout),))
    return [
        replace(plan.with_lora(rank=r), active_experts=k if moe else None) for r, k in ((4, 2), (1, 4), (3, 1), (4, 4))
    ]


@contextmanager
def tokens_in_linears(backbone):
    """Counts the tokens that the first attention's query projection computes."""
    name = next(linear.name for linear in backbone.info.linears if "q_" in linear.name)
    seen: list[int] = []
    hook = backbone.model.get_submodule(name).register_forward_hook(
        lambda _, args, __: seen.append(args[0].shape[:-1].numel())
    )
    yield seen
    hook.remove()


def losses_and_gradients(backbone, plans, rows=None):
    """The losses, every gradient, and the tokens that a linear layer computed."""
    with SlotModel(backbone, plans) as model, tokens_in_linears(backbone) as seen:
        for slot, plan in enumerate(plans):
            model.load(slot, random_adapter(backbone.info, plan, slot))
        model.dropout.seed([11 + slot for slot in range(len(plans))])
        losses = model.token_losses(collate(rows or rows_of(), PAD))
        losses.sum().backward()
        grads = {name: trainable.stored.grad.clone() for name, trainable in model.trainables.items()}
    return losses.detach(), grads, seen[0]


@pytest.mark.parametrize("devices", [("cpu",), ()], ids=["row by row", "padded within the attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_equal_those_with_padding(family, devices, monkeypatch):
    """fp64; slots of other ranks and active experts, one without rows, dropout. Routers score in fp32."""
    monkeypatch.setattr(packed_rows, "ROW_BY_ROW", devices)
    backbone, plans = tiny_backbone(family, dtype=torch.float64), plans_of(family, dropout=0.3)
    assert backbone.packs
    losses, grads, tokens = losses_and_gradients(backbone, plans)
    backbone.packs = False
    padded_losses, padded_grads, padded_tokens = losses_and_gradients(backbone, plans)
    assert (tokens, padded_tokens) == (35, 72)
    tolerance = 1e-6 if family in MOE_FAMILIES else 1e-11
    assert torch.allclose(losses, padded_losses, rtol=tolerance, atol=tolerance)
    for name, grad in padded_grads.items():
        assert torch.allclose(grads[name], grad, rtol=tolerance, atol=tolerance), name
        assert grad.any(), name


def test_a_batch_with_little_padding_stays_as_it_is(olmoe_backbone):
    assert not pays(collate(rows_of([[10, 10], [10, 7]]), PAD))
    assert pays(collate(rows_of([[10, 10], [10, 6]]), PAD))
    plans = plans_of("olmoe")[:2]
    assert losses_and_gradients(olmoe_backbone, plans, rows_of([[10, 10], [10, 7]]))[2] == 40
    assert losses_and_gradients(olmoe_backbone, plans, rows_of([[10, 10], [10, 6]]))[2] == 36


def test_a_packed_batch_by_hand():
    rows = [[Encoded((5, 6, 7), 1)], [], [Encoded((8, 9), 1), Encoded((3, 4, 5, 6), 2)]]
    batch, lengths = packed(collate(rows, PAD))
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 3, 4, 5, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch.rows_per_slot == (3, 0, 6)
    assert batch.predict_at.tolist() == [0, 1, 3, 6, 7]
    assert batch.targets.tolist() == [6, 7, 9, 5, 6]
    assert lengths.lengths == (3, 2, 4)
    assert lengths.places.tolist() == [0, 1, 2, 4, 5, 8, 9, 10, 11]
    assert lengths.ends.tolist() == [0, 3, 5, 9]


@pytest.mark.parametrize("family", ["olmoe", "llama", "deepseek_v2 greedy"])
def test_without_packing_the_attention_is_sdpa_to_the_bit(family, monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "none")
    backbone, plain = tiny_backbone(family), tiny_model(family)
    assert (backbone.model.config._attn_implementation, plain.config._attn_implementation) == (ATTENTION, "sdpa")
    ids, mask = torch.tensor(random_rows([9, 9], 1)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    with torch.no_grad():
        for given in (None, mask):
            expected = plain(ids, attention_mask=given).logits
            found = backbone.model(ids, attention_mask=given).logits
            if family in MOE_FAMILIES:  # its experts are other products
                assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(found, expected)


def test_models_whose_rows_meet_elsewhere_stay_as_they_are():
    assert not tiny_backbone("switch").packs
    assert not tiny_backbone("llama", attn_implementation="eager").packs
    assert not tiny_backbone("mixtral", sliding_window=4).packs
    assert not tiny_backbone(
        "qwen2", layer_types=["full_attention", "sliding_attention"], sliding_window=4, use_sliding_window=True
    ).packs
    stateful = tiny_model("llama")
    stateful._is_stateful = True
    assert not allow_packing(stateful)
    assert not make_backbone(tiny_model("llama"), None, name="off", packing=False).packs
    assert make_backbone(tiny_model("llama"), None, name="on").packs


def test_soft_prompts_keep_their_rows(olmoe_backbone):
    """Every row starts with the prompt, which a hook puts there."""
    plans = [AdapterPlan((SoftPrompt(2),))] * 4
    with SlotModel(olmoe_backbone, plans) as model, tokens_in_linears(olmoe_backbone) as seen:
        model.token_losses(collate(rows_of(), PAD))
    assert seen == [6 * 14]


def attention_by_definition(query, key, value, ends, _, longest, __, *, scale, window_size, enable_gqa):
    """`varlen_attn` as its documentation describes it, for [N, heads, d]."""
    assert window_size == (-1, 0)
    assert longest == int(ends.diff().max())
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
            ).transpose(0, 1)
        )
    return torch.cat(parts)


@pytest.mark.parametrize("heads", [2, 4])
def test_variable_length_attention_gets_what_it_documents(heads, monkeypatch):
    """A CPU has no such kernel; its definition takes its place, against attention row by row."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention_by_definition)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, 9, 8, generator=generator)
    key, value = (torch.randn(1, heads, 9, 8, generator=generator) for _ in range(2))
    rows = PackedRows(
        (3, 2, 4), torch.tensor([0, 1, 2, 4, 5, 8, 9, 10, 11]), torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    )
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 4 // heads, True
    expected, _ = packed_rows.packed_attention(module, query, key, value, None, rows, scaling=0.3)
    found = packed_rows._variable_length(query, key, value, rows, 0.3)
    assert found.shape == expected.shape == (1, 9, 4, 8)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("capability", "size", "dtype", "hip", "has"),
    [
        ((8, 0), 128, torch.bfloat16, None, True),
        ((9, 0), 256, torch.float16, None, True),
        ((7, 5), 128, torch.float16, None, False),
        ((7, 5), 128, torch.float16, "6.3", True),
        ((8, 0), 100, torch.bfloat16, None, False),
        ((8, 0), 264, torch.bfloat16, None, False),
        ((8, 0), 128, torch.float32, None, False),
    ],
)
def test_variable_length_attention_runs_where_flash_attention_does(capability, size, dtype, hip, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    uncached = packed_rows._runs_flash_attention.__wrapped__
    monkeypatch.setattr(packed_rows, "_runs_flash_attention", uncached)
    assert packed_rows._has_variable_length(torch.device("cuda", 0), dtype, size, size) is has
