from __future__ import annotations

from dataclasses import replace

import pytest

from fedguild.core.errors import ConfigError
from fedguild.measuring.costs.flops import cost
from fedguild.methods.fedptuning.encoded_prompt import EncodedPrompt
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.adapters.soft_prompt import SoftPrompt
from fedguild.model.info import LinearInfo, ModelInfo, MoeInfo
from fedguild.model.plan import AdapterPlan

HIDDEN, WIDTH, EXPERTS, LAYERS, VOCABULARY = 2048, 1024, 64, 16, 50304
NORMS = LAYERS * 4 * HIDDEN + HIDDEN
OLMOE = ModelInfo(
    name="OLMoE-1B-7B",
    family="olmoe",
    hidden=HIDDEN,
    layers=LAYERS,
    vocabulary=VOCABULARY,
    parameters=LAYERS * (4 * HIDDEN**2 + EXPERTS * HIDDEN + EXPERTS * 3 * HIDDEN * WIDTH)
    + 2 * VOCABULARY * HIDDEN
    + NORMS,
    linears=tuple(
        LinearInfo(f"model.layers.{layer}.self_attn.{name}_proj", "attention", HIDDEN, HIDDEN)
        for layer in range(LAYERS)
        for name in "qkvo"
    ),
    moe=tuple(
        MoeInfo(f"l{layer}.mlp", f"l{layer}.mlp.gate", f"l{layer}.mlp.experts", EXPERTS, 8, HIDDEN, WIDTH)
        for layer in range(LAYERS)
    ),
)
FLAME = AdapterPlan((Lora(20, 0.8, ("attention", "router", "experts")),))
BUDGETS = {1: (46.1, 8.87e6, 0.6), 2: (53.8, 11.8e6, 0.7), 4: (69.2, 17.7e6, 0.9), 8: (100.0, 29.5e6, 1.3)}


@pytest.mark.parametrize("experts", BUDGETS)
def test_flame_table_1(experts):
    percent, trainables, billions = BUDGETS[experts]
    budget, full = cost(OLMOE, replace(FLAME, active_experts=experts)), cost(OLMOE, FLAME)
    assert 100 * budget.table_flops(128) / full.table_flops(128) == pytest.approx(percent, abs=2)
    assert budget.active_trainable == pytest.approx(trainables, rel=0.003)
    assert round(budget.active_parameters / 1e9, 1) == billions
    assert budget.parameters / 1e9 == pytest.approx(6.9, abs=0.05)
    assert budget.trainable / 1e6 == pytest.approx(194.7, abs=0.1)


def test_adapters_of_experts_and_scales_count_exactly():
    plan = AdapterPlan((Lora(3, 1.0, ("q_proj", "experts")), OutputScale("per_layer")), 2)
    counted = cost(OLMOE, plan)
    fixed = LAYERS * (3 * 2 * HIDDEN + 1)
    assert counted.trainable == fixed + LAYERS * EXPERTS * 3 * 3 * (HIDDEN + WIDTH)
    assert counted.active_trainable == fixed + LAYERS * 2 * 3 * 3 * (HIDDEN + WIDTH)


def test_experts_trained_in_full_count_exactly():
    """W costs its product and its input gradient, D its product and both gradients: 4 + 6 FLOPs a value."""
    plan = AdapterPlan((FullExperts(),), 2)
    counted, frozen = cost(OLMOE, plan), cost(OLMOE, replace(plan, parts=()))
    expert = 3 * HIDDEN * WIDTH
    assert counted.trainable == LAYERS * EXPERTS * expert
    assert counted.active_trainable == LAYERS * 2 * expert
    assert frozen.trainable == 0
    assert counted.forward_flops(1, 1) - frozen.forward_flops(1, 1) == 2 * LAYERS * 2 * expert
    assert counted.training_flops(1, 1) - frozen.training_flops(1, 1) == 6 * LAYERS * 2 * expert


def test_routers_trained_in_full_work_for_every_token():
    plan = AdapterPlan((FullRouter(),), 2)
    assert cost(OLMOE, plan).active_trainable == cost(OLMOE, plan).trainable == LAYERS * EXPERTS * HIDDEN


def test_experts_without_a_gate_have_two_matrices():
    """SwitchTransformers' experts: one input projection, one of 64 active."""
    layers = tuple(replace(moe, top_k=1, projections=("up_proj", "down_proj")) for moe in OLMOE.moe)
    switch = replace(OLMOE, moe=layers)
    plan = AdapterPlan((FullExperts(),))
    assert cost(switch, plan).trainable == LAYERS * EXPERTS * 2 * HIDDEN * WIDTH
    assert cost(switch, plan).active_trainable == LAYERS * 2 * HIDDEN * WIDTH


def test_forward_leaves_out_what_is_looked_up_and_adds_attention():
    counted = cost(OLMOE, FLAME)
    assert counted.product_parameters == counted.active_parameters - VOCABULARY * HIDDEN - NORMS
    per_token = 2 * (counted.product_parameters + counted.active_trainable) + 4 * 128 * LAYERS * HIDDEN
    assert counted.forward_flops(256, context_tokens=128) == 256 * per_token


def test_a_training_step_forms_no_frozen_weight_gradient():
    counted = cost(OLMOE, FLAME)
    frozen, trained, attention = counted.product_parameters, counted.active_trainable, 2 * 64 * LAYERS * HIDDEN
    step = counted.training_flops(64, context_tokens=64)
    assert step == 64 * 2 * (2 * frozen + 3 * trained + 3 * attention)
    again = counted.training_flops(64, context_tokens=64, checkpointing=True)
    assert again - step == counted.forward_flops(64, context_tokens=64)


def test_a_dense_model_counts_without_experts():
    dense = replace(OLMOE, moe=(), parameters=10**9)
    counted = cost(dense, AdapterPlan((Lora(2, 1.0, ("attention",)),)))
    assert counted.active_parameters == counted.parameters == 10**9
    assert counted.active_trainable == counted.trainable == LAYERS * 4 * 2 * 2 * HIDDEN


@pytest.mark.parametrize("prompt", [SoftPrompt(20), EncodedPrompt(20, 32, HIDDEN)])
def test_a_soft_prompt_is_tokens_in_front_of_every_row(prompt: AdapterPart) -> None:
    """Four rows of 64 tokens are four of 84; the prompt encoder does not run at every token."""
    plain, found = cost(OLMOE, AdapterPlan(())), cost(OLMOE, AdapterPlan((prompt,)))
    assert found.forward_flops(4 * 64, 64) == plain.forward_flops(4 * 84, 84)
    assert found.training_flops(4 * 64, 64, checkpointing=True) == plain.training_flops(4 * 84, 84, checkpointing=True)
    assert found.trainable == found.active_trainable >= 20 * HIDDEN


def test_more_active_experts_than_there_are_is_an_error():
    with pytest.raises(ConfigError, match=r"active_experts is 65, but l0\.mlp has 64 experts"):
        cost(OLMOE, replace(FLAME, active_experts=65))


def test_a_frozen_factor_costs_what_a_frozen_weight_does():
    """Forward and input gradient, no weight gradient, no moments: LoRA whose A is frozen, counted by hand."""
    plan = replace(FLAME, active_experts=2)
    half = plan.with_lora(frozen=("lora_A",))
    down = LAYERS * 20 * (4 * HIDDEN + HIDDEN + 2 * (2 * HIDDEN + WIDTH))
    up = LAYERS * 20 * (4 * HIDDEN + EXPERTS + 2 * (2 * WIDTH + HIDDEN))
    whole, found = cost(OLMOE, plan), cost(OLMOE, half)
    assert (found.active_trainable, found.active_frozen) == (up, down)
    assert whole.active_trainable == up + down
    assert found.trainable + found.frozen == whole.trainable
    for tokens in (1, 128):
        assert found.forward_flops(tokens, tokens) == whole.forward_flops(tokens, tokens)
        assert found.table_flops(tokens) == whole.table_flops(tokens)
        assert whole.training_flops(tokens, tokens) - found.training_flops(tokens, tokens) == 2 * tokens * down


def test_a_factor_between_frozen_ones_is_all_that_trains():
    plan = FLAME.with_lora(middle=True, frozen=("lora_A", "lora_B"))
    found = cost(OLMOE, plan)
    assert found.trainable == LAYERS * 400 * (4 + 1 + 3 * EXPERTS)
    assert found.active_trainable == LAYERS * 400 * (4 + 1 + 3 * 8)
    assert found.frozen == cost(OLMOE, FLAME).trainable
