"""The experts' LoRA with its wide products computed for every token instead of every (token, expert) pair.

Of the four low-rank products of an expert, two are as wide as the model: A of gate and up reads the tokens, and B of
down adds to the output of the tokens. If most experts are active, one large product of each slot's tokens with the
concatenated factors of all experts is faster than a small product for each (expert, slot) group, and it needs no
gathered rows (docs/decisions/0009). The two narrow ones, B of gate and up and A of down, are still computed for the
pairs. Grouped products are faster where FedGuild's kernels compute them (docs/decisions/0021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedguild.model.moe.dispatch import Dispatch, combine, gather
from fedguild.model.moe.experts import Factors, FrozenExperts, row_weights, weights_gradient
from fedguild.model.moe.low_rank import LowRank, stacked
from fedguild.model.moe.products import grouped_rows, runs_on_cpu
from fedguild.model.slot_products import add_slot_rows, slot_rows

LEAST_ROUTED = 0.5
"""Smallest share of all (token, expert) pairs that must be routed."""


def prefers_token_side(hidden: Tensor, plan: Dispatch) -> bool:
    """Whether a layer's wide low-rank products are faster for the tokens [N, H] than for its pairs."""
    full_precision = hidden.dtype in (torch.float32, torch.float64) and hidden.device.type == "cpu"
    many = plan.active.shape[0] >= LEAST_ROUTED * plan.experts * hidden.shape[0]
    return full_precision and many and not runs_on_cpu(hidden)


def run_token_side(
    tokens: Tensor,
    weights: Tensor,
    plan: Dispatch,
    rows_per_slot: tuple[int, ...],
    frozen: Callable[[], FrozenExperts],
    lora: tuple[Factors, ...],
    scale: Tensor,
) -> Tensor:
    """Returns the routed output [N, H] of a layer, as `run_experts` does.

    Args:
        tokens: [N, H] the layer's input, slot-major.
        weights: [N, k] routing weights (times the output scale, if there is one).
        rows_per_slot: Each slot's share of the tokens, in any unit; N is a multiple of their sum.
        lora: The factors A [M, S, r, in] and B [M, S, r, out] of every projection, down last.
        scale: [S, r] LoRA's scale of each slot's ranks.
    """
    factors = [(down.to(tokens.dtype), up.to(tokens.dtype)) for down, up in lora]
    *inner, (down, up) = factors
    low = slot_rows(tokens, _side_by_side(stacked([a for a, _ in inner])), rows_per_slot)
    low_rank = LowRank.of(plan, scale.to(tokens.dtype))
    cell = _cells(plan)
    output, low_out = _TokenSide.apply(tokens, weights, low, plan, cell, frozen, low_rank, down, *(b for _, b in inner))  # type: ignore[no-untyped-call]
    total: Tensor = add_slot_rows(output, low_out, _side_by_side(up).transpose(1, 2), rows_per_slot)
    return total


class _TokenSide(torch.autograd.Function):
    """The computation between the two wide products, from `low` [N, M·p·r] to w · s A h [N, M·r]."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        low: Tensor,
        plan: Dispatch,
        cell: Tensor,
        frozen: Callable[[], FrozenExperts],
        low_rank: LowRank,
        down: Tensor,
        *ups: Tensor,
    ) -> tuple[Tensor, Tensor]:
        own = frozen()
        z = grouped_rows(gather(tokens, plan), own.gate_up.transpose(1, 2), plan.expert_ends)
        low_in = low_rank.scaled(low.view(-1, low.shape[1] // plan.experts).index_select(0, cell))
        for part, part_low, up in zip(z.chunk(len(ups), dim=1), low_in.chunk(len(ups), dim=1), ups, strict=True):
            low_rank.add_rows(part, part_low, up)
        h = own.activated(z, plan.expert_of_rows)
        y = grouped_rows(h, own.down.transpose(1, 2), plan.expert_ends)
        of_pairs = weights.reshape(-1)[plan.active]
        low_out = low_rank.compress(h, [down])[plan.row_of_pair] * of_pairs.to(h.dtype)[:, None]
        ctx.plan, ctx.cell, ctx.frozen, ctx.low_rank = plan, cell, frozen, low_rank
        ctx.save_for_backward(weights, z, low_in, down, *ups)
        return combine(y, plan, of_pairs), _scattered(low_out, plan, cell, len(tokens))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, cell, own, low_rank = ctx.plan, ctx.cell, ctx.frozen(), ctx.low_rank
        weights, z, low_in, down, *ups = ctx.saved_tensors
        needs_tokens, needs_low, needs_ups = ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[8:]
        with torch.enable_grad():
            z_leaf = z.detach().requires_grad_()
            h = own.activated(z_leaf, plan.expert_of_rows)
        weight = row_weights(weights, plan).to(h.dtype)[:, None]

        dh = grouped_rows(gather(grads[0].contiguous(), plan), own.down, plan.expert_ends)
        d_low = low_rank.scaled(grads[1].reshape(-1, down.shape[2]).index_select(0, cell))
        low_rank.add_rows(dh, d_low, down)
        d_down = low_rank.outer(d_low.mul_(weight), h.detach()).view_as(down) if ctx.needs_input_grad[7] else None
        d_weights = weights_gradient(weights, plan, dh, h.detach())

        (dz,) = torch.autograd.grad(h, z_leaf, dh.mul_(weight))
        d_tokens = combine(grouped_rows(dz, own.gate_up, plan.expert_ends), plan) if needs_tokens else None
        parts, lows = dz.chunk(len(ups), dim=1), low_in.chunk(len(ups), dim=1)
        d_low_in = None
        if needs_low:
            each = [low_rank.rows(part, up, transposed=True) for part, up in zip(parts, ups, strict=True)]
            d_low_rows = low_rank.scaled(torch.cat(each, dim=1))
            d_low_in = _scattered(d_low_rows[plan.row_of_pair], plan, cell, len(grads[0]))
        d_ups = [
            low_rank.outer(low, part).view_as(up) if wanted else None
            for low, part, up, wanted in zip(lows, parts, ups, needs_ups, strict=True)
        ]
        return (d_tokens, d_weights, d_low_in, None, None, None, None, d_down, *d_ups)


def _cells(plan: Dispatch) -> Tensor:
    """Returns [n], token · M + expert of every row."""
    return plan.token * plan.experts + plan.expert_of_rows()


def _scattered(of_pairs: Tensor, plan: Dispatch, cell: Tensor, tokens: int) -> Tensor:
    """Returns [N, M·a], the values [pairs, a] at their token and expert, 0 elsewhere."""
    values = of_pairs.new_zeros(tokens * plan.experts, of_pairs.shape[1])
    return values.index_copy_(0, cell[plan.row_of_pair], of_pairs).view(tokens, -1)


def _side_by_side(factor: Tensor) -> Tensor:
    """Returns the experts' factor [M, S, r, a] as one matrix of each slot, [S, M·r, a]."""
    return factor.transpose(0, 1).flatten(1, 2)
