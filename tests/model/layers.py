"""One layer's experts with random routing: by the oracle's loop and by the package, at awkward sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedguild.model.info import EXPERT_PROJECTIONS
from fedguild.model.moe.dense import run_every_expert
from fedguild.model.moe.dispatch import dispatch
from fedguild.model.moe.experts import FrozenExperts, run_experts
from fedguild.model.moe.token_side import run_token_side
from tests.oracles.experts import adapted_experts

HIDDEN, WIDTH = 16, 8

Way = Literal["pairs", "dense", "tokens", "side by side"]
"""Every routed pair, every expert on every token, or the wide low-rank products for the tokens."""


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
    full: bool = False

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

FULL_CASES = {name: replace(case, lora=False, full=True) for name, case in CASES.items() if case.lora} | {
    "beside LoRA": replace(CASES["mixed ranks, scales and active experts"], full=True, padding=(2, 15)),
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
    delta: dict[str, Tensor]
    leaves: list[Tensor] = field(default_factory=list)


def widths(projection: str) -> tuple[int, int]:
    """Inputs and outputs of a projection."""
    return (WIDTH, HIDDEN) if projection == "down_proj" else (HIDDEN, WIDTH)


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
        inputs, outputs = widths(name)
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
        delta={
            name: normal(case.slots, case.experts, *reversed(widths(name)))
            for name in (EXPERT_PROJECTIONS if case.full else ())
        },
    )
    factors = [factor for pair in lora.values() for factor in pair]
    layer.leaves = [layer.tokens, layer.weights, *factors, *layer.delta.values()]
    return layer


def by_loop(layer: Layer) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of the oracle, in fp64."""
    for leaf in layer.leaves:
        leaf.requires_grad_()
    out = adapted_experts(
        layer.tokens,
        layer.weights,
        layer.indices,
        layer.slot,
        layer.keep,
        layer.frozen,
        layer.lora,
        layer.scale,
        layer.delta,
    )
    grads = torch.autograd.grad((out * layer.upstream).sum(), layer.leaves)
    return out.detach(), list(grads)


def by_view(
    layer: Layer, dtype: torch.dtype, *, way: Way = "pairs", trained: Sequence[int] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of the package, stored [M, S, r, in], [M, S, r, out] and [M, S, out, in].

    Args:
        layer: The layer.
        dtype: What it computes in.
        way: Which of the ways of a layer: `dense` needs a single slot, `tokens` needs LoRA.
        trained: Of which leaves gradients are taken; of all where None.
    """
    case = layer.case
    leaves = [leaf.detach().to(dtype) for leaf in layer.leaves]
    if dtype is torch.bfloat16:
        leaves[1:] = [leaf.float() for leaf in leaves[1:]]
    wanted = [leaf for index, leaf in enumerate(leaves) if trained is None or index in trained]
    for leaf in wanted:
        leaf.requires_grad_()
    stored = [
        factor.transpose(0, 1).contiguous() if index % 2 == 0 else factor.permute(1, 0, 3, 2).contiguous()
        for index, factor in enumerate(leaves[2 : 2 + 2 * len(layer.lora)])
    ]
    changes = [leaf.transpose(0, 1).contiguous() for leaf in leaves[2 + 2 * len(layer.lora) :]]
    pairs = tuple(zip(stored[0::2], stored[1::2], strict=True)) if case.lora else None
    gate, up, down = (weight.to(dtype) for weight in layer.frozen)
    frozen = FrozenExperts(torch.cat([gate, up], dim=1), down, _swiglu)
    scale = layer.scale[:, None].expand(case.slots, case.rank).contiguous() if case.lora else None
    if way == "dense":
        out = run_every_expert(
            leaves[0], leaves[1], layer.indices, layer.keep, case.experts, lambda: frozen, pairs, scale
        )
    else:
        blocks = way != "side by side"
        plan = dispatch(layer.indices, layer.slot, layer.keep, case.experts, case.slots, blocks)
        if way == "tokens":
            out = run_token_side(leaves[0], leaves[1], plan, case.tokens, lambda: frozen, pairs, scale)
        else:
            out = run_experts(leaves[0], leaves[1], plan, lambda: frozen, pairs, scale, tuple(changes) or None)
    grads = torch.autograd.grad((out * layer.upstream.to(dtype)).sum(), wanted)
    return out.detach(), list(grads)


def _swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def worst(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
