"""A client's own model: between what it received and what it trained, as far as its own held-out examples say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.client.held_out import mean_losses
from fedguild.data.batches import Encoded
from fedguild.payload import ADAPTER

MIXES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The lambda_i that a client chooses from."""
USAGE = "usage"
"""The part with shares of activations, [M] of every MoE layer: by its name the federation's in the state and downloads,
and a client's in its upload; by the path of its experts a client's in its memory."""


def mixture(
    shared: Mapping[str, Tensor], own: Mapping[str, Tensor], mix: float, usage: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Returns theta + lambda_i (theta_i - theta) of every name in `own`, factor by factor (line 7).

    Args:
        shared: theta.
        own: theta_i.
        mix: lambda_i.
        usage: Path of the experts -> [M], the client's share of activations of every expert; with it an expert j has
            lambda_i min(1, M u_ij), so that what the client did not train stays as it was received.
    """
    mixed = {}
    for name, trained in own.items():
        share = (usage or {}).get(name.rsplit(".", 2)[0])
        weight = torch.tensor(mix) if share is None else mix * (len(share) * share).clamp(max=1)
        weight = weight.to(trained).view(-1, *[1] * (trained.dim() - 1)) if share is not None else weight.to(trained)
        mixed[name] = torch.lerp(shared[name].to(trained), trained, weight)
    return mixed


def chosen_mixes(cohort: Cohort, held_out: Sequence[Sequence[Encoded]], first: float) -> list[float]:
    """Returns every client's lambda_i: that of the least loss on its held-out examples, the smaller one where equal.

    theta is the one that the client has just received, theta_i what it kept in its last round: the models of line 7.
    Their slots hold a mixture afterwards.

    Args:
        cohort: The clients, everything else of their models loaded.
        held_out: `held_out[slot]`, the examples of every slot.
        first: lambda_i of a client that could not choose yet.
    """
    memories = [work.memory.part(ADAPTER) for work in cohort.work]
    if not any(memories):
        return [first] * len(memories)
    cohort.model.dropout.seed(None)
    losses = []
    for mix in MIXES:
        for slot, (work, own) in enumerate(zip(cohort.work, memories, strict=True)):
            cohort.load(slot, mixture(work.download.part(ADAPTER), own, mix, work.memory.part(USAGE)))
        losses.append(mean_losses(cohort, held_out))
    best = [min(range(len(MIXES)), key=lambda place: losses[place][slot]) for slot in range(len(memories))]
    return [MIXES[place] if own else first for place, own in zip(best, memories, strict=True)]
