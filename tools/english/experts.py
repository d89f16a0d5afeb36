"""Products of trainable experts, for pre-training on a CPU.

The rows of a layer are sorted by expert and every expert multiplies its own. Compared with all experts
on all tokens in one wide product, of which 56 of 64 results are then weighted by zero, this takes a fifth
of the time at 8 active experts of 64; the backward pass is written out, so that little is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import OlmoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "fedguild_pretraining"


def use_trainable_experts(model: OlmoeForCausalLM) -> None:
    """Makes this module compute the model's experts from now on."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    model.set_experts_implementation(IMPLEMENTATION)


def _experts_forward(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The registered implementation: hidden [N, H], routing [N, k] -> [N, H]."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
    output: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        hidden.to(dtype),
        module.gate_up_proj.to(dtype),
        module.down_proj.to(dtype),
        top_k_weights.to(dtype),
        top_k_index,
    )
    return output.to(hidden.dtype)


@dataclass(frozen=True)
class _Dispatch:
    """Where the rows of each expert lie in a buffer of T rows.

    Attributes:
        bounds: For every expert with a row, its number and its first and last (exclusive) row.
        slots: [N·k], the buffer's row of each (token, choice).
        tokens: [T], the token of each row; N for a filler row.
    """

    bounds: list[tuple[int, int, int]]
    slots: Tensor
    tokens: Tensor


def _dispatch(top_k_index: Tensor, experts: int) -> _Dispatch:
    """Sorts the choices [N, k] by expert, each expert's rows filled up to a size of `_rounded`."""
    choices = top_k_index.flatten()
    order = choices.argsort(stable=True)
    counts = torch.bincount(choices, minlength=experts)
    bounds, starts, end = [], [], 0
    for expert, count in enumerate(counts.tolist()):
        starts.append(end)
        if count:
            bounds.append((expert, end, end + _rounded(count)))
            end += _rounded(count)
    shift = torch.tensor(starts) - (counts.cumsum(0) - counts)
    rows = torch.arange(len(choices)) + shift[choices[order]]
    slots = torch.empty_like(order)
    slots[order] = rows
    tokens = torch.full((end,), len(top_k_index))
    tokens[rows] = order // top_k_index.shape[1]
    return _Dispatch(bounds, slots, tokens)


def _rounded(count: int) -> int:
    """Returns the next of sixteen sizes per power of two: oneDNN compiles a kernel for every size that it meets."""
    step = max(8, 1 << max(0, count.bit_length() - 5))
    return -(-count // step) * step


class _Experts(torch.autograd.Function):
    """y = Σ_k w_k D_k (silu(G_k x) ⊙ U_k x) over each token's k experts."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, top_k_index: Tensor
    ) -> Tensor:
        dispatch = _dispatch(top_k_index, len(gate_up))
        rows = _with_zero_row(hidden).index_select(0, dispatch.tokens)
        inner = rows.new_empty(len(rows), gate_up.shape[1])
        for expert, start, end in dispatch.bounds:
            torch.mm(rows[start:end], gate_up[expert].t(), out=inner[start:end])
        gate, up = inner.chunk(2, dim=1)
        active = functional.silu(gate).mul_(up)
        outer = torch.empty_like(rows)
        for expert, start, end in dispatch.bounds:
            torch.mm(active[start:end], down[expert].t(), out=outer[start:end])
        chosen = outer.index_select(0, dispatch.slots).view(*weights.shape, -1)
        ctx.save_for_backward(gate_up, down, weights, rows, inner, active, chosen)
        ctx.dispatch = dispatch
        return torch.bmm(weights.unsqueeze(1), chosen).squeeze(1)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        gate_up, down, weights, rows, inner, active, chosen = ctx.saved_tensors
        dispatch: _Dispatch = ctx.dispatch
        d_weights = torch.bmm(chosen, d_output.unsqueeze(2)).squeeze(2)
        row_weights = weights.new_zeros(len(rows))
        row_weights[dispatch.slots] = weights.flatten()
        d_outer = _with_zero_row(d_output).index_select(0, dispatch.tokens).mul_(row_weights.unsqueeze(1))
        d_active = torch.empty_like(active)
        d_down = torch.zeros_like(down)
        for expert, start, end in dispatch.bounds:
            torch.mm(d_outer[start:end], down[expert], out=d_active[start:end])
            torch.mm(d_outer[start:end].t(), active[start:end], out=d_down[expert])
        gate, up = inner.chunk(2, dim=1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        d_inner = torch.empty_like(inner)
        d_gate, d_up = d_inner.chunk(2, dim=1)
        torch.mul(d_active, silu, out=d_up)
        torch.mul(d_active.mul_(up), sigmoid + silu * (1 - sigmoid), out=d_gate)
        d_rows = torch.empty_like(rows)
        d_gate_up = torch.zeros_like(gate_up)
        for expert, start, end in dispatch.bounds:
            torch.mm(d_inner[start:end], gate_up[expert], out=d_rows[start:end])
            torch.mm(d_inner[start:end].t(), rows[start:end], out=d_gate_up[expert])
        d_hidden = d_rows.index_select(0, dispatch.slots).view(*weights.shape, -1).sum(1)
        return d_hidden, d_gate_up, d_down, d_weights, None


def _with_zero_row(rows: Tensor) -> Tensor:
    """Returns the rows [n, H] and one of zeros after them."""
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
