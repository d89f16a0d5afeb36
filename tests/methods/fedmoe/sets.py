"""Sets of experts and shares of activations, as FedMoE's tests write them."""

from __future__ import annotations

import torch
from torch import Tensor


def as_sets(found: list[Tensor]) -> list[set[int]]:
    return [set(own.nonzero().flatten().tolist()) for own in found]


def masks(sets: list[set[int]], sizes: list[int]) -> list[Tensor]:
    return [torch.tensor([e in own for e in range(size)]) for own, size in zip(sets, sizes, strict=True)]


def random_shares(experts: list[int], seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, generator=rng) * 2).softmax(-1) for size in experts]
