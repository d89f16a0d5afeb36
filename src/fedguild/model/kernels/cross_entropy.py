"""The cross-entropy of many tokens and its gradient in one pass over the logits, in Triton.

torch converts the logits to fp32 and keeps their log-softmax. Here each row is read twice and its gradient written over
it, in the logits' dtype, with sums in fp32 (fp64 for fp64). Liger-Kernel's function does the same but returns losses in
the logits' dtype and reads three values back to the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Largest number of a row's logits in registers at once."""


def losses_and_gradients(logits: Tensor, targets: Tensor, label_smoothing: float, *, gradients: bool) -> Tensor:
    """Returns [P], the cross-entropy of every target in nats, in fp32 (or fp64).

    Args:
        logits: [P, V], contiguous; with `gradients` overwritten by the gradient of each row's own loss.
        targets: [P] token ids below V.
        label_smoothing: ε; the target has weight 1 - ε, and ε is spread over the vocabulary.
    """
    assert logits.is_contiguous(), "the gradients are written over the logits"
    words = logits.shape[1]
    exact = torch.promote_types(logits.dtype, torch.float32)
    losses = torch.empty(logits.shape[0], dtype=exact, device=logits.device)
    if losses.numel() == 0 or logits.device.type == "meta":
        return losses
    with torch.cuda.device_of(logits):
        _rows_kernel[(logits.shape[0],)](
            logits,
            targets,
            losses,
            words,
            GRADIENTS=gradients,
            SMOOTHING=float(label_smoothing),
            SUM=tl.float64 if logits.dtype is torch.float64 else tl.float32,
            BLOCK=min(BLOCK, triton.next_power_of_2(words)),
        )
    return losses


@triton.jit
def _rows_kernel(
    logits_at,
    targets_at,
    losses_at,
    words,
    GRADIENTS: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the largest logit and the sum of exponentials first, then the gradient."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_at + row)
    logits_at += row * words
    wanted = tl.load(logits_at + target).to(SUM)
    smoothing = tl.full([], SMOOTHING, dtype=SUM)
    place = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), dtype=SUM)
    sums = tl.zeros((BLOCK,), dtype=SUM)
    plain = tl.zeros((BLOCK,), dtype=SUM)
    for begin in range(0, words, BLOCK):
        inside = begin + place < words
        values = tl.load(logits_at + begin + place, mask=inside, other=float("-inf")).to(SUM)
        higher = tl.maximum(largest, values)
        known = higher > float("-inf")
        sums = tl.where(known, sums * tl.exp(largest - higher) + tl.exp(values - higher), 0.0)
        largest = higher
        if SMOOTHING > 0:
            plain += tl.where(inside, values, 0.0)
    most = tl.max(largest, axis=0)
    total = tl.sum(tl.where(largest > float("-inf"), sums * tl.exp(largest - most), 0.0), axis=0)
    loss = most + tl.log(total) - wanted
    if SMOOTHING > 0:
        loss += smoothing * (wanted - tl.sum(plain, axis=0) / words)
    tl.store(losses_at + row, loss)
    if GRADIENTS:
        for begin in range(0, words, BLOCK):
            inside = begin + place < words
            values = tl.load(logits_at + begin + place, mask=inside, other=float("-inf")).to(SUM)
            gradient = tl.exp(values - most) / total - tl.where(begin + place == target, 1.0, 0.0)
            if SMOOTHING > 0:
                gradient += tl.where(begin + place == target, smoothing, 0.0) - smoothing / words
            tl.store(logits_at + begin + place, gradient.to(logits_at.dtype.element_ty), mask=inside)
