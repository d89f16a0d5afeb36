"""Experts trained in full: every matrix W of every expert (gate, up, down) gets a change D of the same shape.

A slot's experts are W + D. D starts at zero and is trained, sent and averaged; the backbone is unchanged, and all slots
share the products of W (model/moe/full.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedguild.model.adapters.part import AdapterHost, AdapterPart
from fedguild.model.adapters.storage import Layout
from fedguild.model.info import ModelInfo


@dataclass(frozen=True)
class FullExperts(AdapterPart):
    """Trains `{experts}.{gate,up,down}_proj.delta` [M, out, in] of every mixture-of-experts layer."""

    folds_into_weights = True

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

    def layout(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        return Layout(shape, axis=1)

    def attach(self, host: AdapterHost, parts: Sequence[FullExperts]) -> None:
        """Adds the changes to every layer; they are removed when the slots close."""
        for layer in host.backbone.moe:
            layer.expert_delta = tuple(
                host.running(f"{layer.info.experts}.{projection}.delta") for projection in layer.info.projections
            )
