"""Balancing without a loss: how often a client activates each expert, and the server's step of phi."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedguild.client.cohort import Cohort

FARTHEST = 1.0
"""The farthest that a client's share can be from the federation's: both are in [0, 1]."""


def usage_of(cohort: Cohort, slot: int) -> dict[str, Tensor]:
    """Returns a client's u_i / k_i: the name of every layer -> [M] fp32, each expert's share.

    A layer's shares sum to 1: its activations are k_i to a token, or fewer in the steps at a smaller k. They are 0 in a
    layer without tokens.

    Args:
        cohort: The clients, after their training.
        slot: The client's slot.
    """
    assert cohort.routing is not None
    counts = cohort.routing.counts[:, slot].cpu().double()
    shares = (counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)).float()
    layers = cohort.model.backbone.info.moe
    return {layer.name: share[: layer.num_experts] for layer, share in zip(layers, shares, strict=True)}


def within_reach(usage: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a client's shares, each at most 1 from what the client received: an honest one's are anyway.

    What noise or a lie adds counts up to that.
    """
    return {name: value.clamp(before[name] - FARTHEST, before[name] + FARTHEST) for name, value in usage.items()}


def balanced(phi: Tensor, usage: Tensor, step: float, limit: float) -> Tensor:
    """Returns clip(phi + zeta sign(1 / M - u)), [M] (part c): used less than evenly, an expert is chosen more easily.

    Args:
        phi: [M].
        usage: u [M], the federation's shares.
        step: zeta.
        limit: phi stays in [-limit, limit].
    """
    even = 1 / len(usage)
    return (phi + step * (even - usage.double()).sign().to(phi.dtype)).clamp(-limit, limit)
