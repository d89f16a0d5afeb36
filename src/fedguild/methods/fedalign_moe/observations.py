"""Figures of FedAlign-MoE's report, of every layer: overlap, alpha, consistency weights, distance to p_g and tau."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedguild.core.payload import Payload
from fedguild.model.info import ModelInfo
from fedguild.server.method import Observation

FIGURES = "figures"
"""The part of the state with the figures of the last round: `{figure}/{path of a layer's experts}`."""
OBSERVED = {
    "overlap": "mean expert overlap o",
    "alpha": "strength of the alignment alpha (Eq. 9)",
    "spread": "spread of the consistency weights (standard deviation over clients)",
    "distance": "distance of the gates to p_g (mean KL over clients)",
    "threshold": "similarity threshold tau",
    "aggregated": "share of experts aggregated",
}


OF_ALPHA = ("least", "largest", "deviation between experts", "deviation between clients")
"""Columns of the figure of alpha: over clients and experts; of the clients' means; the mean of those of each expert."""
UNITS = {"distance": "nats"}


def reference_figures(
    experts: str, overlap: Tensor, alpha: Tensor, omega: Tensor, distance: Tensor
) -> dict[str, Tensor]:
    """Returns a layer's figures of the reference: the mean of o, alpha, the spread of omega, the mean distance to p_g.

    Args:
        experts: The path of the layer's experts.
        overlap: [N, M] o.
        alpha: [N, M], by Eq. 9 of this o, as a client that takes part in the next round will have it.
        omega: [N, M].
        distance: [N] KL(p-bar_i || p_g), with the p_g that these clients' p-bar make (Eq. 7).
    """
    return {
        f"{FIGURES}/overlap/{experts}": overlap.mean().float(),
        f"{FIGURES}/alpha/{experts}": _of_alpha(alpha).float(),
        f"{FIGURES}/spread/{experts}": omega.std(dim=0, correction=0).mean().float(),
        f"{FIGURES}/distance/{experts}": distance.mean().float(),
    }


def _of_alpha(alpha: Tensor) -> Tensor:
    """Returns the columns `OF_ALPHA` of alpha [N, M]."""
    between_experts = alpha.mean(dim=0).std(correction=0)
    between_clients = alpha.std(dim=0, correction=0).mean()
    return torch.stack([alpha.min(), alpha.max(), between_experts, between_clients])


def expert_figures(experts: str, thresholds: Sequence[float], aggregated: int, count: int) -> dict[str, Tensor]:
    """Returns a layer's figures of its experts: the share of all `count` that were aggregated, and the mean of tau."""
    return {
        f"{FIGURES}/aggregated/{experts}": torch.tensor(aggregated / count),
        f"{FIGURES}/threshold/{experts}": torch.tensor(thresholds or [0.0]).mean(),
    }


def observations(state: Payload, model: ModelInfo) -> list[Observation]:
    """Returns per layer: o, alpha, the spread of omega, the distance to p_g, tau and the share of experts combined."""
    figures = state.part(FIGURES)
    layers = [layer.experts for layer in model.moe]
    return [
        Observation(
            title,
            torch.stack([figures[f"{figure}/{experts}"] for experts in layers]),
            [f"layer {index}" for index in range(len(layers))],
            OF_ALPHA if figure == "alpha" else (),
            unit=UNITS.get(figure, ""),
        )
        for figure, title in OBSERVED.items()
        if all(f"{figure}/{experts}" in figures for experts in layers)
    ]
