"""Which (token, expert) pairs a layer computes, sorted once by expert · S + slot.

Only real pairs are dispatched: padding tokens and the experts beyond a slot's active ones are
dropped before the first product, so a client with fewer active experts computes less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dispatch:
    """The sorted pairs of one layer.

    n is the number of pairs, N of tokens, k of columns of the routing, M of experts, S of slots.

    Attributes:
        token: [n] token of each sorted pair.
        pair: [n] its position in the flattened [N·k] routing.
        slot: [n] its slot.
        expert_ends: [M] int32, where each expert's pairs end.
        group_ends: [M·S] int32, where each (expert, slot) group's pairs end.
        row_of_pair: [n] row, in the sorted order, of each pair in the tokens' order.
        token_starts: [N] where each token's pairs start in `row_of_pair`.
        experts: M.
        slots: S.
    """

    token: Tensor
    pair: Tensor
    slot: Tensor
    expert_ends: Tensor
    group_ends: Tensor
    row_of_pair: Tensor
    token_starts: Tensor
    experts: int
    slots: int


def dispatch(indices: Tensor, slot_of_token: Tensor, keep: Tensor | None, experts: int, slots: int) -> Dispatch:
    """Sorts the pairs of a layer.

    Args:
        indices: [N, k] expert of each pair; M for a pair that is not active.
        slot_of_token: [N] slot of each token.
        keep: [N] bool, False for padding; None where every token is real.
        experts: M, number of experts.
        slots: S, number of slots.
    """
    top_k = indices.shape[1]
    active = indices < experts
    if keep is not None:
        active = active & keep[:, None]
    flat = active.reshape(-1)
    key = (indices * slots + slot_of_token[:, None]).reshape(-1)
    key = torch.where(flat, key, experts * slots)
    count = torch.zeros(experts * slots + 1, dtype=torch.int64, device=key.device)
    count = count.scatter_add_(0, key, torch.ones_like(key))
    group_ends = count[:-1].cumsum(0)
    in_token_order = flat.nonzero().squeeze(1)
    pairs = in_token_order.shape[0]
    pair = torch.sort(key, stable=True).indices[:pairs]
    row = torch.empty_like(key)
    row[pair] = torch.arange(pairs, device=key.device)
    per_token = active.sum(dim=1)
    token = pair // top_k
    return Dispatch(
        token=token,
        pair=pair,
        slot=slot_of_token[token],
        expert_ends=group_ends[slots - 1 :: slots].to(torch.int32),
        group_ends=group_ends.to(torch.int32),
        row_of_pair=row[in_token_order],
        token_starts=per_token.cumsum(0) - per_token,
        experts=experts,
        slots=slots,
    )


def gather(tokens: Tensor, plan: Dispatch) -> Tensor:
    """Returns the sorted pairs' rows [n, H] of the tokens' [N, H]."""
    return tokens.index_select(0, plan.token)


def combine(rows: Tensor, plan: Dispatch, weights: Tensor | None = None) -> Tensor:
    """Returns [N, H], each token's sum of its pairs' rows [n, H]; zero for a token without pairs.

    Args:
        rows: [n, H] in the sorted order.
        plan: The layer's dispatch.
        weights: [n] factor on each row, in the sorted order.
    """
    factor = None if weights is None else weights[plan.row_of_pair].to(rows.dtype)
    return torch.nn.functional.embedding_bag(
        plan.row_of_pair, rows, plan.token_starts, mode="sum", per_sample_weights=factor
    )
