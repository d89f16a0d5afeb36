"""Selection bias: an offset phi for every expert that decides which experts a token activates, but not their weights.

L. Wang, H. Gao, C. Zhao, X. Sun, D. Dai, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv
2408.15664, 2024, Section 3, with phi on the logits rather than the scores: a family's scores are of any size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedguild.model.adapters.part import AdapterHost, AdapterPart, Standalone
from fedguild.model.adapters.storage import Layout
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.moe.routing import route
from fedguild.model.moe.view import MoeLayer

PHI = "selection_bias"
"""The leaf of phi's names, and the part of the state with phi."""


@dataclass(frozen=True)
class SelectionBias(AdapterPart):
    """Holds `{block}.selection_bias` [M] of every MoE layer, phi, which no client trains."""

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns the names -> [M].

        Raises:
            ModelError: the model is dense.
        """
        model.require_experts("A selection bias")
        return {f"{moe.name}.{PHI}": (moe.num_experts,) for moe in model.moe}

    def trains(self, name: str) -> bool:
        """Returns False: the server moves phi."""
        return False

    def layout(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Returns zeros [S, M]."""
        return Layout(shape, decays=False)

    def attach(self, host: AdapterHost, parts: Sequence[SelectionBias]) -> None:
        """Puts a chooser on every MoE layer; the layer drops it when the model closes."""
        for layer in host.backbone.moe:
            layer.chooser = BiasedChooser(layer, host.running(f"{layer.info.name}.{PHI}"))

    def standalone(
        self, backbone: Backbone, parts: Sequence[AdapterPart], tensors: Mapping[str, Tensor]
    ) -> Standalone | None:
        """Returns phi for `standalone.py`; None for a family that routes in another way than softmax and top-k."""
        if any(layer.capacity is not None or layer.rule.kind != "softmax" for layer in backbone.moe):
            return None
        layers = {
            layer.info.router: {
                "phi": f"{layer.info.name}.{PHI}",
                "renormalise": layer.rule.renormalise,
                "scaling": layer.rule.scaling,
            }
            for layer in backbone.moe
        }
        own = {name: tensors[name] for name in self.shapes(backbone.info)}
        return Standalone(Path(__file__).with_name("standalone.py"), {"layers": layers}, own)


@dataclass(frozen=True)
class BiasedChooser:
    """Chooses a layer's experts by the family's own rule from logits + phi, and weighs them by the logits alone.

    Attributes:
        layer: The layer.
        phi: [S, M].
    """

    layer: MoeLayer
    phi: Tensor

    def __call__(self, logits: Tensor, slot: Tensor, most_active: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns weights and experts [N, most_active]; see `Chooser`."""
        bias = getattr(self.layer.router, "e_score_correction_bias", None)
        return route(logits, self.layer.rule, most_active, active, bias, self.phi[slot])
