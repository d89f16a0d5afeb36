"""Dispatch of a layer's (token, expert) pairs, sorted once by expert · S + slot.

Only real pairs are dispatched: padding tokens and the experts beyond a slot's active ones are dropped before the first
product, so a client with fewer active experts computes less.

If it costs few extra rows, each (expert, slot) group is padded to whole blocks of equal height, so that the low-rank
products of all groups are one batched product (docs/decisions/0003).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_HEIGHTS = (32, 16, 8)
"""Numbers of rows in a block, best first."""
FILLER_LIMIT = 0.12
"""Largest number of filler rows that blocks may cost, as a fraction of the pairs."""


@dataclass(frozen=True)
class Dispatch:
    """The sorted pairs of one layer.

    n is the number of rows: the sorted pairs, and filler rows if there are blocks. N is the number
    of tokens, k of columns of the routing, M of experts, S of slots. A filler row repeats token 0
    and pair 0; `row_of_pair` never names it.

    Attributes:
        token: [n] token of each row.
        pair: [n] its position in the flattened [N·k] routing.
        slot: [n] its slot; S for filler.
        expert_ends: [M] int32, where each expert's rows end.
        group_ends: [M·S] int32, where each (expert, slot) group's rows end.
        row_of_pair: [pairs] row of each pair, the pairs in the tokens' order.
        active: [pairs] position of each pair in the flattened routing, in the tokens' order.
        token_starts: [N] where each token's pairs start in `row_of_pair`.
        experts: M.
        slots: S.
        block_height: Rows of a block; 0 without blocks.
        block_ends: [M·S] where each group's blocks end; None without blocks.
    """

    token: Tensor
    pair: Tensor
    slot: Tensor
    expert_ends: Tensor
    group_ends: Tensor
    row_of_pair: Tensor
    active: Tensor
    token_starts: Tensor
    experts: int
    slots: int
    block_height: int = 0
    block_ends: Tensor | None = None

    def expert_of_rows(self) -> Tensor:
        """Returns [n], the expert of every row."""
        sizes = self.expert_ends.diff(prepend=self.expert_ends.new_zeros(1))
        experts = torch.arange(self.experts, device=sizes.device)
        return experts.repeat_interleave(sizes, output_size=len(self.token))


def dispatch(
    indices: Tensor,
    slot_of_token: Tensor,
    keep: Tensor | None,
    experts: int,
    slots: int,
    blocks: bool = False,
    pairs: int | None = None,
) -> Dispatch:
    """Sorts the pairs of a layer; with `pairs` given and without blocks, the host does not wait for the device.

    Args:
        indices: [N, k] expert of each pair; M for a pair that is not active.
        slot_of_token: [N] slot of each token.
        keep: [N] bool, False for padding; None if every token is real.
        experts: M, number of experts.
        slots: S, number of slots.
        blocks: Whether groups may be filled up to whole blocks.
        pairs: Number of active pairs of real tokens; None if the host does not know it.
    """
    top_k = indices.shape[1]
    real = indices < experts
    if keep is not None:
        real = real & keep[:, None]
    flat = real.reshape(-1)
    key = (indices * slots + slot_of_token[:, None]).reshape(-1)
    key = torch.where(flat, key, experts * slots)
    count = torch.zeros(experts * slots + 1, dtype=torch.int64, device=key.device)
    count = count.scatter_add_(0, key, torch.ones_like(key))[:-1]
    if pairs is None:
        active = flat.nonzero().squeeze(1)
    elif pairs == flat.shape[0]:
        active = torch.arange(pairs, device=key.device)
    else:
        active = torch.nonzero_static(flat, size=pairs).squeeze(1)
    pair = torch.sort(key, stable=True).indices[: active.shape[0]]
    row = torch.arange(active.shape[0], device=key.device)
    ends = count.cumsum(0)
    height = _block_height(count, active.shape[0]) if blocks else 0
    if height:
        filled = (count + (height - 1)) // height * height
        row = row + (filled.cumsum(0) - filled - ends + count)[key[pair]]
        ends = filled.cumsum(0)
        pair = torch.zeros(int(ends[-1]), dtype=torch.int64, device=key.device).index_copy_(0, row, pair)
    token = pair // top_k
    slot = slot_of_token[token]
    if height:
        slot = torch.full_like(slot, slots).index_copy_(0, row, slot[row])
    per_token = real.sum(dim=1)
    return Dispatch(
        token=token,
        pair=pair,
        slot=slot,
        expert_ends=ends[slots - 1 :: slots].to(torch.int32, memory_format=torch.contiguous_format),
        group_ends=ends.to(torch.int32),
        row_of_pair=torch.empty_like(key).index_copy_(0, pair[row], row)[active],
        active=active,
        token_starts=per_token.cumsum(0) - per_token,
        experts=experts,
        slots=slots,
        block_height=height,
        block_ends=ends // height if height else None,
    )


def all_active(weights: Tensor, indices: Tensor, keep: Tensor | None, experts: int) -> tuple[Tensor, Tensor]:
    """Returns weights and indices [N, k] in which every pair has an expert, and weight 0 if it is not an active one.

    For a device whose host does not know the number of active pairs and would have to wait for it. A pair without an
    expert (M), or of a token that is not kept, gets one in turn; its output and its gradients are zero.
    """
    absent = indices >= experts
    if keep is not None:
        absent = absent | ~keep[:, None]
    in_turn = torch.arange(indices.numel(), device=indices.device).view_as(indices) % experts
    return weights.masked_fill(absent, 0.0), torch.where(absent, in_turn, indices)


def _block_height(count: Tensor, pairs: int) -> int:
    """Returns the rows of a block for groups of these sizes [G]; 0 if blocks need too much filler."""
    for height in BLOCK_HEIGHTS:
        if int((-count % height).sum()) <= FILLER_LIMIT * pairs:
            return height if pairs else 0
    return 0


def gather(tokens: Tensor, plan: Dispatch) -> Tensor:
    return tokens.index_select(0, plan.token)


def combine(rows: Tensor, plan: Dispatch, weights: Tensor | None = None) -> Tensor:
    """Returns [N, H], each token's sum of its pairs' rows; zero for a token without pairs.

    Args:
        rows: [n, H] in the sorted order.
        weights: [pairs] factor on each pair, the pairs in the tokens' order.
    """
    factor = None if weights is None else weights.to(rows.dtype)
    return torch.nn.functional.embedding_bag(
        plan.row_of_pair, rows, plan.token_starts, mode="sum", per_sample_weights=factor
    )
