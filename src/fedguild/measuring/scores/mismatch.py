"""Mismatch of a layer at a budget's active experts: the change of its output, and how much of it a factor repairs.

y_k is the output of a layer's experts as a budget runs them, with its k active experts and its output scale. y is their
output for the same input with the model's own number of active experts and no scale. Both are taken over all real
tokens of some texts, in the fine-tuned model. s is the factor with the least |s y_k - y|^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fedguild.client.observing import observing
from fedguild.model.moe.view import MoeLayer, Routing
from fedguild.server.method import Observation

SCALE = "scale mismatch at a budget's active experts, s = <y_k, y> / |y_k|^2"
ROUTER = "router mismatch at a budget's active experts, |s y_k - y| / |y|"


class Mismatch:
    """Sums <y_k, y>, |y_k|^2 and |y|^2 over the tokens of each of `slots` slots, in fp64."""

    def __init__(self, layers: Sequence[MoeLayer], slots: int) -> None:
        self._layers = layers
        self._sums = torch.zeros(3, slots, len(layers), dtype=torch.float64)

    def observing(self) -> AbstractContextManager[None]:
        """Observes every pass inside the block."""
        return observing(self._layers, self._look_at)

    def _look_at(self, routing: Routing) -> None:
        own, full = self._layers[routing.layer].outputs_of(routing)
        own, full = own.double(), full.double()
        of_tokens = torch.stack([(own * full).sum(-1), own.square().sum(-1), full.square().sum(-1)])
        if routing.keep is not None:
            of_tokens = of_tokens * routing.keep
        of_slots = of_tokens.new_zeros(3, self._sums.shape[1]).index_add_(1, routing.slot, of_tokens)
        self._sums[:, :, routing.layer] += of_slots.cpu()

    def observations(self, names: Sequence[str]) -> list[Observation]:
        """Returns s and |s y_k - y| / |y| by layer and slot; NaN where a layer had no output.

        Args:
            names: [S] name of each slot.
        """
        together, own, full = self._sums.mT
        scale = together / own
        left: Tensor = (1 - together * scale / full).clamp(min=0).sqrt()
        layers = [f"layer {index}" for index in range(scale.shape[0])]
        return [Observation(SCALE, scale, layers, tuple(names)), Observation(ROUTER, left, layers, tuple(names))]
