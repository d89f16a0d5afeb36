"""Measures of how evenly experts are used: entropy and the Gini coefficient (UB-SMoE, Section 6.3.3, appendix G.7)."""

from __future__ import annotations

import torch
from torch import Tensor


def rate_entropy(rate: Tensor) -> Tensor:
    """Returns -sum_i u_i ln u_i over the last axis, in nats, of the rates as they are (Section 6.3.3).

    The rates of a layer sum to the mean active experts, so it can exceed ln M.
    """
    entropy: Tensor = torch.special.entr(rate.double()).sum(dim=-1)
    return entropy


def share_entropy(rate: Tensor) -> Tensor:
    """Returns the entropy of the rates scaled to sum 1, in nats, from 0 to ln M (appendix G.7); 0 for no rates."""
    return rate_entropy(_shares(rate))


def gini(rate: Tensor) -> Tensor:
    """Returns the Gini coefficient over the last axis, from 0 (all alike) to 1 - 1/M (Eq. 62); 0 for no rates.

    Sorted ascending, the double sum of |u_i - u_j| is 2 sum_i (2i - M - 1) u_(i) for i from 1.
    """
    experts = rate.shape[-1]
    place = 2 * torch.arange(1, experts + 1, dtype=torch.float64, device=rate.device) - experts - 1
    return (_shares(rate).sort(dim=-1).values * place).sum(dim=-1) / experts


def _shares(rate: Tensor) -> Tensor:
    rate = rate.double()
    return rate / rate.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
