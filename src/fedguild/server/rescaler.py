"""FLAME's rescaler s_i where several methods have it: its part of a plan, its tensors, its figure in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from fedguild.core.payload import Payload
from fedguild.model.adapters.output_scale import SHARED, OutputScale
from fedguild.model.adapters.part import AdapterPart
from fedguild.server.method import Observation

Value = TypeVar("Value")
RESCALER = "rescaler"
"""The part with s: in the state, `{budget}/{name}` with every budget's mean."""
Rescaler = Annotated[
    Literal["per_layer", "shared", "static", "none"],
    Field(description="s_i: learned per layer, one learned number, the static ratio k / k_i, or none (FLAME, Table 5)"),
]


def scale_parts(kind: Literal["per_layer", "shared", "static", "none"], ratio: float) -> tuple[AdapterPart, ...]:
    """Returns the part of a plan with s_i; nothing for `none`.

    Args:
        kind: How s_i comes about.
        ratio: k / k_i, the static one.
    """
    if kind == "none":
        return ()
    return (OutputScale("fixed", ratio) if kind == "static" else OutputScale(kind),)


def split_scales(tensors: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Returns an adapter without its output scales, and these."""
    scales = {name: value for name, value in tensors.items() if name.endswith(SHARED)}
    return {name: value for name, value in tensors.items() if name not in scales}, scales


def scale_observations(state: Payload) -> list[Observation]:
    """Returns the mean s of every budget's clients, by layer; nothing where none is learned."""
    by_budget: dict[str, list[Tensor]] = {}
    for name, scale in state.part("budget").items():
        by_budget.setdefault(name.partition("/")[0], []).append(scale.reshape(()))
    if not by_budget:
        return []
    values = torch.stack([torch.stack(scales) for scales in by_budget.values()])
    layers = [f"layer {index}" for index in range(values.shape[1])] if values.shape[1] > 1 else ["all layers"]
    return [Observation("rescaler s, mean of a budget's clients", values, list(by_budget), layers)]
