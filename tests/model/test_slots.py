"""Adapters on the slot axis: loading, reading, output scales, dropout, attention, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedguild.core.errors import ConfigError, ModelError
from fedguild.data.batches import Encoded, SlotBatch, collate
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.moe import token_side, view
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.model.kernels import let_run
from tests.oracles.lora import MergedModel

PLAN = AdapterPlan((Lora(4, 0.5, ("attention", "router", "experts")),), 2)


def batch_of(*lengths: list[int]) -> SlotBatch:
    """A batch whose slot s has random rows of the given lengths."""
    rows = [[Encoded(tuple(ids), 1) for ids in random_rows(own, slot)] for slot, own in enumerate(lengths)]
    return collate(rows, PAD)


def test_a_slot_reads_back_what_it_loaded_at_its_own_rank(olmoe_backbone):
    plans = [PLAN, PLAN.with_lora(rank=1), PLAN.with_lora(rank=7)]
    adapters = [random_adapter(olmoe_backbone.info, plan, seed) for seed, plan in enumerate(plans)]
    with SlotModel(olmoe_backbone, plans) as model:
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        for slot, (plan, adapter) in enumerate(zip(plans, adapters, strict=True)):
            read = model.read(slot)
            assert {name: tuple(t.shape) for name, t in read.items()} == trainable_shapes(olmoe_backbone.info, plan)
            assert all(torch.equal(read[name], adapter[name].float()) for name in adapter)
            next(iter(read.values())).zero_()
            assert torch.equal(model.read(slot)[next(iter(read))], adapter[next(iter(read))].float())


def test_loading_clears_the_ranks_beyond_the_slots_own(olmoe_backbone):
    plans = [PLAN, PLAN.with_lora(rank=2)]
    name = "model.layers.0.self_attn.q_proj.lora_A"
    with SlotModel(olmoe_backbone, plans) as model:
        model.trainables[name].stored.detach().fill_(9.0)
        model.load(1, {name: torch.ones(2, 16)})
        assert model.trainables[name].stored[1].sum(dim=1).tolist() == [16.0, 16.0, 0.0, 0.0]
        assert bool((model.trainables[name].stored[0] == 9.0).all())


def test_loading_a_part_leaves_the_rest(olmoe_backbone):
    adapter = random_adapter(olmoe_backbone.info, PLAN, 1)
    name = "model.layers.1.mlp.experts.down_proj.lora_B"
    with SlotModel(olmoe_backbone, [PLAN, PLAN]) as model:
        model.load(1, adapter)
        model.load(1, {name: torch.ones(8, 16, 4)})
        assert torch.equal(model.read(1)[name], torch.ones(8, 16, 4))
        other = "model.layers.1.mlp.experts.down_proj.lora_A"
        assert torch.equal(model.read(1)[other], adapter[other].float())
        assert not any(value.any() for value in model.read(0).values())


@pytest.mark.parametrize("kind", ["per_layer", "shared", "fixed"])
def test_the_output_scale_equals_the_scale_in_the_down_projection(kind):
    """Values, and the gradient of s, of two slots with scales of their own; fp64."""
    backbone = tiny_backbone("olmoe", dtype=torch.float64)
    plans = [AdapterPlan((PLAN.lora, OutputScale(kind, start)), PLAN.active_experts) for start in (0.5, 3.0)]
    adapters = [random_adapter(backbone.info, plan, seed) for seed, plan in enumerate(plans)]
    batch = batch_of([6], [6])
    with SlotModel(backbone, plans) as model:
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        losses = model.token_losses(batch)
        losses.sum().backward()
        names = [name for name in model.trainables if name.endswith("output_scale")]
        found = {name: model.trainables[name].stored.grad for name in names}
    assert len(names) == {"per_layer": 2, "shared": 1, "fixed": 0}[kind]
    plain = tiny_model("olmoe", dtype=torch.float64)
    for slot, ids in enumerate(batch.input_ids.tolist()):
        leaves = {name: value.clone().requires_grad_() for name, value in adapters[slot].items()}
        expected = MergedModel(plain, backbone.info, plans[slot], leaves).losses(ids, 1)
        assert torch.allclose(losses[slot * 5 : slot * 5 + 5], expected, rtol=1e-9)
        for name in names:
            (grad,) = torch.autograd.grad(expected.sum(), leaves[name], retain_graph=True)
            assert found[name][slot].item() == pytest.approx(grad.item(), rel=1e-6)
            assert abs(grad.item()) > 1e-3


def test_bf16_runs_near_fp32():
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        backbone = tiny_backbone("olmoe", dtype=dtype, initializer_range=0.1)
        plans = [PLAN, replace(PLAN.with_lora(rank=1), active_experts=4)]
        adapters = [random_adapter(backbone.info, plan, seed, size=0.1) for seed, plan in enumerate(plans)]
        with SlotModel(backbone, plans) as model:
            for slot, adapter in enumerate(adapters):
                model.load(slot, adapter)
            losses[dtype] = model.token_losses(batch_of([8, 5], [6]))
            losses[dtype].sum().backward()
            assert all(t.stored.grad.dtype is torch.float32 for t in model.trainables.values())
            assert all(bool(t.stored.grad.isfinite().all()) for t in model.trainables.values())
    assert losses[torch.bfloat16].dtype is torch.float32
    assert torch.allclose(losses[torch.float32], losses[torch.bfloat16], atol=0.15)


def packed_batch() -> tuple[SlotBatch, list[tuple[list[int], int]]]:
    """One row of a prompt with two candidates that share it, and the texts it stands for."""
    prompt, first, second = random_rows([4, 3, 2], seed=8)
    segments = torch.tensor([0] * 4 + [1] * 3 + [2] * 2)
    batch = SlotBatch(
        input_ids=torch.tensor([prompt + first + second]),
        mask=torch.ones(1, 9, dtype=torch.bool),
        rows_per_slot=(1,),
        predict_at=torch.tensor([3, 4, 5, 3, 7]),
        targets=torch.tensor(first + second),
        group=torch.tensor([0, 0, 0, 1, 1]),
        position_ids=torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4, 5]]),
        segments=segments[None],
    )
    return batch, [(prompt + first, 4), (prompt + second, 4)]


def test_an_attention_that_takes_no_mask_is_refused(olmoe_backbone, monkeypatch):
    monkeypatch.setattr(olmoe_backbone.model.config, "_attn_implementation", "flash_attention_2")
    with SlotModel(olmoe_backbone, [PLAN]) as model, pytest.raises(ModelError, match=r"flash_attention_2[\s\S]*sdpa"):
        model.token_losses(packed_batch()[0])


def test_one_slot_model_at_a_time(olmoe_backbone):
    with SlotModel(olmoe_backbone, [PLAN]), pytest.raises(ModelError, match="Another SlotModel"):
        SlotModel(olmoe_backbone, [PLAN])
    SlotModel(olmoe_backbone, [PLAN]).close()


def test_active_experts_above_top_k_are_refused(olmoe_backbone):
    with pytest.raises(ConfigError, match=r"active_experts 5[\s\S]*runs 4 of 8[\s\S]*from 1 to 4"):
        SlotModel(olmoe_backbone, [replace(PLAN, active_experts=5)])
    SlotModel(olmoe_backbone, [PLAN]).close()


def test_active_experts_on_a_dense_model_are_refused(llama_backbone):
    with pytest.raises(ModelError, match=r"tiny llama \(llama\) has no experts"):
        SlotModel(llama_backbone, [AdapterPlan((Lora(4, 1.0, ("attention",)),), 2)])


def test_plans_of_different_targets_are_refused(olmoe_backbone):
    with pytest.raises(ConfigError, match="share LoRA targets"):
        SlotModel(olmoe_backbone, [PLAN, PLAN.with_lora(targets=("attention",))])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.layers.0.self_attn.q_proj.lora_A": torch.zeros(4, 15)}, r"\(4, 15\) does not fit slot 0.*\(4, 16\)"),
        ({"model.layers.0.self_attn.q_proj.lora_A": torch.zeros(5, 16)}, r"\(5, 16\) does not fit slot 0.*\(4, 16\)"),
        ({"model.layers.9.self_attn.q_proj.lora_A": torch.zeros(4, 16)}, r"layers\.9.*expects None"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(olmoe_backbone, tensors, message):
    with SlotModel(olmoe_backbone, [PLAN]) as model, pytest.raises(ModelError, match=message):
        model.load(0, tensors)


def test_a_model_takes_the_wide_products_for_its_tokens_and_gets_the_gradients_of_the_pairs(
    olmoe_backbone, monkeypatch
):
    let_run(monkeypatch, ())
    plans = [PLAN, PLAN.with_lora(rank=2, scale=2.0)]
    adapters = [random_adapter(olmoe_backbone.info, plan, seed) for seed, plan in enumerate(plans)]
    calls = []
    run = view.run_token_side
    monkeypatch.setattr(view, "run_token_side", lambda *args: calls.append(1) or run(*args))

    def gradients(least_routed):
        monkeypatch.setattr(token_side, "LEAST_ROUTED", least_routed)
        with SlotModel(olmoe_backbone, plans) as model:
            for slot, adapter in enumerate(adapters):
                model.load(slot, adapter)
            model.token_losses(batch_of([7, 4], [5, 6])).sum().backward()
            return {name: tensor.stored.grad for name, tensor in model.trainables.items()}

    pairs = gradients(2.0)
    assert not calls
    tokens = gradients(0.0)
    assert len(calls) == len(olmoe_backbone.moe)
    for name, expected in pairs.items():
        torch.testing.assert_close(tokens[name], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
