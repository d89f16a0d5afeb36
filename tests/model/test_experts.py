"""The fused experts against a loop that forms W + s·BA, values and gradients, at awkward sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from fedguild.model.moe import dispatch as dispatch_module
from fedguild.model.moe.dispatch import dispatch
from fedguild.model.moe.experts import FrozenExperts, run_experts
from fedguild.model.moe.low_rank import prefers_blocks
from fedguild.model.plan import EXPERT_PROJECTIONS
from tests.oracles.experts import experts_with_lora

HIDDEN, WIDTH = 16, 8


@dataclass(frozen=True)
class Case:
    """A layer's routing: tokens of every slot, their active experts, which are padding."""

    tokens: tuple[int, ...]
    ranks: tuple[int, ...] = (4,)
    active: tuple[int, ...] = (2,)
    scales: tuple[float, ...] = (1.0,)
    experts: int = 6
    used: int = 6
    padding: tuple[int, ...] = ()
    lora: bool = True

    @property
    def slots(self) -> int:
        return len(self.tokens)

    @property
    def rank(self) -> int:
        """Rank of the storage, a multiple of 8 so that bf16 rows are 16 bytes apart."""
        return -(-max(self.ranks) // 8) * 8


CASES = {
    "one slot": Case((9,), (4,), (2,), (0.8,)),
    "without LoRA": Case((5, 4), (4, 4), (2, 2), (1.0, 1.0), lora=False),
    "rank one, one active expert": Case((5, 5), (1, 1), (1, 1), (2.0, 2.0)),
    "mixed ranks, scales and active experts": Case((6, 3, 7), (4, 1, 7), (3, 1, 2), (0.5, 2.0, 1.25)),
    "a slot without rows": Case((6, 0, 5), (4, 2, 3), (2, 1, 2), (1.0, 3.0, 0.5)),
    "experts without tokens": Case((6, 6), (4, 4), (2, 2), (1.0, 2.0), used=3),
    "one expert for all": Case((7, 5), (3, 5), (1, 1), (1.0, 2.0), experts=1, used=1),
    "padding": Case((8, 6), (4, 4), (2, 3), (1.0, 2.0), padding=(0, 5, 6, 7, 13)),
    "all padding but one token": Case((4, 5), (4, 4), (2, 2), (1.0, 2.0), padding=tuple(n for n in range(9) if n != 6)),
}


@dataclass
class Layer:
    """Random weights of a case in one dtype; `leaves` are what gradients are taken of."""

    case: Case
    tokens: Tensor
    weights: Tensor
    indices: Tensor
    slot: Tensor
    keep: Tensor | None
    frozen: tuple[Tensor, Tensor, Tensor]
    lora: dict[str, tuple[Tensor, Tensor]]
    scale: Tensor
    upstream: Tensor
    leaves: list[Tensor] = field(default_factory=list)


def build(case: Case, dtype: torch.dtype) -> Layer:
    rng = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).double()

    count, top_k = sum(case.tokens), max(case.active)
    slot = torch.arange(case.slots).repeat_interleave(torch.tensor(case.tokens))
    indices = torch.stack([torch.randperm(case.used, generator=rng)[:top_k] for _ in range(count)])
    beyond = torch.arange(top_k) >= torch.tensor(case.active)[slot][:, None]
    weights = torch.rand(count, top_k, generator=rng, dtype=torch.float64).to(dtype).double()
    keep = torch.ones(count, dtype=torch.bool)
    keep[list(case.padding)] = False
    lora = {}
    for name in EXPERT_PROJECTIONS if case.lora else ():
        inputs, outputs = (WIDTH, HIDDEN) if name == "down_proj" else (HIDDEN, WIDTH)
        down, up = (
            normal(case.slots, case.experts, case.rank, inputs),
            normal(case.slots, case.experts, outputs, case.rank),
        )
        for index, rank in enumerate(case.ranks):
            down[index, :, rank:], up[index, :, :, rank:] = 0.0, 0.0
        lora[name] = (down, up)
    layer = Layer(
        case,
        tokens=normal(count, HIDDEN),
        weights=weights.masked_fill(beyond, 0.0),
        indices=indices.masked_fill(beyond, case.experts),
        slot=slot,
        keep=keep if case.padding else None,
        frozen=(
            normal(case.experts, WIDTH, HIDDEN),
            normal(case.experts, WIDTH, HIDDEN),
            normal(case.experts, HIDDEN, WIDTH),
        ),
        lora=lora,
        scale=torch.tensor(case.scales, dtype=torch.float64),
        upstream=normal(count, HIDDEN),
    )
    layer.leaves = [layer.tokens, layer.weights, *(factor for pair in lora.values() for factor in pair)]
    return layer


def by_loop(layer: Layer) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of the oracle, in fp64."""
    for leaf in layer.leaves:
        leaf.requires_grad_()
    out = experts_with_lora(
        layer.tokens, layer.weights, layer.indices, layer.slot, layer.keep, layer.frozen, layer.lora, layer.scale
    )
    grads = torch.autograd.grad((out * layer.upstream).sum(), layer.leaves)
    return out.detach(), list(grads)


def by_view(layer: Layer, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of the package, its factors stored [M, S, r, in] and [M, S, r, out]."""
    case = layer.case
    leaves = [leaf.detach().to(dtype) for leaf in layer.leaves]
    if dtype is torch.bfloat16:
        leaves[1:] = [leaf.float() for leaf in leaves[1:]]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    stored = [
        factor.transpose(0, 1).contiguous() if index % 2 == 0 else factor.permute(1, 0, 3, 2).contiguous()
        for index, factor in enumerate(leaves[2:])
    ]
    pairs = tuple(zip(stored[0::2], stored[1::2], strict=True)) if case.lora else None
    gate, up, down = (weight.to(dtype) for weight in layer.frozen)
    frozen = FrozenExperts(torch.cat([gate, up], dim=1), down, _swiglu)
    plan = dispatch(layer.indices, layer.slot, layer.keep, case.experts, case.slots, blocks=True)
    scale = layer.scale[:, None].expand(case.slots, case.rank).contiguous() if case.lora else None
    out = run_experts(leaves[0], leaves[1], plan, frozen, pairs, scale)
    grads = torch.autograd.grad((out * layer.upstream.to(dtype)).sum(), leaves)
    return out.detach(), list(grads)


def _swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def worst(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.fixture(params=[0, 8, 32], ids=["groups", "blocks of 8", "blocks of 32"])
def layout(request, monkeypatch):
    """Forces one of the ways of the low-rank products."""
    monkeypatch.setattr(dispatch_module, "BLOCK_HEIGHTS", (request.param,) if request.param else ())
    monkeypatch.setattr(dispatch_module, "FILLER_LIMIT", 1000.0)


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str
)
def test_experts_equal_the_loop(case, dtype, tolerance):
    layer = build(case, dtype)
    expected, expected_grads = by_loop(layer)
    found, found_grads = by_view(layer, dtype)
    assert found.dtype is dtype
    assert worst(found, expected) < tolerance
    padded = torch.zeros(len(found), dtype=torch.bool)
    padded[list(case.padding)] = True
    assert not found[padded].any()
    beyond = layer.indices == case.experts
    for found_grad, expected_grad in zip(found_grads, expected_grads, strict=True):
        if found_grad.shape == beyond.shape:
            found_grad, expected_grad = found_grad.masked_fill(beyond, 0), expected_grad.masked_fill(beyond, 0)
        assert worst(found_grad, expected_grad) < tolerance


@pytest.mark.usefixtures("layout")
def test_the_zeros_beyond_a_slots_rank_get_no_gradient():
    layer = build(CASES["mixed ranks, scales and active experts"], torch.float32)
    _, grads = by_view(layer, torch.float32)
    for down, up in zip(grads[2::2], grads[3::2], strict=True):
        for slot, rank in enumerate(layer.case.ranks):
            assert down[slot, :, :rank].any()
            assert not down[slot, :, rank:].any()
            assert not up[slot, :, :, rank:].any()


@pytest.mark.usefixtures("layout")
def test_a_slots_gradients_come_from_its_own_tokens_only():
    layer = build(CASES["mixed ranks, scales and active experts"], torch.float64)
    layer.upstream[layer.slot != 1] = 0.0
    _, grads = by_view(layer, torch.float64)
    for factor in grads[2:]:
        assert factor[1].any()
        assert not factor[[0, 2]].any()


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("cpu", torch.float32, True), ("cpu", torch.float64, True), ("cpu", torch.bfloat16, False)],
)
def test_blocks_are_for_full_precision_on_a_cpu(device, dtype, expected):
    assert prefers_blocks(torch.zeros(1, 1, dtype=dtype, device=device)) is expected
