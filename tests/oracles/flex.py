"""FLEx token by token: the output of a layer with a grafted expert, and the choice of the expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

Matrices = Mapping[str, Tensor]
"""gate_proj [I, H], up_proj [I, H] and down_proj [H, I] of one expert."""


def expert(x: Tensor, matrices: Matrices) -> Tensor:
    """Returns E(x) [H] of x [H]."""
    return matrices["down_proj"] @ (silu(matrices["gate_proj"] @ x) * (matrices["up_proj"] @ x))


def grafted(frozen: Matrices, low_rank: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> dict[str, Tensor]:
    """Returns W + s B A of every matrix of the grafted expert."""
    return {name: weight + scale * (low_rank[name][1] @ low_rank[name][0]) for name, weight in frozen.items()}


def layer(x: Tensor, routed: Tensor, own: Matrices, weight: Tensor, bias: float, combine: str) -> Tensor:
    """Returns F(x) + g E_c(x), or (1 - g) F(x) + g E_c(x), for one token; g = sigma(<w, x> + b)."""
    gate = 1 / (1 + torch.exp(-(weight @ x + bias)))
    return (routed if combine == "add" else (1 - gate) * routed) + gate * expert(x, own)


def choice(tokens: Sequence[Tensor], routed: Sequence[Tensor], experts: Sequence[Matrices]) -> int:
    """Returns j with the smallest sum over the tokens of ||F(x) - E_j(x)||^2."""
    losses = []
    for matrices in experts:
        total = 0.0
        for x, output in zip(tokens, routed, strict=True):
            total += float(((output - expert(x, matrices)) ** 2).sum())
        losses.append(total)
    return losses.index(min(losses))
