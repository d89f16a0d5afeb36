"""Clipping of named tensors by their norm over all of them, and noise on them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedguild.privacy.dp.noise import Noise


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """Returns the L2 norm over all tensors together, in fp64."""
    return math.sqrt(sum(float(tensor.to(torch.float64).square().sum()) for tensor in tensors.values()))


def clipped(tensors: Mapping[str, Tensor], clip: float) -> dict[str, Tensor]:
    """Returns the tensors in fp64, scaled down to an L2 norm of at most `clip` over all of them.

    If their norm is NaN or infinite, all are set to zero: whatever a client computes, it adds no more than `clip`.
    """
    norm = norm_of(tensors)
    if not math.isfinite(norm):
        return {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in tensors.items()}
    factor = min(1.0, clip / norm) if norm else 1.0
    return {name: tensor.to(torch.float64) * factor for name, tensor in tensors.items()}


def with_noise(tensors: Mapping[str, Tensor], deviation: float, noise: Noise) -> dict[str, Tensor]:
    """Adds independent normal noise of a standard deviation to the tensors, in fp64."""
    return {
        name: tensor.to(torch.float64)
        + deviation * noise.normal(tensor.shape, name).to(tensor.device, non_blocking=True)
        for name, tensor in tensors.items()
    }
