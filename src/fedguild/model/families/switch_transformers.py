"""SwitchTransformers (Fedus et al., 2022).

Its experts, which transformers stores separately, are stacked for the view. A sparse MLP of this family has a router
that takes the best expert of each token, times its probability, and a `ModuleDict` of experts without a gate:
wo relu(wi x). The stack takes the place of the `ModuleDict`, so the experts run grouped and with the trainables of
several slots, like those of every other family. `published` returns a weight's original names in transformers.

Source: Fedus et al., Switch Transformers, JMLR 2022, Section 2; transformers' `SwitchTransformersSparseMLP`, whose
expert capacity is counted in each row, earlier tokens first. Deviation: the expert is chosen in fp32, while
transformers first rounds the probabilities to the model's dtype, so in bf16 a near tie may go to the other expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersExperts,
    SwitchTransformersSparseMLP,
)

from fedguild.core.errors import ModelError
from fedguild.model.moe.family import Family
from fedguild.model.moe.view import MoeLayer

_PUBLISHED = {"up_proj": "wi", "down_proj": "wo"}


class SwitchExperts(nn.Module):
    """The experts of one layer: up_proj [M, F, H] (wi) and down_proj [M, H, F] (wo), frozen."""

    up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(up, requires_grad=False)
        self.down_proj = nn.Parameter(down, requires_grad=False)
        self.act_fn = activation
        self.has_gate = False
        self.run: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
        """Returns [N, H], each token's expert of `hidden` times its weight.

        Args:
            hidden: [N, H].
            selected: [N, 1, M] one-hot; zeros for a token that gets no expert.
            weights: [N, 1].
        """
        assert self.run is not None
        return self.run(hidden, _chosen(selected), weights)


class SwitchTransformers(Family):
    """SwitchTransformers; see the module's docstring."""

    router = "router"
    projection = "classifier"
    routing: Mapping[str, Any] = MappingProxyType({})
    since = "5.18"
    linear = True

    def prepare(self, model: nn.Module) -> None:
        """Stacks the experts of every sparse MLP, layer by layer.

        Raises:
            ModelError: the experts are quantised.
        """
        for block in list(model.modules()):
            if not isinstance(block, SwitchTransformersSparseMLP):
                continue
            experts: Any = block.experts
            block.experts = SwitchExperts(  # type: ignore[assignment]
                _stacked(experts, "wi"), _stacked(experts, "wo"), next(iter(experts.values())).act
            )
            block.router.classifier.to(block.router.dtype)
            block.router.top_k = 1  # type: ignore[assignment]

    def capacity(self, router: Any) -> int | None:
        return int(router.expert_capacity)

    def decoded(self, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits, weights and indices of (one-hot [.., 1, M], weights [.., 1], logits [.., M])."""
        selected, weights, logits = output
        return logits.flatten(0, -2), weights.reshape(-1, 1), _chosen(selected).reshape(-1, 1)

    def encoded(self, output: Any, logits: Tensor, weights: Tensor, indices: Tensor) -> Any:
        selected, native, own = output
        experts = logits.shape[-1]
        one_hot = nn.functional.one_hot(indices, experts + 1)[..., :experts]
        return one_hot.view_as(selected), weights.to(native.dtype).view_as(native), logits.view_as(own)

    def attach(self, model: Any, layers: Sequence[MoeLayer]) -> None:
        for layer in layers:
            experts: Any = layer.experts
            experts.run = layer.run

    def published(self, weight: str, experts: int) -> list[str]:
        """Returns `….expert_0.wi`, `….expert_1.wi`, … of `….up_proj`, and `….wo` of `….down_proj`."""
        path, _, leaf = weight.rpartition(".")
        return [f"{path}.expert_{index}.{_PUBLISHED[leaf]}" for index in range(experts)]


FAMILY = SwitchTransformers()


def _chosen(selected: Tensor) -> Tensor:
    """Returns the expert [.., 1] of a one-hot choice [.., 1, M]; M where there is none."""
    return selected.argmax(dim=-1).masked_fill(~selected.any(dim=-1), selected.shape[-1])


def _stacked(experts: SwitchTransformersExperts, linear: str) -> Tensor:
    """Returns [M, out, in], the experts' matrices of one name."""
    weights = [getattr(expert, linear).weight for expert in experts.values()]
    if not all(weight.is_floating_point() for weight in weights):
        raise ModelError(
            "The experts of a SwitchTransformers model cannot be loaded in 4 bit.", "Set model.load_in_4bit=false."
        )
    return torch.stack([weight.detach() for weight in weights])
