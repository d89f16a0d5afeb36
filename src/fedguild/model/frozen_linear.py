"""Frozen linear layers through oneDNN on a CPU.

A linear layer of a torch wheel runs in the BLAS that the wheel was built with. oneDNN, which the wheel also carries, is
up to twice as fast on fp32 (docs/decisions/0004). A frozen weight needs no gradient, so both passes are a single
product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

WORTHWHILE = 2_000_000
"""Number of multiplications from which oneDNN's higher cost per call pays off."""


@cache
def has_onednn() -> bool:
    """Whether this build of torch has oneDNN's linear operator, which `torch.compile` emits."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns rows [..., in] times the transposed weight [out, in], plus the bias [out]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


def frozen_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Returns rows [n, in] times the transposed weight [out, in], by oneDNN if that is faster; not for autograd."""
    fast = rows.dtype is weight.dtype is torch.float32 and not rows.is_cuda and rows.numel() * len(weight) >= WORTHWHILE
    return onednn_linear(rows, weight) if fast and has_onednn() else nn.functional.linear(rows, weight)


def speed_up_frozen_linears(model: nn.Module) -> None:
    """Runs the frozen fp32 linear layers of a model on a CPU through oneDNN if that is faster."""
    if not has_onednn():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype is torch.float32 and module.weight.device.type == "cpu":
            module.forward = _forward_of(module)  # type: ignore[method-assign, assignment]


def _forward_of(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        weight = linear.weight
        frozen = weight.dtype is hidden.dtype is torch.float32 and not weight.requires_grad and not weight.is_cuda
        if not frozen or hidden.numel() * weight.shape[0] < WORTHWHILE:
            return nn.functional.linear(hidden, weight, linear.bias)
        output: Tensor = _FrozenLinear.apply(hidden, weight, linear.bias)  # type: ignore[no-untyped-call]
        return output

    return forward


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return onednn_linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return onednn_linear(grads[0], weight.t()), None, None
