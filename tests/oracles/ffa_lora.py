"""FFA-LoRA's aggregate as the mean of the clients' dense updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_mean(ups: Sequence[Tensor], down: Tensor, weights: Sequence[float]) -> Tensor:
    """Returns sum_c w_c B_c A / sum_c w_c of one matrix, in fp64."""
    total = torch.zeros(ups[0].shape[0], down.shape[1], dtype=torch.float64)
    for up, weight in zip(ups, weights, strict=True):
        total += weight * (up.double() @ down.double())
    return total / sum(weights)
