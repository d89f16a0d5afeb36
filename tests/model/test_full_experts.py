"""Experts trained in full: the kernel against a loop, whole models against merged weights."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fedguild.data.batches import Encoded, SlotBatch, collate
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.moe import dispatch as dispatch_module
from fedguild.model.moe import products
from fedguild.model.moe.dispatch import dispatch
from fedguild.model.moe.experts import FrozenExperts, run_experts
from fedguild.model.moe.full import FullChange
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import MOE_FAMILIES, PAD, random_rows, tiny_backbone, tiny_model
from tests.model.kernels import let_run
from tests.model.layers import FULL_CASES, build, by_loop, by_view, worst
from tests.model.merged import assert_equal_to_merged

FULL = AdapterPlan((FullExperts(),))


@pytest.mark.parametrize("case", FULL_CASES.values(), ids=FULL_CASES.keys())
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str
)
@pytest.mark.parametrize("way", ["groups", "blocks of 8", "oneDNN"])
def test_the_kernel_equals_the_loop(case, dtype, tolerance, way, monkeypatch):
    monkeypatch.setattr(dispatch_module, "BLOCK_HEIGHTS", (8,) if way == "blocks of 8" else ())
    monkeypatch.setattr(dispatch_module, "FILLER_LIMIT", 1000.0)
    if way == "oneDNN":
        monkeypatch.setattr(products, "WORTHWHILE", 0)
    layer = build(case, dtype)
    expected, expected_grads = by_loop(layer)
    found, found_grads = by_view(layer, dtype)
    assert found.dtype is dtype
    assert worst(found, expected) < tolerance
    assert not found[list(case.padding)].any()
    beyond = layer.indices == case.experts
    found_grads[1], expected_grads[1] = found_grads[1].masked_fill(beyond, 0), expected_grads[1].masked_fill(beyond, 0)
    for found_grad, expected_grad in zip(found_grads, expected_grads, strict=True):
        assert worst(found_grad, expected_grad) < tolerance


@pytest.mark.parametrize("groups", [6, 1022, 1024, 2048])
@pytest.mark.parametrize(("hidden", "width"), [(32, 24), (32, 20), (20, 24), (9, 7)])
def test_the_products_of_a_hopper_gpu_are_such_as_it_takes(hidden, width, groups, monkeypatch):
    """Those of torch have rows of 16 bytes and fewer than 1,024 groups; all others are our kernel's."""
    segmented = pytest.importorskip("fedguild.model.kernels.segmented", reason="Triton is there for Linux only")
    let_run(monkeypatch, {"grouped"}, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    ours, theirs = [], []

    def by_torch(left, right, offs):
        theirs.append((left, right, offs))
        groups_first = [len(offs)] if right.dim() == 2 else []
        return left.new_empty(*groups_first, left.shape[0], right.shape[-1])

    def rows_by_kernel(rows, matrices, segments, *, total=None):
        ours.append((rows, matrices))
        return rows.new_empty(rows.shape[0], matrices[0].shape[2]) if total is None else total

    def outer_by_kernel(left, right, segments):
        ours.append((left, right))
        return left.new_empty(len(segments.ends), left.shape[1], right.shape[1])

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", by_torch)
    monkeypatch.setattr(segmented, "segmented_rows", rows_by_kernel)
    monkeypatch.setattr(segmented, "segmented_outer", outer_by_kernel)
    with FakeTensorMode():
        on = {"device": "cuda", "dtype": torch.bfloat16}
        ends = torch.empty(groups, device="cuda", dtype=torch.int32)
        rows, total, weight = torch.empty(50, hidden, **on), torch.empty(50, 2 * width, **on), torch.empty(50, 1, **on)
        changes = [torch.empty(groups // 2, 2, width, hidden, **on) for _ in range(2)]
        change = FullChange(ends)
        change.add(total, rows, changes)
        _, gradients = change.back(torch.empty_like(rows), total, rows, changes, None, weight, (True, True))
    assert [tuple(gradient.shape) for gradient in gradients] == [(groups, width, hidden)] * 2
    assert len(ours) + len(theirs) == 6
    suits = groups < 1024 and hidden % 8 == width % 8 == 0
    assert len(theirs) == (6 if suits else 0)
    for left, right, offs in theirs:
        assert len(offs) < 1024
        for operand in (left, right):
            assert all(stride == 1 or stride * 2 % 16 == 0 for stride in operand.stride())
            assert operand.storage_offset() * 2 % 16 == 0


def test_experts_without_a_gate_equal_their_formula():
    """y = w (V + D_v) relu((U + D_u) x), as SwitchTransformers' experts; three experts, the last without tokens."""
    rng = torch.Generator().manual_seed(3)
    leaves = [
        torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()
        for shape in ((5, 4), (5, 1), (3, 2, 6, 4), (3, 2, 4, 6))
    ]
    tokens, weights, d_up, d_down = leaves
    up, down = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((3, 6, 4), (3, 4, 6)))
    indices, slot = torch.tensor([[1], [0], [0], [1], [1]]), torch.tensor([0, 0, 1, 1, 1])
    plan = dispatch(indices, slot, None, experts=3, slots=2)
    frozen = FrozenExperts(up, down, torch.relu)
    found = run_experts(tokens, weights, plan, lambda: frozen, None, None, (d_up, d_down))
    expected = torch.stack(
        [
            weights[n, 0] * (down[e] + d_down[e, s]) @ torch.relu((up[e] + d_up[e, s]) @ tokens[n])
            for n, (e, s) in enumerate(zip(indices.flatten().tolist(), slot.tolist(), strict=True))
        ]
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(5, 4, generator=rng, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((found * upstream).sum(), leaves),
        torch.autograd.grad((expected * upstream).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def batch_of(lengths: list[list[int]]) -> SlotBatch:
    rows = [[Encoded(tuple(ids), 2) for ids in random_rows(each, seed)] for seed, each in enumerate(lengths)]
    return collate(rows, PAD)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_slots_equal_their_merged_models(family):
    """Mixed active experts, a slot without rows, LoRA on the routers."""
    plans = [AdapterPlan((Lora(1, 1.0, ("router",)), FullExperts()), active) for active in (2, None, 3)]
    backbone, plain = (make(family, dtype=torch.float64) for make in (tiny_backbone, tiny_model))
    assert_equal_to_merged(backbone, plain, plans, [[7, 5], [], [9]], near=1e-5)


def test_deepseek_with_full_experts_and_full_routers():
    """LoRA on the shared experts, group-limited routing on logits with a term added."""
    backbone = tiny_backbone("deepseek_v2 grouped", dtype=torch.float64)
    (layer,) = backbone.moe
    assert any(".shared_experts." in linear.name for linear in backbone.info.linears)
    parts = (Lora(1, 1.0, ("mlp",)), FullExperts(), FullRouter())
    plans = [AdapterPlan(parts, active) for active in (4, 2)]
    assert_equal_to_merged(
        backbone, tiny_model("deepseek_v2 grouped", dtype=torch.float64), plans, [[7, 5], [9]], near=1e-5
    )
    assert not layer.logit_terms
    assert layer.expert_delta is None


def test_deepseek_keeps_to_its_groups_on_changed_logits():
    """A term that lifts one expert of every group above all others: of four groups a token may use two."""
    backbone = tiny_backbone("deepseek_v2 grouped")
    (layer,) = backbone.moe
    lifted = torch.tensor([9.0, 0.0] * 4)
    seen = []
    with SlotModel(backbone, [FULL]) as model:
        layer.logit_terms.append(lambda hidden: lifted.expand(len(hidden), 8))
        layer.observers.append(seen.append)
        model.token_losses(batch_of([[9]]))
    (routing,) = seen
    per_group = layer.info.num_experts // layer.rule.groups
    assert (layer.rule.groups, layer.rule.groups_kept, per_group) == (4, 2, 2)
    for experts in routing.indices.tolist():
        groups = {expert // per_group for expert in experts}
        assert set(experts) == {2 * group for group in groups} | {2 * group + 1 for group in groups}
        assert len(groups) == 2
