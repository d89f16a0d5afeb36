"""LoRA of a linear layer for several slots, added to the layer's own output in place.

For devices other than a CPU. s · A is cast once until A changes, not once a pass. B's product is added to the frozen
output by the product itself, with no tensor of that size in between. One autograd function replaces six operations. A
CPU adds the product of `through_factors`, which rounds in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedguild.model.moe.casts import Casts
from fedguild.model.slot_products import add_to_slot_rows, outer_of_slots, rows_of_slots


def add_low_rank(
    output: Tensor, hidden: Tensor, down: Tensor, up: Tensor, scale: Tensor, rows: tuple[int, ...], casts: Casts
) -> Tensor:
    """Adds s · B A x of every row to a linear layer's output, in place, and returns it.

    Args:
        output: [..., out], contiguous; nothing else may read its old values.
        hidden: x, [..., in], slot-major.
        down: A, [S, r, in].
        up: B, [S, out, r].
        scale: [S] LoRA's scale.
        rows: Rows of each slot, in any unit that divides `hidden`'s leading size.
        casts: The factors in the dtype of `hidden`.
    """
    used = casts.of(down, hidden.dtype, scale[:, None, None]), casts.of(up, hidden.dtype)
    total: Tensor = _AddLowRank.apply(output, hidden, scale, rows, used, down, up)  # type: ignore[no-untyped-call]
    return total


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        hidden: Tensor,
        scale: Tensor,
        rows: tuple[int, ...],
        used: tuple[Tensor, Tensor],
        down: Tensor,
        up: Tensor,
    ) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        low = rows_of_slots(flat, used[0], rows)
        add_to_slot_rows(output.view(-1, output.shape[-1]), low, used[1], rows)
        ctx.mark_dirty(output)
        ctx.save_for_backward(flat, low, scale, *used)
        ctx.rows, ctx.shape, ctx.dtypes = rows, hidden.shape, (down.dtype, up.dtype)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, low, scale, down, up = ctx.saved_tensors
        needs = ctx.needs_input_grad
        needs_hidden, needs_down, needs_up = needs[1], needs[5], needs[6]
        of_output = grads[0].reshape(-1, grads[0].shape[-1])
        d_hidden = d_down = d_up = None
        if needs_hidden or needs_down:
            d_low = rows_of_slots(of_output, up.transpose(1, 2), ctx.rows)
        if needs_hidden:
            d_hidden = rows_of_slots(d_low, down.transpose(1, 2), ctx.rows).view(ctx.shape)
        if needs_down:
            d_down = outer_of_slots(d_low, flat, ctx.rows).to(ctx.dtypes[0]).mul_(scale[:, None, None])
        if needs_up:
            d_up = outer_of_slots(of_output, low, ctx.rows).to(ctx.dtypes[1])
        return grads[0], d_hidden, None, None, None, d_down, d_up
