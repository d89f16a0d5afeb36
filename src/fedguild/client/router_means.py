"""Router probabilities of tokens, and means over each client's tokens: for losses and statistics of the routing."""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(logits: Tensor) -> Tensor:
    """Returns p [N, M], the softmax over all experts, in at least fp32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)


def token_means(values: Tensor, slot: Tensor, keep: Tensor | None, slots: int) -> Tensor:
    """Returns [S, ..], each slot's mean of `values` [N, ..] over its real tokens; 0 for a slot without any.

    Args:
        slot: [N] slot of each token.
        keep: [N] bool, False for padding; None if every token is real.
        slots: S.
    """
    real = torch.ones_like(slot) if keep is None else keep
    real = real.to(values.dtype).view(-1, *[1] * (values.dim() - 1))
    sums = values.new_zeros(slots, *values.shape[1:]).index_add(0, slot, values * real)
    return sums / real.new_zeros(slots, *real.shape[1:]).index_add(0, slot, real).clamp(min=1)
