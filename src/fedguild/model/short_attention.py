"""Attention of short rows in bf16 on a CPU, where torch's fused kernel takes several times as long as in fp32.

Its backward pass multiplies small blocks in bf16 outside of oneDNN: 52 ms a layer for 16 rows of 64 tokens and 9 heads,
where the same products by oneDNN take 8 (docs/experiments/bf16-on-a-cpu.md). Scores are rounded to bf16, as in
transformers' eager attention, and the softmax is fp32. Probabilities are computed again in the backward pass, so no
more is kept than by the fused kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LONGEST = 256
"""Tokens of the longest row for which whole products pay."""


def is_short(query: Tensor, key: Tensor, options: dict[str, Any]) -> bool:
    """Whether `short_attention` computes what transformers' sdpa attention computes with these options, but faster."""
    return (
        query.dtype is torch.bfloat16
        and query.device.type == "cpu"
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad)
        and 1 < query.shape[2] == key.shape[2] <= LONGEST
        and not options.get("dropout")
        and options.get("position_bias") is None
        and options.get("is_causal") is None
    )


def short_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Returns [B, T, heads, d'].

    Args:
        query: [B, heads, T, d].
        key: [B, key-value heads, T, d].
        value: [B, key-value heads, T, d'].
        mask: [B or 1, 1, T, T], true or 0 where a token is seen, or what is added to its score; None if the attention
            is causal.
        scale: Factor of the scores; None for 1 / √d.
    """
    batch, heads, tokens, width = query.shape
    shared, factor = key.shape[1], width**-0.5 if scale is None else scale
    if mask is None:
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    queries = query.reshape(batch * shared, heads // shared * tokens, width)
    keys, values = (states.reshape(batch * shared, tokens, states.shape[-1]) for states in (key, value))
    output: Tensor = _ShortAttention.apply(queries, keys, values, mask, batch, factor)  # type: ignore[no-untyped-call]
    return output.view(batch, heads, tokens, value.shape[-1]).transpose(1, 2).contiguous()


class _ShortAttention(torch.autograd.Function):
    """softmax(c q kᵀ) v for q [G, r T, d], k [G, T, d] and v [G, T, d'], G the key-value heads of all rows."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, batch: int, factor: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.batch, ctx.factor = batch, factor
        return _probabilities(query, key, mask, batch, factor).to(value.dtype) @ value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        (gradient,) = grads
        shares = _probabilities(query, key, mask, ctx.batch, ctx.factor)
        of_value = shares.to(value.dtype).transpose(1, 2) @ gradient
        of_shares = (gradient @ value.transpose(1, 2)).float()
        of_scores = torch._softmax_backward_data(of_shares, shares, -1, torch.float32).mul_(ctx.factor).to(query.dtype)
        return of_scores @ key, of_scores.transpose(1, 2) @ query, of_value, None, None, None


def _probabilities(query: Tensor, key: Tensor, mask: Tensor, batch: int, factor: float) -> Tensor:
    """Returns [G, r T, T] in fp32."""
    tokens = key.shape[1]
    scores = (query @ key.transpose(1, 2)).float().mul_(factor).view(batch, -1, tokens, tokens)
    if mask.dtype is torch.bool:
        scores.masked_fill_(~mask, torch.finfo(torch.float32).min)
    else:
        scores += mask
    return scores.softmax(dim=-1).view(query.shape[0], -1, tokens)
