"""Names and rows of FedMoE's trainables: dense ones, those with a row for each expert, and the rows of held experts.

A tensor with a row for each expert, including the routers' rows, is named
`{path of the layer's experts}.{what}.{tensor}`: `….experts.up_proj.lora_A`, `….experts.router.delta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fedguild.model.adapters.full_router import delta_name
from fedguild.model.info import ModelInfo
from fedguild.model.targets import layer_of

Value = TypeVar("Value")
ROUTER_ROWS = "router.delta"


def by_part(model: ModelInfo, named: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Returns trainables without and with a row for each expert, the latter by their names above."""
    names = _names_of_experts(model, named)
    dense = {name: value for name, value in named.items() if name not in names}
    return dense, {renamed: named[name] for name, renamed in names.items()}


def together(model: ModelInfo, dense: Mapping[str, Value], experts: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the trainables of both kinds by the adapter's names, the inverse of `by_part`."""
    routers = {f"{layer.experts}.{ROUTER_ROWS}": delta_name(layer.router) for layer in model.moe}
    return {**dense, **{routers.get(name, name): value for name, value in experts.items()}}


def held_rows(experts: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns [n, ..] of every [M, ..]: the rows of the held experts of its layer."""
    return {name: value[held[layer_of(name)]] for name, value in experts.items()}


def all_rows(rows: Mapping[str, Tensor], held: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns [M, ..] of every [n, ..]: a row for each expert of its layer, zero for those that are not held."""
    return {
        name: part.new_zeros(sizes[layer_of(name)], *part.shape[1:]).index_copy(0, held[layer_of(name)], part)
        for name, part in rows.items()
    }


def holder_weights(held: Mapping[str, Tensor], sizes: Mapping[str, int], examples: int) -> dict[str, Tensor]:
    """Returns layer -> [M], the client's number of examples for every expert that it holds, 0 for the others."""
    return {layer: torch.zeros(sizes[layer]).index_fill(0, ids, examples) for layer, ids in held.items()}


def full_tensors(
    model: ModelInfo, dense: Mapping[str, Tensor], rows: Mapping[str, Tensor], held: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns dense trainables and the rows of the held experts as one adapter, zero for the experts not held."""
    sizes = {layer.experts: layer.num_experts for layer in model.moe}
    return together(model, dense, all_rows(rows, held, sizes))


def _names_of_experts(model: ModelInfo, names: Iterable[str]) -> dict[str, str]:
    """Returns the adapter's name of every trainable with a row for each expert -> its name here."""
    routers = {delta_name(layer.router): f"{layer.experts}.{ROUTER_ROWS}" for layer in model.moe}
    prefixes = tuple(f"{layer.experts}." for layer in model.moe)
    return {name: routers.get(name, name) for name in names if name in routers or name.startswith(prefixes)}
