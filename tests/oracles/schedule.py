"""Learning rates over rounds from torch's schedulers, one step of them per round."""

from __future__ import annotations

import warnings

import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler


def annealed_rates(peak: float, schedule: str, rounds: int, warmup: int, final: float) -> list[float]:
    """Returns the rate of every round, from torch's `CosineAnnealingLR` or `LinearLR` after a linear warm-up.

    Args:
        peak: The full rate.
        schedule: `constant`, `linear` or `cosine`.
        rounds: Number of rounds.
        warmup: Rounds before the first at the full rate.
        final: Share of the rate in the last round.
    """
    rates = [peak * (number + 1) / (warmup + 1) for number in range(min(warmup, rounds))]
    left = rounds - len(rates)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    scheduler: LRScheduler
    if schedule == "cosine":
        scheduler = CosineAnnealingLR(optimizer, T_max=max(1, left - 1), eta_min=peak * final)
    elif schedule == "linear":
        scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=final, total_iters=max(1, left - 1))
    else:
        scheduler = ConstantLR(optimizer, factor=1.0, total_iters=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer takes no step
        for _ in range(left):
            rates.append(float(scheduler.get_last_lr()[0]))
            scheduler.step()
    return rates
