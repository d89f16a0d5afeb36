"""Mixtures of experts whose family has no description: attention and other linear layers train, the rest stays."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from fedguild.client.budget import Budget
from fedguild.core.errors import ModelError
from fedguild.data.batches import Encoded, collate
from fedguild.measuring.costs.flops import cost
from fedguild.measuring.costs.memory import memory, weight_bytes
from fedguild.measuring.scores.premise import require_choice
from fedguild.methods import build_method
from fedguild.model.backbone import describe_architecture
from fedguild.model.families import FAMILIES
from fedguild.model.plan import adapter_shapes
from fedguild.model.slots import SlotModel
from fedguild.model.targets import fitting_targets, targeted_linears
from tests.backbones import PAD, lora_plan, random_adapter, random_rows
from tests.model.merged import assert_equal_to_merged
from tests.undescribed import HYBRIDS, UNDESCRIBED, as_backbone, plain


def batch_of(rows):
    return collate([[Encoded(tuple(ids), 1) for ids in own] for own in rows], PAD)


def groups_of(backbone) -> tuple[str, ...]:
    return tuple(sorted({linear.group for linear in backbone.info.linears}))


@pytest.mark.parametrize("family", UNDESCRIBED)
def test_fused_clients_equal_their_merged_models_one_at_a_time(family, monkeypatch):
    """fp64, every group of linear layers: losses and gradients; without adapters, transformers' own logits."""
    model = plain(family)
    native, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    backbone = as_backbone(model, monkeypatch)
    ids = torch.tensor(random_rows([9, 9], seed=1))
    with torch.no_grad():
        expected = native(ids, use_cache=False).logits
        torch.testing.assert_close(backbone.model(ids, use_cache=False).logits, expected, rtol=1e-6, atol=1e-6)
    plans = [lora_plan(rank, scale, groups_of(backbone)) for rank, scale in ((3, 0.5), (1, 2.0), (4, 1.0))]
    assert_equal_to_merged(backbone, native, plans, [[7, 5], [], [9]])
    assert all(torch.equal(value, before[name]) for name, value in backbone.model.state_dict().items())


@pytest.mark.parametrize("family", ["gpt_oss", *HYBRIDS])
def test_checkpointing_changes_no_gradient_and_generation_is_each_prompts_own(family, monkeypatch):
    texts, gradients = [], []
    for checkpointing in (False, True):
        backbone = as_backbone(plain(family), monkeypatch, gradient_checkpointing=checkpointing)
        plans = [lora_plan(2, 1.0, groups_of(backbone))] * 2
        adapters = [random_adapter(backbone.info, plan, slot) for slot, plan in enumerate(plans)]
        prompts = [random_rows([6, 3], 1), random_rows([4], 2)]
        with SlotModel(backbone, plans) as model:
            for slot, adapter in enumerate(adapters):
                model.load(slot, adapter)
            texts.append(model.generate(prompts, 4))
            texts.append([[model.generate([[p] if s == slot else [] for s in (0, 1)], 4)[slot][0] for p in own]
                          for slot, own in enumerate(prompts)])  # fmt: skip
            model.token_losses(batch_of(prompts)).sum().backward()
            gradients.append({n: tensor.stored.grad for n, tensor in model.trainables.items()})
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert max(len(text) for rows in texts[0] for text in rows) > 1
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", HYBRIDS)
def test_rows_are_packed_only_where_attention_alone_mixes_tokens(family, monkeypatch):
    """Packed, a recurrent state would pass from one row to the next."""
    backbone = as_backbone(plain(family), monkeypatch)
    assert not backbone.packs
    with SlotModel(backbone, [lora_plan(2, 1.0, ("attention",))]) as model:
        batch = batch_of([random_rows([9, 2, 3], 1)])
        expected = model.token_losses(batch)
        backbone.packs = True
        assert not torch.allclose(model.token_losses(batch), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda info: targeted_linears(info, ("attention", "experts")), "LoRA on experts"),
        (lambda info: targeted_linears(info, ("router",)), "LoRA on router"),
        (lambda info: info.require_active_experts(1, "A budget"), "A budget"),
        (lambda info: build_method("fedavg", {"gate": "full"}).plan(info, Budget("b", 0, 4)), "method.gate"),
        (require_choice, "A choice of active experts"),
    ],
    ids=["experts", "router", "budget", "gate", "premise"],
)
def test_what_needs_routers_or_experts_names_the_family_and_those_with_a_description(call, names, monkeypatch):
    info = as_backbone(plain("gpt_oss"), monkeypatch).info
    with pytest.raises(ModelError) as raised:
        call(info)
    for part in (names, "'gpt_oss'", *FAMILIES):
        assert part in str(raised.value)


def test_methods_train_attention_where_their_targets_are_left_to_them(monkeypatch):
    info = as_backbone(plain("gpt_oss"), monkeypatch).info
    assert fitting_targets(info, ("attention", "router", "experts")) == ("attention",)
    for name in ("fedit", "fedavg", "flexlora", "hetlora"):
        options = build_method(name, {}).settings.fitted(info, 4, exact=True)
        shapes = adapter_shapes(info, build_method(name, options.model_dump()).plan(info, Budget("b", 0, 4)))
        assert shapes
        assert all(".self_attn." in tensor for tensor in shapes)


def test_costs_count_the_experts_that_a_token_uses(monkeypatch):
    backbone = as_backbone(plain("glm4_moe"), monkeypatch)
    info, plan = backbone.info, lora_plan(2, 1.0, ("attention",))
    (block,) = info.undescribed
    experts = backbone.model.model.layers[1].mlp.experts
    assert block.expert_parameters == sum(weight.numel() for weight in experts.parameters())
    assert (block.num_experts, block.top_k, block.active_parameters) == (4, 2, block.expert_parameters // 2)
    assert block.router_parameters == 4 * 16
    counted = cost(info, plan)
    assert counted.active_parameters == counted.parameters - block.expert_parameters // 2
    matrices = sum(linear.inputs * linear.outputs for linear in info.linears)
    head = info.vocabulary * info.hidden
    assert counted.product_parameters == matrices + block.active_parameters + block.router_parameters + head
    everything = replace(info, undescribed=(replace(block, top_k=None),))
    assert cost(everything, plan).active_parameters == counted.parameters
    dense = replace(info, undescribed=())
    assert (
        memory(info, plan, 64, dtype=torch.float32).activations_bytes
        > memory(dense, plan, 64, dtype=torch.float32).activations_bytes
    )
    assert weight_bytes(info, torch.bfloat16, four_bit=True) > 2 * block.expert_parameters, "experts stay in 16 bit"


def test_linear_layers_in_routers_and_experts_are_no_target(monkeypatch):
    """JetMoe's routers are linear layers, and its attention has experts; Jamba's `dt_proj` is never called."""
    jetmoe, jamba = (as_backbone(plain(family), monkeypatch).info for family in ("jetmoe", "jamba"))
    assert {linear.name.partition(".self_attention.")[2] for linear in jetmoe.linears} == {"kv_proj"}
    assert [len(block.linears) for block in jetmoe.undescribed] == [1] * 4
    names = {linear.name.rpartition(".")[2] for linear in jamba.linears if linear.group == "mixer"}
    assert names == {"in_proj", "x_proj", "out_proj"}


GROUPS = {
    "qwen3_next": {"self_attn": "attention", "linear_attn": "mixer", "mlp": "mlp"},
    "granitemoehybrid": {"self_attn": "attention", "mamba": "mixer", "shared_mlp": "mlp"},
    "lfm2_moe": {"self_attn": "attention", "conv": "mixer"},
    "jamba": {"self_attn": "attention", "mamba": "mixer", "feed_forward": "mlp"},
    "llama4_text": {"self_attn": "attention", "feed_forward": "mlp"},
}


@pytest.mark.parametrize("family", GROUPS)
def test_token_mixers_are_no_mlp(family, monkeypatch):
    info = as_backbone(plain(family), monkeypatch).info
    assert {linear.name.split(".")[3]: linear.group for linear in info.linears} == GROUPS[family]


def test_groups_follow_the_class_where_names_are_one(monkeypatch):
    """Every layer of Nemotron-H is a `mixer`: Mamba, attention, experts or an MLP."""
    info = as_backbone(plain("nemotron_h"), monkeypatch).info
    found = {linear.name.removeprefix("model.layers."): linear.group for linear in info.linears}
    assert {name[0]: group for name, group in found.items()} == {"0": "mixer", "1": "mlp", "2": "attention", "3": "mlp"}


@pytest.mark.parametrize(
    ("family", "attention", "mixer"),
    [
        ("gpt_neox", {"query_key_value", "dense"}, set()),
        ("mamba2", set(), {"in_proj", "out_proj"}),
        ("falcon_h1", {"q_proj", "k_proj", "v_proj", "o_proj"}, {"in_proj", "out_proj"}),
    ],
)
def test_dense_models_have_the_same_groups(family, attention, mixer):
    info = describe_architecture({"model_type": family, "num_hidden_layers": 2}, family)
    for group, names in (("attention", attention), ("mixer", mixer)):
        assert {linear.name.rpartition(".")[2] for linear in info.linears if linear.group == group} == names
    assert fitting_targets(info, ("attention",)) == (("attention",) if attention else ("mixer",))
