"""Factors that are loaded but not trained, and a trained factor between them, against merged weights."""

from __future__ import annotations

import pytest
import torch

from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError
from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.moe import dispatch as dispatch_module
from fedguild.model.moe.low_rank import LowRank
from fedguild.model.plan import AdapterPlan, adapter_shapes
from fedguild.model.slots import SlotModel
from tests.backbones import END, PAD, lora_plan, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.model.kernels import let_run
from tests.model.merged import assert_equal_to_merged
from tests.oracles.lora import MergedModel

FAMILIES = {
    "olmoe": ("attention", "router", "experts"),
    "qwen2_moe": ("attention", "mlp", "router", "experts"),
    "llama": ("attention", "mlp"),
}
BETWEEN = {"middle": True, "frozen": ("lora_A", "lora_B")}
KINDS = {
    "A frozen": {"frozen": ("lora_A",)},
    "B frozen": {"frozen": ("lora_B",)},
    "R between": BETWEEN,
}
ROWS = [
    [Encoded(tuple(ids), 2) for ids in random_rows(lengths, seed)] for seed, lengths in enumerate([[7, 5], [], [9]])
]


@pytest.fixture(params=[0, 8], ids=["groups", "blocks of 8"])
def layout(request, monkeypatch):
    """Forces one of torch's ways of the experts' low-rank products."""
    let_run(monkeypatch, ())
    monkeypatch.setattr(dispatch_module, "BLOCK_HEIGHTS", (request.param,) if request.param else ())
    monkeypatch.setattr(dispatch_module, "FILLER_LIMIT", 1000.0)
    monkeypatch.setattr("fedguild.model.moe.view.prefers_blocks", lambda _: bool(request.param))


def mixed_plans(family: str, **kind) -> list[AdapterPlan]:
    """Three slots of mixed rank, scale and active experts."""
    moe = family != "llama"
    return [
        lora_plan(rank, scale, FAMILIES[family], active if moe else None, **kind)
        for rank, scale, active in ((3, 0.5, 2), (1, 2.0, None), (4, 1.0, 1))
    ]


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_equal_their_merged_models_in_losses_and_gradients(family, kind):
    backbone, plain = (make(family, dtype=torch.float64) for make in (tiny_backbone, tiny_model))
    assert_equal_to_merged(backbone, plain, mixed_plans(family, **kind), [[7, 5], [], [9]])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_middle_factor_under_checkpointing_and_in_half_precision(checkpointing):
    """The same bits with layers computed again; in bf16 close to fp32, at a rank that storage pads."""
    plan = lora_plan(3, 0.5, FAMILIES["olmoe"], **BETWEEN)
    gradients = {}
    for dtype, again in ((torch.float32, False), (torch.float32, checkpointing), (torch.bfloat16, checkpointing)):
        backbone = tiny_backbone("olmoe", dtype=dtype, gradient_checkpointing=again, attn_implementation="eager")
        _, (found,) = losses_and_gradients_alone(backbone, plan)
        gradients[dtype, again] = found
    plain, recomputed = gradients[torch.float32, False], gradients[torch.float32, checkpointing]
    half = gradients[torch.bfloat16, checkpointing]
    for name, gradient in plain.items():
        assert torch.equal(recomputed[name], gradient)
        assert half[name].isfinite().all()
    attention = [name for name in plain if "self_attn" in name]
    apart = sum(float((half[name] - plain[name]).norm()) for name in attention)
    assert apart < 0.3 * sum(float(plain[name].norm()) for name in attention)


def losses_and_gradients_alone(backbone, plan):
    with SlotModel(backbone, [plan]) as model:
        model.load(0, random_adapter(backbone.info, plan, 1, size=0.1))
        losses = model.token_losses(collate(ROWS[:1], PAD))
        losses.sum().backward()
        return losses.detach(), [{n: t.own(0, of=t.stored.grad).clone() for n, t in model.trainables.items()}]


@pytest.mark.parametrize("family", ["olmoe", "llama"])
def test_slots_with_a_middle_factor_generate_what_each_prompt_gives_alone(family):
    backbone = tiny_backbone(family)
    plans = mixed_plans(family, **BETWEEN)
    prompts = [random_rows(lengths, seed) for seed, lengths in enumerate([[5, 2], [3, 7], [1, 6, 6]])]
    adapters = [random_adapter(backbone.info, plan, seed) for seed, plan in enumerate(plans)]
    with SlotModel(backbone, plans) as model:
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        found = model.generate(prompts, 8)
    plain = tiny_model(family)
    expected = []
    for plan, adapter, own in zip(plans, adapters, prompts, strict=True):
        alone = MergedModel(plain, backbone.info, plan, {name: value.float() for name, value in adapter.items()})
        expected.append([alone.greedy(prompt, 8, END) for prompt in own])
    assert found == expected
    assert len({tuple(text) for texts in found for text in texts}) > 3


def test_what_is_frozen_is_loaded_but_neither_read_nor_optimised(olmoe_backbone):
    plan = AdapterPlan((Lora(2, 1.0, FAMILIES["olmoe"], frozen=("lora_A",)), OutputScale("fixed", 2.0)))
    adapter = random_adapter(olmoe_backbone.info, plan, 0)
    with SlotModel(olmoe_backbone, [plan, plan]) as model:
        for slot in (0, 1):
            model.load(slot, adapter)
        assert {name: tuple(t.shapes[0]) for name, t in model.loaded.items()} == adapter_shapes(
            olmoe_backbone.info, plan
        )
        for name, tensor in model.loaded.items():
            torch.testing.assert_close(tensor.own(1).double(), adapter[name], rtol=1e-6, atol=1e-6)
        assert all(name.endswith("lora_B") for name in model.read(0))
        optimizer = SlotOptimizer(model.trainables, TrainingSettings(optimizer="adamw", weight_decay=0.1))
        before = {name: tensor.stored.detach().clone() for name, tensor in model.loaded.items()}
        model.token_losses(collate([ROWS[0], ROWS[2]], PAD)).sum().backward()
        optimizer.step([0.1, 0.1])
        assert len(optimizer.first) == len(optimizer.second) == len(model.trainables)
        for name, tensor in model.loaded.items():
            assert torch.equal(tensor.stored, before[name]) == (name not in model.trainables), name


@pytest.mark.parametrize(
    ("kind", "products"),
    [({}, 5), ({"frozen": ("lora_A",)}, 3), ({"frozen": ("lora_B",)}, 2), (BETWEEN, 3)],
    ids=["all trained", "A frozen", "B frozen", "R between"],
)
def test_no_weight_gradient_of_a_frozen_factor_is_formed(kind, products, olmoe_backbone, monkeypatch):
    """A layer's experts form one outer product for each trained factor; A of gate and up share one."""
    calls = []
    outer = LowRank.outer
    monkeypatch.setattr("fedguild.model.moe.view.prefers_dense", lambda *_: False)
    monkeypatch.setattr("fedguild.model.moe.view.prefers_token_side", lambda *_: False)
    monkeypatch.setattr(LowRank, "outer", lambda *args: calls.append(1) or outer(*args))
    plan = lora_plan(4, 1.0, ("experts",), **kind)
    with SlotModel(olmoe_backbone, [plan]) as model:
        model.load(0, random_adapter(olmoe_backbone.info, plan, 0))
        model.token_losses(collate(ROWS[:1], PAD)).sum().backward()
    assert len(calls) == len(olmoe_backbone.info.moe) * products


def test_cohorts_do_not_mix_what_is_frozen():
    plan = AdapterPlan((Lora(2, 1.0, ("attention",)),))
    others = [plan.with_lora(frozen=("lora_A",)), plan.with_lora(**BETWEEN)]
    assert len({each.cohort_key for each in (plan, *others)}) == 3


def test_bad_plans_say_what_is_wrong():
    with pytest.raises(ConfigError, match="no lora_C that could be frozen"):
        Lora(2, 1.0, ("attention",), frozen=("lora_C",))
    with pytest.raises(ConfigError, match="A and B must be frozen"):
        Lora(2, 1.0, ("attention",), middle=True, frozen=("lora_A",))
