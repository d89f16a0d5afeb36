"""Restricted routing of a sub-MoE: a slot's routers choose among the experts that its client holds.

The logits of the other experts become -inf before the softmax, which is what a router without their
rows computes. The part trains nothing; the experts that a slot holds can be changed between passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fedguild.core.errors import ConfigError
from fedguild.model.adapters.part import AdapterHost, AdapterPart
from fedguild.model.info import ModelInfo, MoeInfo


@dataclass(frozen=True)
class HeldExperts(AdapterPart):
    """Restricts the routing to some experts of every layer.

    Attributes:
        held: The experts of each layer, in module order; empty where all are held.
    """

    held: tuple[tuple[int, ...], ...] = ()

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns nothing, as nothing is trained.

        Raises:
            ModelError: the model is dense, or a router is not a softmax over all experts.
        """
        model.require_softmax("A sub-MoE")
        return {}

    def attach(self, host: AdapterHost, parts: Sequence[HeldExperts]) -> None:
        """Masks every router, and leaves a `Holding` in `host.attached`.

        Raises:
            ConfigError: a layer has fewer held experts than active ones, or an expert does not exist.
        """
        holding = host.attached[HeldExperts] = Holding(host)
        for slot, part in enumerate(parts):
            if part.held:
                layers = (layer.experts for layer in host.backbone.info.moe)
                indices = (torch.tensor(experts, dtype=torch.int64) for experts in part.held)
                holding.hold(slot, dict(zip(layers, indices, strict=True)))


class Holding:
    """The experts that every slot holds; all of them at the start.

    Args:
        host: The slots.
    """

    def __init__(self, host: AdapterHost) -> None:
        self._host = host
        self._layers = {layer.info.experts: layer.info for layer in host.backbone.moe}
        self._masks = {
            name: torch.zeros(host.slots, info.num_experts, device=host.device) for name, info in self._layers.items()
        }
        for layer in host.backbone.moe:
            layer.logit_terms.append(self._term(self._masks[layer.info.experts]))

    def hold(self, slot: int, held: Mapping[str, Tensor]) -> None:
        """Sets a slot's experts.

        Args:
            slot: Index of the slot.
            held: Path of each layer's experts -> [n] int64, their indices.

        Raises:
            ConfigError: a layer has fewer held experts than active ones, or an expert does not exist.
        """
        for name, experts in held.items():
            _check(self._layers[name], experts)
            mask = self._masks[name][slot].fill_(float("-inf"))
            mask[experts.to(mask.device)] = 0.0

    def _term(self, mask: Tensor) -> Callable[[Tensor], Tensor]:
        def term(hidden: Tensor) -> Tensor:
            current = self._host.backbone.runtime.current
            assert current is not None
            return embedding(current.slot_of_token(hidden.shape[0], hidden.device), mask)

        return term


def _check(layer: MoeInfo, experts: Tensor) -> None:
    chosen = set(experts.tolist())
    if len(chosen) < layer.top_k or not chosen <= set(range(layer.num_experts)):
        raise ConfigError(
            f"{layer.name}: a sub-MoE needs at least {layer.top_k} of the experts 0 to {layer.num_experts - 1}, "
            f"but holds {sorted(chosen)}."
        )
