"""FedProx's Eq. 2, number by number in Python floats."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def penalty(theta: Mapping[str, Tensor], received: Mapping[str, Tensor], mu: float) -> float:
    """mu / 2 ||theta - theta^t||^2 of one client, over all its tensors."""
    total = 0.0
    for name, value in theta.items():
        for mine, theirs in zip(value.flatten().tolist(), received[name].flatten().tolist(), strict=True):
            total += (mine - theirs) ** 2
    return mu / 2 * total


def gradient(theta: Mapping[str, Tensor], received: Mapping[str, Tensor], mu: float) -> dict[str, Tensor]:
    """Its derivative by every parameter, mu (theta - theta^t)."""
    slopes = {}
    for name, value in theta.items():
        pairs = zip(value.flatten().tolist(), received[name].flatten().tolist(), strict=True)
        slopes[name] = torch.tensor([mu * (mine - theirs) for mine, theirs in pairs], dtype=value.dtype)
        slopes[name] = slopes[name].view(value.shape)
    return slopes
