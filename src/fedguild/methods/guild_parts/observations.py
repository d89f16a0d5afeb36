"""Figures of a round of Guild with parts: each budget's rescaler, the use of the experts, the selection bias."""

from __future__ import annotations

import torch

from fedguild.methods.guild_parts.mixture import USAGE
from fedguild.methods.guild_parts.selection_bias import PHI
from fedguild.model.info import ModelInfo
from fedguild.payload import Payload
from fedguild.server.method import Observation
from fedguild.server.rescaler import scale_observations
from fedguild.server.utilisation import gini, share_entropy


def observations(state: Payload, model: ModelInfo) -> list[Observation]:
    """Returns the figures of the round that led to a state; those of the experts where phi balances them."""
    found, usage, phi = scale_observations(state), state.part(USAGE), state.part(PHI)
    if not usage:
        return found
    rows, values = [], []
    for index, layer in enumerate(model.moe):
        used, bias = usage[layer.name], phi[f"{layer.name}.{PHI}"]
        rows.append(f"layer {index}")
        values.append([float(share_entropy(used)), float(gini(used)), float(bias.min()), float(bias.max())])
    columns = ("entropy of shares", "Gini", "smallest phi", "largest phi")
    return [*found, Observation("expert usage and selection bias", torch.tensor(values), rows, columns)]
