"""Factors in the dtype of a layer's products, cast once for all passes until they change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Casts:
    """Copies of tensors in another dtype, kept until the tensor is written to.

    A layer's factors are trained in fp32 and multiplied in the backbone's dtype, in the forward pass, again in the
    backward pass, and in every pass of an accumulated step.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, int, Tensor]] = {}

    def of(self, tensor: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """Returns the tensor in a dtype, without gradients; the tensor itself if it has that dtype.

        Args:
            scale: A constant factor, the same for this tensor in every call; None for 1.
        """
        if tensor.dtype is dtype and scale is None:
            return tensor
        if tensor.is_inference():  # nobody counts its changes
            return (tensor if scale is None else tensor * scale).to(dtype)
        kept = self._kept.get(id(tensor))
        if kept is None or kept[0] is not tensor or kept[1] != tensor._version or kept[2].dtype is not dtype:
            with torch.inference_mode(False):  # what an evaluation makes, a training may use
                value = tensor.detach() if scale is None else tensor.detach() * scale
                kept = self._kept[id(tensor)] = (tensor, tensor._version, value.to(dtype))
        return kept[2]

    def with_gradient(self, tensor: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """Returns the same for autograd, which adds the gradient to the tensor as if it had been cast here."""
        if not (torch.is_grad_enabled() and tensor.requires_grad) or (tensor.dtype is dtype and scale is None):
            return self.of(tensor, dtype, scale)
        cast: Tensor = _Cast.apply(tensor, self.of(tensor, dtype, scale), scale)  # type: ignore[no-untyped-call]
        return cast

    def clear(self) -> None:
        self._kept.clear()


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cast: Tensor, scale: Tensor | None) -> Tensor:
        ctx.dtype, ctx.scale = tensor.dtype, scale
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].to(ctx.dtype)
        return grad if ctx.scale is None else grad * ctx.scale, None, None
