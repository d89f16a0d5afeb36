"""Llama 4 (Meta, 2025).

Its router scores by sigmoid, and the score of a token's one expert scales the expert's input, not its output. The block
runs every expert on every token, zeros for those that the token does not take; here each token runs its own expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fedguild.model.info import ExpertLayout
from fedguild.model.moe.experts import FrozenExperts
from fedguild.model.moe.family import Family, moe_blocks
from fedguild.model.moe.layout import canonicalise
from fedguild.model.moe.view import MoeLayer


class Llama4(Family):
    """Llama 4; see the module's docstring."""

    router = "router"
    routing: Mapping[str, Any] = MappingProxyType({"score": "sigmoid"})
    weighs_input = True

    def fits(self, config: Any) -> bool:
        return bool(config.num_experts_per_tok == 1)

    def prepare(self, model: nn.Module) -> None:
        """Gives the experts the view's layout; transformers' module does not say that its own is transposed."""
        for _, block in moe_blocks(model):
            canonicalise(block.experts, ExpertLayout(transposed=True, declared=False))

    def frozen(self, experts: Any) -> FrozenExperts:
        return FrozenExperts(experts.gate_up_proj, experts.down_proj, partial(_gated, experts.act_fn))

    def decoded(self, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits, weights and indices of (scores [N, M], 0 for the experts not taken; logits [N, M])."""
        scores, logits = output
        weights, indices = scores.max(dim=-1, keepdim=True)
        return logits, weights, indices

    def encoded(self, output: Any, logits: Tensor, weights: Tensor, indices: Tensor) -> Any:
        scores, _ = output
        return torch.zeros_like(scores).scatter(1, indices, weights.to(scores.dtype)), logits

    def attach(self, model: Any, layers: Sequence[MoeLayer]) -> None:
        for layer in layers:
            experts: Any = layer.experts
            experts.forward = partial(_run, layer)


FAMILY = Llama4()


def _run(layer: MoeLayer, inputs: Tensor) -> Tensor:
    """Returns each expert's outputs [M·N, H] of its inputs [M·N, H], of which a token has one that is not zero."""
    experts, hidden = layer.info.num_experts, inputs.shape[-1]
    of_experts = inputs.view(experts, -1, hidden)
    chosen = of_experts.detach().any(dim=-1).int().argmax(dim=0)
    places = chosen[None, :, None].expand(1, -1, hidden)
    ones = torch.ones_like(chosen[:, None], dtype=torch.float32)
    output = layer.run(of_experts.gather(0, places)[0], chosen[:, None], ones)
    return output.new_zeros(of_experts.shape).scatter(0, places, output[None]).flatten(0, 1)


def _gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * activation(gate)
