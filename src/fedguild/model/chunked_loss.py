"""Cross-entropy of many tokens over a large vocabulary, a chunk of tokens at a time.

The logits of 8,000 tokens over 150,000 words are 5 GB in fp32, and a training step holds them several times. Here the
head runs on a chunk, whose gradient is formed at once. The head is frozen and each loss depends on its own token alone,
so this differs from the final gradient of the hidden states by one factor per token. There are never more logits than
one chunk's. On a GPU with Triton, one kernel computes a chunk's losses and gradients and writes the gradients over the
logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedguild.model import kernels

LOGITS_BYTES = 256 << 20
"""Size of the logits in bytes from which they are computed in chunks, and of a chunk's."""


def chunk_rows(vocabulary: int, dtype: torch.dtype) -> int:
    return max(1, LOGITS_BYTES // (vocabulary * torch.empty(0, dtype=dtype).element_size()))


def chunked_losses(
    hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], label_smoothing: float, rows: int
) -> Tensor:
    """Returns [P], the cross-entropy of every target in nats, in fp32 (or fp64).

    Args:
        hidden: [P, H], the head's input.
        targets: [P] token ids.
        label_smoothing: See `torch.nn.functional.cross_entropy`.
        rows: Tokens of a chunk.
    """
    losses: Tensor = _ChunkedLosses.apply(hidden, targets, head, label_smoothing, rows)  # type: ignore[no-untyped-call]
    return losses


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: Callable[[Tensor], Tensor],
        label_smoothing: float,
        rows: int,
    ) -> Tensor:
        trains = ctx.needs_input_grad[0]
        losses, grads = [], []
        for part, own in zip(hidden.detach().split(rows), targets.split(rows), strict=True):
            leaf = part.requires_grad_(trains)
            with torch.set_grad_enabled(trains):
                logits = head(leaf)
                if kernels.runs("cross-entropy", logits.device) and logits.is_contiguous():
                    from fedguild.model.kernels.cross_entropy import losses_and_gradients

                    gradient = logits.detach()
                    loss = losses_and_gradients(gradient, own, label_smoothing, gradients=trains)
                else:
                    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
                    loss = cross_entropy(exact, own, reduction="none", label_smoothing=label_smoothing)
                    logits, gradient = loss.sum(), None
                if trains:
                    grads.append(torch.autograd.grad(logits, leaf, gradient)[0])
            losses.append(loss.detach())
        ctx.save_for_backward(torch.cat(grads) if trains else hidden.new_zeros(0))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of_losses,) = ctx.saved_tensors
        return of_losses * grads[0].to(of_losses.dtype)[:, None], None, None, None, None
