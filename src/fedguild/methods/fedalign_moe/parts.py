"""Parts and rows of FedAlign-MoE's trainables: experts, gates and other adapters, and one row for each expert."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fedguild.core.payload import ADAPTER
from fedguild.model.adapters.full_router import delta_name
from fedguild.model.info import ModelInfo
from fedguild.model.targets import layer_of

Value = TypeVar("Value")
EXPERTS, GATE = "experts", "gate"
"""The parts with the trainables of the experts and of the gates; `adapter` has the rest."""


def by_part(model: ModelInfo, named: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """Returns trainables by part: experts, gate, and other adapters."""
    gates = {delta_name(layer.router) for layer in model.moe}
    prefixes = tuple(f"{layer.experts}." for layer in model.moe)
    parts: dict[str, dict[str, Value]] = {EXPERTS: {}, GATE: {}, ADAPTER: {}}
    for name, value in named.items():
        part = GATE if name in gates else EXPERTS if name.startswith(prefixes) else ADAPTER
        parts[part][name] = value
    return parts


def by_layer(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Returns experts' path -> name -> tensor: `….experts` of `….experts.up_proj.lora_A`."""
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        layers[layer_of(name)][name] = tensor
    return layers


def expert_vectors(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns [M, P]: all trainables of each expert of a layer in one row, in the order of their names.

    Args:
        tensors: Name -> [M, ..].
    """
    return torch.cat([tensors[name].flatten(1) for name in sorted(tensors)], dim=1)


def from_expert_vectors(vectors: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> [n, ..] of rows [n, P] that `expert_vectors` laid out.

    Args:
        vectors: One row for each expert, or for each client's version of one.
        like: Name -> a tensor [M, ..] with the trainable's shape after its first dimension.
    """
    names = sorted(like)
    parts = vectors.split([like[name][0].numel() for name in names], dim=1)
    shaped = {name: part.reshape(-1, *like[name].shape[1:]) for name, part in zip(names, parts, strict=True)}
    return {name: shaped[name].contiguous() for name in like}
