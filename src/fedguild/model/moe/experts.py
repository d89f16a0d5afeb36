"""The experts of one layer with LoRA of several slots, without ever forming W + BA.

One autograd function computes a whole layer. The frozen weights get no gradient; the low-rank
products are grouped either by (expert, slot), or by expert with all slots' ranks side by side
and masked, whichever is faster for the shapes at hand (docs/decisions/0003). The backward pass
uses <dy, W h> = <W^T dy, h>, so the unweighted outputs of the experts are never kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedguild.model.moe.dispatch import Dispatch, combine, gather
from fedguild.model.moe.products import grouped_outer, grouped_rows

Factors = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FrozenExperts:
    """A layer's frozen weights: gate_up [M, 2I, H], down [M, H, I], and h = gate(z) of z [n, 2I]."""

    gate_up: Tensor
    down: Tensor
    gate: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LowRankLayout:
    """How a layer's low-rank products are grouped.

    Attributes:
        ends: [G] int32, where each group's rows end.
        factor: [n, w] LoRA's scale for each row and rank, 0 where a rank is another slot's.
        groups: G, either M·S groups of width r or M groups of width S·r.
    """

    ends: Tensor
    factor: Tensor
    groups: int

    @classmethod
    def choose(cls, plan: Dispatch, rank: int, scale: Tensor, concatenated: bool) -> LowRankLayout:
        """Returns the layout of a dispatch; `scale` [S, r] is LoRA's scale of each slot's ranks."""
        if not concatenated or plan.slots == 1:
            return cls(plan.group_ends, scale.index_select(0, plan.slot), plan.experts * plan.slots)
        own = torch.eye(plan.slots, dtype=scale.dtype, device=scale.device)
        table = (own[:, :, None] * scale[None]).reshape(plan.slots, plan.slots * rank)
        return cls(plan.expert_ends, table.index_select(0, plan.slot), plan.experts)

    def matrices(self, stored: Tensor) -> Tensor:
        """Returns the stored factors [M, S, r, k] as [G, w, k], without a copy."""
        return stored.view(self.groups, -1, stored.shape[-1])


def prefers_concatenation(pairs: int, experts: int, slots: int, rank: int, width: int) -> bool:
    """Whether to group by expert with the slots' ranks side by side.

    It multiplies the low-rank work by the number of slots but needs slots times fewer products,
    which pays where the groups of one expert and one slot have few rows.
    """
    return slots > 1 and slots * rank <= width and pairs < 48 * experts * slots


def run_experts(
    tokens: Tensor,
    weights: Tensor,
    plan: Dispatch,
    frozen: FrozenExperts,
    lora: tuple[Factors, Factors, Factors] | None,
    scale: Tensor | None,
) -> Tensor:
    """Returns the routed output [N, H] of a layer.

    Args:
        tokens: [N, H] the layer's input.
        weights: [N, k] routing weights (times the output scale, where there is one).
        plan: The layer's dispatch.
        frozen: The layer's frozen weights.
        lora: (A [M, S, r, in], B [M, S, r, out]) of gate, up and down; None without LoRA.
        scale: [S, r] LoRA's scale of each slot's ranks.
    """
    flat = () if lora is None else tuple(factor for pair in lora for factor in pair)
    layout = None
    if lora is not None and scale is not None:
        experts, slots, rank, _ = lora[0][0].shape
        inner = frozen.down.shape[-1]
        concatenated = prefers_concatenation(plan.token.shape[0], experts, slots, rank, inner)
        layout = LowRankLayout.choose(plan, rank, scale.to(tokens.dtype), concatenated)
    output: Tensor = _Experts.apply(tokens, weights, plan, frozen, layout, *flat)  # type: ignore[no-untyped-call]
    return output


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        plan: Dispatch,
        frozen: FrozenExperts,
        layout: LowRankLayout | None,
        *factors: Tensor,
    ) -> Tensor:
        rows = gather(tokens, plan)
        inner = frozen.down.shape[-1]
        z = grouped_rows(rows, frozen.gate_up.transpose(1, 2), plan.expert_ends)
        lows: tuple[Tensor, ...] = ()
        if layout is not None:
            gate_a, gate_b, up_a, up_b, down_a, down_b = (layout.matrices(f.to(rows.dtype)) for f in factors)
            low_gate, low_up = _compress(rows, torch.cat([gate_a, up_a], dim=1), layout).chunk(2, dim=1)
            z[:, :inner] += grouped_rows(low_gate, gate_b, layout.ends)
            z[:, inner:] += grouped_rows(low_up, up_b, layout.ends)
            h = frozen.gate(z)
            low_down = _compress(h, down_a, layout)
            y = grouped_rows(h, frozen.down.transpose(1, 2), plan.expert_ends)
            y += grouped_rows(low_down, down_b, layout.ends)
            lows = (low_gate, low_up, low_down)
        else:
            h = frozen.gate(z)
            y = grouped_rows(h, frozen.down.transpose(1, 2), plan.expert_ends)
        ctx.plan, ctx.frozen, ctx.layout = plan, frozen, layout
        ctx.save_for_backward(rows if lows else rows[:0], weights, z, *lows, *factors)
        return combine(y, plan, weights.reshape(-1)[plan.pair])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, frozen, layout = ctx.plan, ctx.frozen, ctx.layout
        rows, weights, z, *saved = ctx.saved_tensors
        lows, factors = saved[:3], list(saved[3:])
        dy = gather(grads[0].contiguous(), plan)
        with torch.enable_grad():
            z_leaf = z.detach().requires_grad_()
            h = frozen.gate(z_leaf)
        weight = weights.reshape(-1)[plan.pair].to(dy.dtype)[:, None]

        dh = grouped_rows(dy, frozen.down, plan.expert_ends)
        if layout is not None:
            gate_a, gate_b, up_a, up_b, down_a, down_b = (layout.matrices(f.to(dy.dtype)) for f in factors)
            d_low = grouped_rows(dy, down_b.transpose(1, 2), layout.ends).mul_(layout.factor)
            dh += grouped_rows(d_low, down_a, layout.ends)
            d_down_a = grouped_outer(d_low.mul_(weight), h.detach(), layout.ends)
            d_down_b = grouped_outer(lows[2] * weight, dy, layout.ends)
        d_pair = (dh * h.detach()).sum(dim=1)
        d_weights = torch.zeros_like(weights).reshape(-1).index_copy_(0, plan.pair, d_pair.to(weights.dtype))

        (dz,) = torch.autograd.grad(h, z_leaf, dh.mul_(weight))
        d_rows = grouped_rows(dz, frozen.gate_up, plan.expert_ends)
        d_factors: tuple[Tensor | None, ...] = ()
        if layout is not None:
            inner = frozen.down.shape[-1]
            d_gate, d_up = dz[:, :inner], dz[:, inner:]
            d_low = torch.cat(
                [
                    grouped_rows(d_gate, gate_b.transpose(1, 2), layout.ends).mul_(layout.factor),
                    grouped_rows(d_up, up_b.transpose(1, 2), layout.ends).mul_(layout.factor),
                ],
                dim=1,
            )
            d_rows += grouped_rows(d_low, torch.cat([gate_a, up_a], dim=1), layout.ends)
            d_gate_a, d_up_a = grouped_outer(d_low, rows, layout.ends).chunk(2, dim=1)
            products = (
                d_gate_a,
                grouped_outer(lows[0], d_gate, layout.ends),
                d_up_a,
                grouped_outer(lows[1], d_up, layout.ends),
                d_down_a,
                d_down_b,
            )
            d_factors = tuple(
                product.to(factor.dtype).reshape(factor.shape)
                for product, factor in zip(products, factors, strict=True)
            )
        d_tokens = combine(d_rows, plan)
        return (d_tokens, d_weights.view_as(weights), None, None, None, *d_factors)


def _compress(rows: Tensor, down: Tensor, layout: LowRankLayout) -> Tensor:
    """Returns scale · A x of every row, [n, w], for one A or for several side by side."""
    low = grouped_rows(rows, down.transpose(1, 2), layout.ends)
    width = layout.factor.shape[1]
    low.view(low.shape[0], -1, width).mul_(layout.factor[:, None])
    return low
