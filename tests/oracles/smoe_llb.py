"""The losses of Switch Transformers (Eq. 4-6) and ST-MoE (Eq. 5), token by token; differentiable by the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chosen(logits: Tensor, active: int) -> list[list[int]]:
    """The `active` experts with the largest logits of every token, in descending order."""
    rows = []
    for row in logits.tolist():
        rows.append(sorted(range(len(row)), key=row.__getitem__, reverse=True)[:active])
    return rows


def balance(logits: Tensor, experts: Sequence[Sequence[int]], real: Sequence[bool]) -> Tensor:
    """M sum_i f_i P_i of one client in one layer.

    Args:
        logits: [N, M] of its tokens.
        experts: Each token's active experts.
        real: False for padding.
    """
    number = logits.shape[1]
    counts, probability, tokens = [0] * number, [logits.new_zeros(())] * number, 0
    for token, is_real in enumerate(real):
        if not is_real:
            continue
        tokens += 1
        for expert in experts[token]:
            counts[expert] += 1
        exponentials = [logits[token, expert].exp() for expert in range(number)]
        for expert in range(number):
            probability[expert] = probability[expert] + exponentials[expert] / sum(exponentials)
    total = logits.new_zeros(())
    for expert in range(number):
        if tokens:
            total = total + counts[expert] / sum(counts) * probability[expert] / tokens
    return number * total


def z(logits: Tensor, real: Sequence[bool]) -> Tensor:
    """The mean over one client's tokens of (log sum_i exp s_i)^2 in one layer."""
    total, tokens = logits.new_zeros(()), 0
    for token, is_real in enumerate(real):
        if is_real:
            tokens += 1
            total = total + torch.log(sum(value.exp() for value in logits[token])) ** 2
    return total / max(1, tokens)
