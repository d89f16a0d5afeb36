"""Losses on examples that clients hold out of their training, to choose between candidate models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedguild.client.cohort import Cohort
from fedguild.data.batches import Encoded


@torch.no_grad()
def mean_losses(cohort: Cohort, examples: Sequence[Sequence[Encoded]]) -> list[float]:
    """Returns every slot's mean negative log-likelihood over its response tokens, in nats; 0 if it has none."""
    sums = torch.zeros(len(examples), dtype=torch.float64)
    counts = torch.zeros(len(examples), dtype=torch.float64)
    for batch in cohort.batches(examples):
        losses = cohort.model.token_losses(batch).cpu().double()
        sums.index_add_(0, batch.group, losses)
        counts.index_add_(0, batch.group, torch.ones_like(losses))
    means: list[float] = (sums / counts.clamp(min=1)).tolist()
    return means
