"""SwitchTransformers: experts that transformers stores separately, stacked for the view.

A sparse MLP of this family has a router that takes the best expert of each token, times its probability, and a
`ModuleDict` of experts without a gate: wo relu(wi x). The stack takes the place of the `ModuleDict`, so the experts run
grouped and with the trainables of several slots, like those of every other family. `published` returns a weight's
original names in transformers.

Source: Fedus et al., Switch Transformers, JMLR 2022, Section 2; transformers' `SwitchTransformersSparseMLP`, whose
expert capacity is counted in each row, earlier tokens first. Deviation: the expert is chosen in fp32, while
transformers first rounds the probabilities to the model's dtype, so in bf16 a near tie may go to the other expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersExperts,
    SwitchTransformersSparseMLP,
)

from fedguild.core.errors import ModelError
from fedguild.model.info import MoeInfo
from fedguild.model.moe.experts import FrozenExperts
from fedguild.model.moe.family import Family
from fedguild.model.moe.routing import RoutingRule
from fedguild.model.moe.view import MoeLayer

PROJECTIONS = ("up_proj", "down_proj")
_PUBLISHED = {"up_proj": "wi", "down_proj": "wo"}


class SwitchExperts(nn.Module):
    """The experts of one layer: up_proj [M, F, H] (wi) and down_proj [M, H, F] (wo), frozen."""

    up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(up, requires_grad=False)
        self.down_proj = nn.Parameter(down, requires_grad=False)
        self.activation = activation
        self.run: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
        """Returns [N, H], each token's expert of `hidden` times its weight.

        Args:
            hidden: [N, H].
            selected: [N, 1, M] one-hot; zeros for a token that gets no expert.
            weights: [N, 1].
        """
        assert self.run is not None
        chosen = selected.argmax(dim=-1).masked_fill(~selected.any(dim=-1), selected.shape[-1])
        return self.run(hidden, chosen, weights)


class SwitchTransformers(Family):
    """SwitchTransformers; see the module's docstring."""

    router = "router"
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

    def info(self, name: str, block: Any) -> MoeInfo:
        num_experts, width, hidden = block.experts.up_proj.shape
        router = f"{name}.router.classifier"
        return MoeInfo(name, router, f"{name}.experts", num_experts, 1, hidden, width, PROJECTIONS)

    def rule(self, router: Any) -> RoutingRule:
        return RoutingRule()

    def capacity(self, router: Any) -> int | None:
        return int(router.expert_capacity)

    def frozen(self, experts: Any) -> FrozenExperts:
        return FrozenExperts(experts.up_proj, experts.down_proj, experts.activation)

    def attach(self, model: Any, layers: Sequence[MoeLayer]) -> None:
        for layer in layers:
            experts: Any = layer.experts
            experts.run = layer.run
            layer.router.register_forward_hook(_top1_hook(layer))

    def published(self, weight: str, experts: int) -> list[str]:
        """Returns `….expert_0.wi`, `….expert_1.wi`, … of `….up_proj`, and `….wo` of `….down_proj`."""
        path, _, leaf = weight.rpartition(".")
        return [f"{path}.expert_{index}.{_PUBLISHED[leaf]}" for index in range(experts)]


FAMILY = SwitchTransformers()


def _top1_hook(layer: MoeLayer) -> Any:
    """Returns a forward hook that rewrites a router's (one-hot [.., 1, M], weight [.., 1], logits [.., M])."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if layer.runtime.current is None:
            return output
        selected, native, logits = output
        hidden, experts = args[0], logits.shape[-1]
        ours, weights, indices = layer.routed(hidden.reshape(-1, hidden.shape[-1]), logits.reshape(-1, experts))
        one_hot = nn.functional.one_hot(indices, experts + 1)[..., :experts]
        return one_hot.view_as(selected), weights.to(native.dtype).view_as(native), ours.view_as(logits)

    return hook


def _stacked(experts: SwitchTransformersExperts, linear: str) -> Tensor:
    """Returns [M, out, in], the experts' matrices of one name."""
    weights = [getattr(expert, linear).weight for expert in experts.values()]
    if not all(weight.is_floating_point() for weight in weights):
        raise ModelError(
            "The experts of a SwitchTransformers model cannot be loaded in 4 bit.", "Set model.load_in_4bit=false."
        )
    return torch.stack([weight.detach() for weight in weights])
