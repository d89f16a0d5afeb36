"""Dynamic Modulated Routing: a learnable offset phi per expert shifts which experts a token activates.

UB-SMoE, Section 5.1 and Algorithm 2. phi is a trainable [M] of every MoE layer and slot,
`{block}.phi`; weight decay does not apply to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fedguild.core.errors import ConfigError
from fedguild.model.adapters.part import AdapterHost, AdapterPart, Standalone
from fedguild.model.adapters.storage import Layout
from fedguild.model.backbone import Backbone
from fedguild.model.families import FAMILIES
from fedguild.model.info import ModelInfo
from fedguild.model.moe.routing import RoutingRule

Modulation = Literal["candidate", "preserve", "none"]
Gating = Literal["renormalised", "native"]
Value = TypeVar("Value")


@dataclass(frozen=True)
class ModulatedRouting(AdapterPart):
    """The part of a plan that modulates the routing; the same for all slots of a cohort.

    Attributes:
        modulation: Which logits phi is added to: those of the `candidates` largest (`candidate`,
            Eq. 10), those of all others while the largest stay active (`preserve`), or of none.
        candidates: N_p, how many of the largest logits are candidates or preserved.
        gating: The active experts' weights: softmax over the active ones alone (`renormalised`,
            Eq. 2), or the family's own rule (`native`).
        learned: Whether phi gets gradients.
    """

    modulation: Modulation = "candidate"
    candidates: int = 2
    gating: Gating = "renormalised"
    learned: bool = True

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns `{block}.phi` -> [M] of every MoE layer, 0 at the start (Algorithm 1, line 3); none unmodulated.

        Raises:
            ConfigError: there are more candidates than experts.
            ModelError: the model is dense, or a router is not a softmax over all experts.
        """
        model.require_experts("Modulated routing")
        if (self.modulation, self.gating) != ("none", "native"):
            model.require_softmax("Modulated routing")
        fewest = min(moe.num_experts for moe in model.moe)
        if not 0 <= self.candidates <= fewest:
            raise ConfigError(
                f"{self.candidates} candidates are requested, but {model.name} has {fewest} experts in a layer.",
                f"Choose candidates from 0 to {fewest}.",
            )
        if self.modulation == "none":
            return {}
        return {f"{moe.name}.phi": (moe.num_experts,) for moe in model.moe}

    def layout(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Returns [S, M]; weight decay would pull phi to 0, a regulariser that the paper does not have."""
        return Layout(shape, decays=False)

    def attach(self, host: AdapterHost, parts: Sequence[ModulatedRouting]) -> None:
        """Puts a chooser on every MoE layer; the layer drops it when the model closes.

        Raises:
            ConfigError: the slots' parts differ.
        """
        if any(part != self for part in parts):
            raise ConfigError("The clients of a cohort must modulate their routing in the same way.")
        if self.modulation == "none" and self.gating == "native":
            return
        for layer in host.backbone.moe:
            name = f"{layer.info.name}.phi"
            phi = host.running(name) if name in host.loaded else None
            layer.chooser = ModulatedChooser(self, phi if self.learned or phi is None else phi.detach(), layer.rule)

    def standalone(
        self, backbone: Backbone, parts: Sequence[AdapterPart], tensors: Mapping[str, Tensor]
    ) -> Standalone | None:
        """Returns phi and the options for `standalone.py`; None for a capacity, which it does not count."""
        if any(layer.capacity is not None for layer in backbone.moe):
            return None
        router = FAMILIES.load(backbone.info.family).router
        layers = {
            f"{layer.info.name}.{router}": {
                "phi": f"{layer.info.name}.phi",
                "renormalise": layer.rule.renormalise,
                "scaling": layer.rule.scaling,
            }
            for layer in backbone.moe
        }
        options = {"modulation": self.modulation, "candidates": self.candidates, "gating": self.gating}
        own = {name: tensors[name] for name in self.shapes(backbone.info)}
        return Standalone(Path(__file__).with_name("standalone.py"), {**options, "layers": layers}, own)


@dataclass(frozen=True)
class ModulatedChooser:
    """Chooses a layer's active experts by modulated logits m, and weighs them (Algorithm 2).

    Attributes:
        part: The options.
        phi: [S, M], or None without modulation.
        rule: The family's routing.
    """

    part: ModulatedRouting
    phi: Tensor | None
    rule: RoutingRule

    def __call__(self, logits: Tensor, slot: Tensor, most_active: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns weights and experts [N, most_active]; see `Chooser`."""
        scores = logits if logits.dtype is torch.float64 else logits.float()
        largest = scores.detach().topk(self.part.candidates, dim=-1).indices  # line 2
        modulated = self._modulate(scores, largest, slot)  # line 3
        indices = self._choose(modulated.detach(), largest, most_active)  # line 4
        beyond = None
        if active is not None:
            beyond = torch.arange(most_active, device=logits.device) >= active[:, None]
        weights = self._weigh(modulated, indices, beyond)  # line 5
        return weights, indices if beyond is None else indices.masked_fill(beyond, logits.shape[-1])

    def _modulate(self, scores: Tensor, largest: Tensor, slot: Tensor) -> Tensor:
        """Returns m [N, M] of the router's scores s [N, M] (Eq. 10)."""
        if self.phi is None:
            return scores
        among = torch.zeros_like(scores).scatter_(-1, largest, 1.0)
        where = among if self.part.modulation == "candidate" else 1.0 - among
        return scores + embedding(slot, self.phi).to(scores.dtype) * where

    def _choose(self, modulated: Tensor, largest: Tensor, most_active: int) -> Tensor:
        """Returns the experts [N, most_active], first those that a token with fewer active experts keeps."""
        if self.part.modulation != "preserve":
            return modulated.topk(most_active, dim=-1).indices
        kept = largest[:, :most_active]
        others = modulated.scatter(-1, kept, float("-inf")).topk(most_active - kept.shape[1], dim=-1).indices
        return torch.cat([kept, others], dim=-1)

    def _weigh(self, modulated: Tensor, indices: Tensor, beyond: Tensor | None) -> Tensor:
        """Returns the weights [N, most_active] (Eq. 2, or the family's own), 0 beyond a token's active experts."""
        chosen = modulated.gather(-1, indices)
        if beyond is not None:
            chosen = chosen.masked_fill(beyond, float("-inf"))
        if self.part.gating == "renormalised" or self.rule.renormalise:
            return chosen.softmax(dim=-1) * self.rule.scaling
        return (chosen - modulated.logsumexp(dim=-1, keepdim=True)).exp() * self.rule.scaling


def split(tensors: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Returns Theta and phi of an adapter separately."""
    phi = {name: value for name, value in tensors.items() if name.endswith(".phi")}
    return {name: value for name, value in tensors.items() if name not in phi}, phi
