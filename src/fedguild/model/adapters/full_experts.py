"""Experts trained in full: every matrix W of every expert (gate, up, down) gets a change D of its shape.

A slot's experts are W + D. What is trained, sent and averaged is D, which starts at zero; the
backbone stays as it is, and the products of W are shared by all slots (model/moe/full.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedguild.model.plan import ModelInfo

if TYPE_CHECKING:
    from fedguild.model.slots import SlotModel


@dataclass(frozen=True)
class FullExperts:
    """Trains `{experts}.{gate,up,down}_proj.delta` [M, out, in] of every mixture-of-experts layer."""

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns name -> [M, width, hidden] of gate and up, [M, hidden, width] of down.

        Raises:
            ModelError: the model has no experts.
        """
        model.require_experts("Training experts in full")
        return {
            f"{moe.experts}.{projection}.delta": (
                (moe.num_experts, moe.hidden, moe.width)
                if projection == "down_proj"
                else (moe.num_experts, moe.width, moe.hidden)
            )
            for moe in model.moe
            for projection in moe.projections
        }

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Returns no change."""
        return torch.zeros(shape)

    def slot_axis(self, name: str) -> int:
        """Returns 1: storage is [M, S, out, in], (expert, slot) groups side by side."""
        return 1

    def decays(self, name: str) -> bool:
        """Weight decay draws an expert back to its pretrained weights."""
        return True

    def attach(self, model: SlotModel, parts: Sequence[FullExperts]) -> None:
        """Gives every layer its changes; the layer drops them when the slots close."""
        for layer in model.backbone.moe:
            layer.expert_delta = tuple(
                model.loaded[f"{layer.info.experts}.{projection}.delta"].stored for projection in layer.info.projections
            )
