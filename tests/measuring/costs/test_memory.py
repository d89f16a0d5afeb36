from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedguild.measuring.costs.flops import cost
from fedguild.measuring.costs.memory import NF4_BYTES, StepForm, memory, weight_bytes
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.soft_prompt import SoftPrompt
from fedguild.model.backbone import describe_config
from fedguild.model.plan import AdapterPlan
from tests.measuring.costs.test_flops import EXPERTS, FLAME, HIDDEN, LAYERS, OLMOE, WIDTH

PADDED = 24
"""Ranks that 20 take in bf16, whose rows are multiples of 16 bytes."""


def test_memory_of_weights_and_optimizer():
    held = memory(OLMOE, FLAME, 512, dtype=torch.bfloat16)
    assert held.weights_bytes == 2 * OLMOE.parameters
    stored = cost(OLMOE, FLAME).trainable * PADDED // 20
    assert (held.adapters_bytes, held.gradients_bytes, held.optimizer_bytes) == (
        (4 + 2) * stored,
        4 * stored,
        8 * stored,
    )
    layer = PADDED * EXPERTS * 3 * (HIDDEN + WIDTH)
    assert held.scratch_bytes == 2 * layer
    assert held.cohort_bytes == 18 * stored + held.activations_bytes + 2 * layer
    assert held.total_bytes == 2 * OLMOE.parameters + held.cohort_bytes
    exact = memory(OLMOE, FLAME, 512, dtype=torch.float32)
    trainable = cost(OLMOE, FLAME).trainable
    assert (exact.adapters_bytes, exact.gradients_bytes, exact.optimizer_bytes) == (
        4 * trainable,
        4 * trainable,
        8 * trainable,
    )
    assert memory(OLMOE, FLAME, 512, dtype=torch.float32, moments=0).optimizer_bytes == 0


def test_activations_grow_with_tokens_and_experts_and_shrink_with_checkpointing():
    full = memory(OLMOE, FLAME, 512, dtype=torch.bfloat16).activations_bytes
    assert memory(OLMOE, FLAME, 1024, dtype=torch.bfloat16).activations_bytes == 2 * full
    small = memory(OLMOE, replace(FLAME, active_experts=1), 512, dtype=torch.bfloat16).activations_bytes
    assert full - small == 512 * 2 * 7 * (LAYERS * (2 * WIDTH + HIDDEN) + 3 * HIDDEN + 4 * WIDTH)
    assert memory(OLMOE, FLAME, 512, dtype=torch.bfloat16, checkpointing=True).activations_bytes < full / 2


def test_experts_that_train_something_keep_their_input():
    plan = AdapterPlan((), 2)
    full, none = (
        memory(OLMOE, replace(plan, parts=parts), 512, dtype=torch.bfloat16) for parts in ((FullExperts(),), ())
    )
    assert full.activations_bytes - none.activations_bytes == 512 * 2 * LAYERS * 2 * HIDDEN
    assert full.adapters_bytes == (4 + 2) * LAYERS * EXPERTS * 3 * HIDDEN * WIDTH


def test_a_frozen_factor_has_neither_gradient_nor_moments():
    plan = replace(FLAME, active_experts=2)
    half = plan.with_lora(frozen=("lora_A",))
    stored = cost(OLMOE, half).trainable * PADDED // 20
    ours, theirs = (memory(OLMOE, each, 128, dtype=torch.bfloat16) for each in (half, plan))
    assert ours.adapters_bytes == theirs.adapters_bytes
    assert ours.gradients_bytes == 4 * stored
    assert ours.optimizer_bytes == 8 * stored


def test_nf4_packs_linears_and_experts_and_unpacks_one_layer_at_a_time() -> None:
    model = describe_config("olmoe-1b-7b")
    linears, experts = 16 * 4 * 2048**2, 16 * 64 * 3 * 2048 * 1024
    rest = model.parameters - linears - experts
    packed = weight_bytes(model, torch.bfloat16, four_bit=True)
    assert NF4_BYTES == 0.5625
    assert packed == 0.5625 * (linears + experts) + 2 * (rest + experts // 16)
    assert weight_bytes(model, torch.bfloat16) == 2 * model.parameters


def test_a_soft_prompt_lengthens_every_row():
    """Four rows of 20 with 100 virtual tokens are 480, of which 80 have logits."""
    rows = StepForm(row_tokens=20)
    plain, long, prompted = (
        memory(OLMOE, AdapterPlan(parts), tokens, dtype=torch.bfloat16, form=form).activations_bytes
        for parts, tokens, form in (((), 80, rows), ((), 480, rows), ((SoftPrompt(100),), 80, rows))
    )
    assert prompted - plain == long - plain - 400 * 2 * 4 * OLMOE.vocabulary


def test_eager_attention_keeps_probabilities_of_every_pair_of_tokens():
    """6 bytes in bf16, for every head of all layers, or with checkpointing of one."""
    rows = StepForm(row_tokens=512)
    heads = 16
    for checkpointing, layers in ((False, LAYERS), (True, 1)):
        fused, eager = (
            memory(model, FLAME, 1024, dtype=torch.bfloat16, checkpointing=checkpointing, form=rows).activations_bytes
            for model in (OLMOE, replace(OLMOE, eager_heads=LAYERS * heads))
        )
        assert eager - fused == 1024 * 512 * heads * layers * 6


@pytest.mark.parametrize(
    ("path", "attention", "heads"),
    [
        ("olmoe-1b-7b", "sdpa", 0),
        ("olmoe-1b-7b", "eager", 16 * 16),
        ("gpt-oss-20b", "sdpa", 24 * 64),
        ("switch-base-16", "sdpa", (12 + 2 * 12) * 12),
    ],
)
def test_eager_attention_is_counted_where_a_model_is_loaded_with_it(path, attention, heads):
    """gpt-oss has no fused attention; a decoder's layers attend twice."""
    assert describe_config(path, attention=attention).eager_heads == heads
