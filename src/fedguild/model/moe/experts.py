"""The experts of one layer with the trainables of several slots, without ever forming W + BA.

One autograd function computes a whole layer. The frozen weights get no gradient. The trained parts are added to the
frozen products, grouped by (expert, slot): LoRA (low_rank.py), optionally with a middle factor (middle.py), dense
changes (full.py), or both. The backward pass uses <dy, W h> = <Wᵀ dy, h>, where W includes the trained parts, so the
unweighted outputs of the experts are never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from fedguild.model.moe.casts import Casts
from fedguild.model.moe.dispatch import Dispatch, combine, gather
from fedguild.model.moe.full import FullChange
from fedguild.model.moe.low_rank import LowRank
from fedguild.model.moe.middle import MiddleRank
from fedguild.model.moe.products import FrozenProduct, computed

T = TypeVar("T")
Factors = tuple[Tensor, ...]
"""A [M, S, r, in] and B [M, S, r, out] of a projection, and R [M, S, r, r] if there is one."""


class Addition(Protocol):
    """The trained part added to a frozen product of p projections with a common input: gate and up, or down alone.

    Attributes:
        tensors_per_projection: Number of its tensors for each projection.
    """

    tensors_per_projection: ClassVar[int]

    def add(
        self, total: Tensor | FrozenProduct, rows: Tensor, trained: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Adds its product of the rows [n, in] to the total [n, p·out]; returns the total, and what `back` needs."""
        ...

    def back(
        self,
        d_rows: Tensor | FrozenProduct | None,
        d_total: Tensor,
        rows: Tensor,
        trained: Sequence[Tensor],
        kept: Tensor | None,
        weight: Tensor | None,
        needed: Sequence[bool],
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Adds its share to the gradient of the rows; returns that, and the gradients of the trained tensors.

        Args:
            d_rows: [n, in]; None if nothing before the layer is trained.
            d_total: [n, p·out].
            rows: [n, in] what `add` got.
            trained: What `add` got.
            kept: What `add` returned.
            weight: [n, 1] routing weights, if `d_total` does not include them; the returned gradients always include
                them, `d_rows` does not.
            needed: Whether a gradient of each tensor of `trained` is needed; None is returned for the others.
        """
        ...


@dataclass(frozen=True)
class FrozenExperts:
    """A layer's frozen weights: gate_up [M, p·I, H], down [M, H, I], and h = gate(z) of z [n, p·I].

    p is 2, or 1 if an expert has only an up projection (SwitchTransformers).

    Attributes:
        bias: [M, p·I] added to z, or None. The view adds the output's bias.
    """

    gate_up: Tensor
    down: Tensor
    gate: Callable[[Tensor], Tensor]
    bias: Tensor | None = None

    def activated(self, z: Tensor, expert_of_rows: Callable[[], Tensor]) -> Tensor:
        """Returns h [n, I] of z [n, p·I]; `expert_of_rows` returns [n]."""
        return self.gate(z if self.bias is None else z + self.bias[expert_of_rows()])

    @property
    def input_projections(self) -> int:
        return self.gate_up.shape[1] // self.down.shape[2]


def run_experts(
    tokens: Tensor,
    weights: Tensor,
    plan: Dispatch,
    frozen: Callable[[], FrozenExperts],
    lora: tuple[Factors, ...] | None,
    scale: Tensor | None,
    delta: tuple[Tensor, ...] | None = None,
    casts: Casts | None = None,
) -> Tensor:
    """Returns the routed output [N, H] of a layer.

    Args:
        tokens: [N, H] the layer's input.
        weights: [N, k] routing weights (times the output scale, if there is one).
        frozen: Returns the layer's frozen weights. Each pass requests and releases them, so weights kept in 4 bit are
            unpacked for one layer at a time.
        lora: The factors of every projection, down last; None without LoRA.
        scale: [S, r] LoRA's scale of each slot's ranks.
        delta: [M, S, out, in] of every projection, each slot's change of W; None if there is none.
        casts: The trained tensors in the dtype of the products, kept from pass to pass.
    """
    casts = casts or Casts()
    additions: list[Addition] = []
    trained: list[Tensor] = []
    if lora is not None and scale is not None:
        low_rank = LowRank.of(plan, casts.of(scale, tokens.dtype))
        additions.append(low_rank if len(lora[0]) == 2 else MiddleRank(low_rank))
        trained += [factor for factors in lora for factor in factors]
    if delta is not None:
        additions.append(FullChange(plan.group_ends))
        trained += delta
    used = tuple(casts.of(tensor, tokens.dtype) for tensor in trained)
    output: Tensor = _Experts.apply(tokens, weights, plan, frozen, tuple(additions), used, *trained)  # type: ignore[no-untyped-call]
    return output


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        plan: Dispatch,
        frozen: Callable[[], FrozenExperts],
        additions: tuple[Addition, ...],
        used: tuple[Tensor, ...],
        *trained: Tensor,
    ) -> Tensor:
        """`used` are the trained tensors in the dtype of the products."""
        own = frozen()
        parts = _split(additions, used, own.input_projections)
        rows, places = _rows(tokens, plan, parts)
        product = FrozenProduct(rows, own.gate_up.transpose(1, 2), plan.expert_ends, places)
        z, kept_inner = _with_additions(product, [(addition, inner) for addition, inner, _ in parts])
        h = own.activated(z, plan.expert_of_rows)
        product = FrozenProduct(h, own.down.transpose(1, 2), plan.expert_ends)
        y, kept_outer = _with_additions(product, [(addition, outer) for addition, _, outer in parts])
        ctx.plan, ctx.frozen, ctx.additions, ctx.used = plan, frozen, additions, used
        ctx.save_for_backward(rows if parts else rows.new_empty(0), weights, z, *kept_inner, *kept_outer, *trained)
        return combine(y, plan, weights.reshape(-1)[plan.active])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, own, additions = ctx.plan, ctx.frozen(), ctx.additions
        rows, weights, z, *saved = ctx.saved_tensors
        count = len(additions)
        kept_inner, kept_outer, trained = saved[:count], saved[count : 2 * count], saved[2 * count :]
        parts = _split(additions, ctx.used, own.input_projections)
        needed = _split(additions, ctx.needs_input_grad[6:], own.input_projections)
        dy, places = _rows(grads[0].contiguous(), plan, parts)
        with torch.enable_grad():
            z_leaf = z.detach().requires_grad_()
            h = own.activated(z_leaf, plan.expert_of_rows)
        weight = row_weights(weights, plan).to(dy.dtype)[:, None]

        d_h: Tensor | FrozenProduct | None = FrozenProduct(dy, own.down, plan.expert_ends, places)
        d_outer = []
        for (addition, _, outer), kept, (_, _, wanted) in zip(parts, kept_outer, needed, strict=True):
            d_h, gradients = addition.back(d_h, dy, h.detach(), outer, kept, weight, wanted)
            d_outer.append(gradients)
        assert d_h is not None
        dh = computed(d_h)
        d_weights = weights_gradient(weights, plan, dh, h.detach())

        (dz,) = torch.autograd.grad(h, z_leaf, dh.mul_(weight))
        d_rows: Tensor | FrozenProduct | None = None
        if ctx.needs_input_grad[0]:
            d_rows = FrozenProduct(dz, own.gate_up, plan.expert_ends)
        d_inner = []
        for (addition, inner, _), kept, (_, wanted, _) in zip(parts, kept_inner, needed, strict=True):
            d_rows, gradients = addition.back(d_rows, dz, rows, inner, kept, None, wanted)
            d_inner.append(gradients)
        gradients = [d for inner, outer in zip(d_inner, d_outer, strict=True) for d in (*inner, *outer)]
        d_trained = (
            None if d is None else d.to(tensor.dtype).reshape(tensor.shape)
            for d, tensor in zip(gradients, trained, strict=True)
        )
        d_tokens = None if d_rows is None else combine(computed(d_rows), plan)
        return (d_tokens, d_weights, None, None, None, None, *d_trained)


def _rows(tokens: Tensor, plan: Dispatch, parts: Sequence[object]) -> tuple[Tensor, Tensor | None]:
    """Returns the tokens' rows for the trained parts; if there are none, the tokens and the place of each row."""
    return (gather(tokens, plan), None) if parts else (tokens, plan.token)


def _with_additions(
    product: FrozenProduct, parts: Sequence[tuple[Addition, tuple[Tensor, ...]]]
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the product with everything added to it, and what each addition keeps for the backward pass."""
    total: Tensor | FrozenProduct = product
    kept = []
    for addition, trained in parts:
        total, own = addition.add(total, product.rows, trained)
        kept.append(own)
    return computed(total), kept


def _split(
    additions: Sequence[Addition], each_tensors: Sequence[T], input_projections: int
) -> list[tuple[Addition, tuple[T, ...], tuple[T, ...]]]:
    left = iter(each_tensors)
    return [
        (addition, tuple(islice(left, input_projections * each)), tuple(islice(left, each)))
        for addition in additions
        for each in (addition.tensors_per_projection,)
    ]


def weights_gradient(weights: Tensor, plan: Dispatch, dh: Tensor, h: Tensor) -> Tensor:
    """Returns [N, k], <dh, h> of every routed pair, from the rows' dh and h [n, I] without the weights; 0 elsewhere."""
    of_pairs = (dh * h).sum(dim=1)[plan.row_of_pair].to(weights.dtype)
    return torch.zeros_like(weights).reshape(-1).index_copy_(0, plan.active, of_pairs).view_as(weights)


def row_weights(weights: Tensor, plan: Dispatch) -> Tensor:
    """Returns [n], the routing weight of every row; 0 for filler, which must leave no gradient."""
    of_rows = weights.reshape(-1)[plan.pair]
    return of_rows.masked_fill(plan.slot == plan.slots, 0.0) if plan.block_height else of_rows
