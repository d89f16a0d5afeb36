"""Every expert of one slot on every token: a few large products instead of a small one for each expert.

If a layer has few tokens and at least half of its experts are active for each token, sorting the pairs and calling a
product for each expert costs more than the unnecessary products (docs/decisions/0008). An expert that a token was not
routed to has weight 0 in its output and gets exactly no gradient from it. Grouped products are faster where FedGuild's
kernel computes them (docs/decisions/0021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedguild.model.frozen_linear import frozen_product
from fedguild.model.moe.experts import Factors, FrozenExperts
from fedguild.model.moe.products import runs_on_cpu

LEAST_ACTIVE = 0.5
"""Smallest share of the experts that must be active for a token."""
SMALL = 2_200_000
"""Multiplications of an expert's routed rows with one projection up to which the cost of the calls dominates."""


def prefers_dense(hidden: Tensor, top_k: int, experts: int, size: int, slots: int) -> bool:
    """Whether a layer runs faster with every expert on every token.

    Args:
        hidden: [N, H] the layer's input.
        top_k: k, the largest number of active experts of a token.
        experts: M.
        size: Number of entries in one projection of an expert, H·I.
        slots: S; the factors of several slots differ, so there must be one.
    """
    full_precision = hidden.dtype in (torch.float32, torch.float64) and hidden.device.type == "cpu"
    small = hidden.shape[0] * top_k * size <= SMALL * experts
    fits = full_precision and slots == 1 and top_k >= LEAST_ACTIVE * experts and small
    return fits and not runs_on_cpu(hidden)


def run_every_expert(
    tokens: Tensor,
    weights: Tensor,
    indices: Tensor,
    keep: Tensor | None,
    experts: int,
    frozen: Callable[[], FrozenExperts],
    lora: tuple[Factors, ...] | None,
    scale: Tensor | None,
) -> Tensor:
    """Returns the routed output [N, H] of a layer, as `run_experts` does for a single slot.

    Args:
        tokens: [N, H] the layer's input.
        weights: [N, k] routing weights (times the output scale, if there is one).
        indices: [N, k] expert of each weight; M for one that is not active.
        keep: [N] bool, False for padding; None where every token is real.
        experts: M.
        lora: The factors A [M, 1, r, in] and B [M, 1, r, out] of every projection, down last; None without LoRA.
        scale: [1, r] LoRA's scale of the ranks.
    """
    factors = () if lora is None else tuple(factor.squeeze(1).to(tokens.dtype) for pair in lora for factor in pair)
    of_experts = shares(weights, indices, keep, experts)
    output: Tensor = _EveryExpert.apply(tokens, of_experts.to(tokens.dtype), frozen, scale, *factors)  # type: ignore[no-untyped-call]
    return output


def shares(weights: Tensor, indices: Tensor, keep: Tensor | None, experts: int) -> Tensor:
    """Returns [N, M], each token's weight of every expert, 0 for one that it is not routed to."""
    kept = weights if keep is None else weights.masked_fill(~keep[:, None], 0.0)
    return kept.new_zeros(len(kept), experts + 1).scatter(1, indices, kept)[:, :experts]


class _EveryExpert(torch.autograd.Function):
    """Layout: [N, M·a] in memory, with each expert's a values adjacent; `_by_expert` views it as [M, N, a]."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        shares: Tensor,
        frozen: Callable[[], FrozenExperts],
        scale: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        own, experts = frozen(), shares.shape[1]
        z = frozen_product(tokens, own.gate_up.flatten(0, 1))
        lows: list[Tensor] = []
        if factors and scale is not None:
            downs, ups = factors[0:-2:2], factors[1:-2:2]
            lows = [_scaled(tokens @ down.flatten(0, 1).t(), scale) for down in downs]
            for part, low, up in zip(_by_expert(z, experts).chunk(len(ups), dim=2), lows, ups, strict=True):
                part.baddbmm_(_by_expert(low, experts), up)
        trained = any(ctx.needs_input_grad) and not torch.is_inference_mode_enabled()
        with torch.set_grad_enabled(trained):
            z_leaf = z.view(-1, own.gate_up.shape[1]).detach().requires_grad_(trained)
            h = own.activated(z_leaf, lambda: torch.arange(experts, device=z.device).repeat(len(tokens)))
        weighted = (h.detach() * shares.reshape(-1, 1)).view(len(tokens), -1)
        w_down = _side_by_side(own.down)
        y = frozen_product(weighted, w_down)
        if factors and scale is not None:
            low = torch.bmm(_by_expert(weighted, experts), factors[-2].transpose(1, 2)).transpose(0, 1).flatten(1)
            y.addmm_(_scaled(low, scale), factors[-1].flatten(0, 1))
            lows.append(low)
        ctx.frozen, ctx.inner = frozen, (z_leaf, h, w_down)
        ctx.save_for_backward(tokens, shares, scale, weighted, *lows, *factors)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own, dy, (z_leaf, h, w_down) = ctx.frozen(), grads[0].contiguous(), ctx.inner
        tokens, shares, scale, weighted, *saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        experts, projections = shares.shape[1], len(needed) // 2
        lows, factors = saved[:projections], saved[projections:]
        gradients: list[Tensor | None] = [None] * len(needed)

        dh = frozen_product(dy, w_down.t())
        if needed:
            down, up = factors[-2:]
            d_low = _by_expert(_scaled(dy @ up.flatten(0, 1).t(), scale), experts)
            _by_expert(dh, experts).baddbmm_(d_low, down)
            if needed[-2]:
                gradients[-2] = torch.bmm(d_low.transpose(1, 2), _by_expert(weighted, experts))
            if needed[-1]:
                gradients[-1] = (lows[-1].t() @ dy).view_as(up)
        dh = dh.view_as(h)
        d_shares = (dh * h.detach()).sum(dim=1).view_as(shares)

        (dz,) = torch.autograd.grad(h, z_leaf, dh.mul_(shares.reshape(-1, 1)), retain_graph=True)
        dz = dz.view(len(dy), -1)
        d_tokens = frozen_product(dz, own.gate_up.flatten(0, 1).t()) if ctx.needs_input_grad[0] else None
        parts = _by_expert(dz, experts).chunk(own.input_projections, dim=2)
        for place, (part, low) in enumerate(zip(parts, lows[:-1], strict=True) if needed else ()):
            down, up = factors[2 * place : 2 * place + 2]
            d_low = _scaled(torch.bmm(part, up.transpose(1, 2)).transpose(0, 1).flatten(1), scale)
            if d_tokens is not None:
                d_tokens.addmm_(d_low, down.flatten(0, 1))
            if needed[2 * place]:
                gradients[2 * place] = (d_low.t() @ tokens).view_as(down)
            if needed[2 * place + 1]:
                gradients[2 * place + 1] = torch.bmm(_by_expert(low, experts).transpose(1, 2), part)
        return (d_tokens, d_shares, None, None, *gradients)


def _by_expert(values: Tensor, experts: int) -> Tensor:
    view: Tensor = values.unflatten(1, (experts, -1)).transpose(0, 1)
    return view


def _side_by_side(down: Tensor) -> Tensor:
    """Returns a copy of the experts' W [M, H, I] as one matrix [H, M·I]."""
    return down.transpose(0, 1).flatten(1)


def _scaled(low: Tensor, scale: Tensor) -> Tensor:
    """Multiplies [N, …·r] by LoRA's scale [1, r], in place."""
    low.unflatten(1, (-1, scale.shape[1])).mul_(scale)
    return low
