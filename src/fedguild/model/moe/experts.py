"""The experts of one layer with LoRA of several slots, without ever forming W + BA.

One autograd function computes a whole layer. The frozen weights get no gradient; the low-rank
products are grouped by (expert, slot) (low_rank.py). The backward pass uses
<dy, W h> = <W^T dy, h>, so the unweighted outputs of the experts are never kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedguild.model.moe.dispatch import Dispatch, combine, gather
from fedguild.model.moe.low_rank import LowRank
from fedguild.model.moe.products import grouped_rows

Factors = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FrozenExperts:
    """A layer's frozen weights: gate_up [M, 2I, H], down [M, H, I], and h = gate(z) of z [n, 2I]."""

    gate_up: Tensor
    down: Tensor
    gate: Callable[[Tensor], Tensor]


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
    low_rank = LowRank.of(plan, scale.to(tokens.dtype)) if flat and scale is not None else None
    output: Tensor = _Experts.apply(tokens, weights, plan, frozen, low_rank, *flat)  # type: ignore[no-untyped-call]
    return output


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        plan: Dispatch,
        frozen: FrozenExperts,
        low_rank: LowRank | None,
        *factors: Tensor,
    ) -> Tensor:
        rows = gather(tokens, plan)
        inner = frozen.down.shape[-1]
        z = grouped_rows(rows, frozen.gate_up.transpose(1, 2), plan.expert_ends)
        lows: tuple[Tensor, ...] = ()
        if low_rank is not None:
            gate_a, gate_b, up_a, up_b, down_a, down_b = factors
            low_gate, low_up = low_rank.compress(rows, torch.cat([gate_a, up_a], dim=2)).chunk(2, dim=1)
            low_rank.add_rows(z[:, :inner], low_gate, gate_b)
            low_rank.add_rows(z[:, inner:], low_up, up_b)
            h = frozen.gate(z)
            low_down = low_rank.compress(h, down_a)
            y = grouped_rows(h, frozen.down.transpose(1, 2), plan.expert_ends)
            low_rank.add_rows(y, low_down, down_b)
            lows = (low_gate, low_up, low_down)
        else:
            h = frozen.gate(z)
            y = grouped_rows(h, frozen.down.transpose(1, 2), plan.expert_ends)
        ctx.plan, ctx.frozen, ctx.low_rank = plan, frozen, low_rank
        ctx.save_for_backward(rows if lows else rows[:0], weights, z, *lows, *factors)
        return combine(y, plan, weights.reshape(-1)[plan.active])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, frozen, low_rank = ctx.plan, ctx.frozen, ctx.low_rank
        rows, weights, z, *saved = ctx.saved_tensors
        lows, factors = saved[:3], saved[3:]
        dy = gather(grads[0].contiguous(), plan)
        with torch.enable_grad():
            z_leaf = z.detach().requires_grad_()
            h = frozen.gate(z_leaf)
        weight = weights.reshape(-1)[plan.pair].to(dy.dtype)[:, None]

        dh = grouped_rows(dy, frozen.down, plan.expert_ends)
        if low_rank is not None:
            gate_a, gate_b, up_a, up_b, down_a, down_b = factors
            d_low = low_rank.scaled(low_rank.rows(dy, down_b, transposed=True))
            low_rank.add_rows(dh, d_low, down_a)
            d_down_a = low_rank.outer(d_low.mul_(weight), h.detach())
            d_down_b = low_rank.outer(lows[2] * weight, dy)
        d_pair = (dh * h.detach()).sum(dim=1)[plan.row_of_pair]
        d_weights = torch.zeros_like(weights).reshape(-1).index_copy_(0, plan.active, d_pair.to(weights.dtype))

        (dz,) = torch.autograd.grad(h, z_leaf, dh.mul_(weight))
        d_rows = grouped_rows(dz, frozen.gate_up, plan.expert_ends)
        d_factors: tuple[Tensor | None, ...] = ()
        if low_rank is not None:
            inner = frozen.down.shape[-1]
            d_gate, d_up = dz[:, :inner], dz[:, inner:]
            d_low = low_rank.scaled(
                torch.cat(
                    [low_rank.rows(d_gate, gate_b, transposed=True), low_rank.rows(d_up, up_b, transposed=True)], dim=1
                )
            )
            low_rank.add_rows(d_rows, d_low, torch.cat([gate_a, up_a], dim=2))
            d_gate_a, d_up_a = low_rank.outer(d_low, rows).chunk(2, dim=1)
            products = (
                d_gate_a,
                low_rank.outer(lows[0], d_gate),
                d_up_a,
                low_rank.outer(lows[1], d_up),
                d_down_a,
                d_down_b,
            )
            d_factors = tuple(
                product.to(factor.dtype).reshape(factor.shape)
                for product, factor in zip(products, factors, strict=True)
            )
        d_tokens = combine(d_rows, plan)
        return (d_tokens, d_weights.view_as(weights), None, None, None, *d_factors)
