"""Output scale: a factor s_i per slot on the routed output of the MoE layers.

Source: FLAME's rescaler, Section 4.2 (Table 5 compares the kinds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedguild.model.adapters.part import AdapterHost, AdapterPart
from fedguild.model.adapters.storage import Layout
from fedguild.model.info import ModelInfo, MoeInfo
from fedguild.model.on_device import on_device

SHARED = "output_scale"


@dataclass(frozen=True)
class OutputScale(AdapterPart):
    """Trains `{block}.output_scale` [] of every MoE layer, one `output_scale` [] for all, or holds it fixed.

    Attributes:
        kind: Trained per layer, trained and shared by all layers, or held at `start`.
        start: The initial (or fixed) value of s_i.
    """

    folds_into_weights = True

    kind: Literal["per_layer", "shared", "fixed"] = "per_layer"
    start: float = 1.0

    @property
    def cohort_key(self) -> object:
        return OutputScale, self.kind

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns the scalars' names; none if the scale is fixed."""
        if self.kind == "fixed":
            return {}
        return {self.name_in(moe): () for moe in model.moe}

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        return torch.full(shape, self.start)

    def layout(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Returns ones [S], without weight decay, which would pull the factors to 0."""
        return Layout(shape, decays=False, fill=1.0)

    def attach(self, host: AdapterHost, parts: Sequence[OutputScale]) -> None:
        """Sets the slots' factors [S] on every MoE layer; they are removed when the slots close."""
        fixed = on_device([part.start for part in parts], host.device, host.dtype)
        for layer in host.backbone.moe:
            layer.output_scale = fixed if self.kind == "fixed" else host.running(self.name_in(layer.info))

    def name_in(self, moe: MoeInfo) -> str:
        return SHARED if self.kind == "shared" else f"{moe.name}.{SHARED}"
