"""Robust estimates of a mean, value by value, from Yin et al. 2018 (Definitions 1 and 2) and Sun et al. 2019."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def median(values: Sequence[Tensor]) -> Tensor:
    """Definition 1: the one-dimensional median of each coordinate."""
    result = torch.empty(values[0].numel(), dtype=torch.float64)
    for coordinate in range(values[0].numel()):
        ordered = sorted(float(value.flatten()[coordinate]) for value in values)
        half = len(ordered) // 2
        result[coordinate] = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return result.reshape(values[0].shape)


def trimmed_mean(values: Sequence[Tensor], trim: float) -> Tensor:
    """Definition 2: the mean of each coordinate without its ⌈βC⌉ largest and smallest values."""
    result = torch.empty(values[0].numel(), dtype=torch.float64)
    left_out = min(math.ceil(trim * len(values)), (len(values) - 1) // 2)
    for coordinate in range(values[0].numel()):
        ordered = sorted(float(value.flatten()[coordinate]) for value in values)
        kept = ordered[left_out : len(ordered) - left_out]
        result[coordinate] = sum(kept) / len(kept)
    return result.reshape(values[0].shape)


def clipped_mean(start: Tensor, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Section 4: theta + sum_c w_c min(1, M / ||delta_c||) delta_c / sum_c w_c, with M the median of the norms."""
    changes = [(value - start).double() for value in values]
    norms = sorted(math.sqrt(float((change**2).sum())) for change in changes)
    half = len(norms) // 2
    bound = norms[half] if len(norms) % 2 else (norms[half - 1] + norms[half]) / 2
    total = torch.zeros_like(start, dtype=torch.float64)
    for change, weight in zip(changes, weights, strict=True):
        norm = math.sqrt(float((change**2).sum()))
        total += weight * change * (min(1.0, bound / norm) if norm else 1.0)
    return start.double() + total / sum(weights)
