"""SwitchTransformers: experts that transformers keeps one by one, stacked for the view.

A sparse MLP of this family has a router that takes the best expert of each token, times its
probability, and a `ModuleDict` of experts without a gate: wo relu(wi x). The stack takes the
place of the `ModuleDict`, so that the experts run grouped and with what several slots train, as
those of every other family do. `unstacked` gives a weight its published names back.

Source: Fedus et al., Switch Transformers, JMLR 2022, Section 2; transformers'
`SwitchTransformersSparseMLP`, whose expert capacity is counted in each row, earlier tokens first.
Deviation: the expert is chosen in fp32, where transformers first rounds the probabilities to the
model's dtype, so that in bf16 a near tie may fall to the other expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersExperts,
    SwitchTransformersSparseMLP,
)

from fedguild.errors import ModelError
from fedguild.model.runtime import Runtime

FAMILY = "switch_transformers"
PROJECTIONS = ("up_proj", "down_proj")
_PUBLISHED = {"up_proj": "wi", "down_proj": "wo"}


class SwitchExperts(nn.Module):
    """The experts of one layer: up_proj [M, F, H] (wi) and down_proj [M, H, F] (wo), frozen.

    Args:
        up: [M, F, H].
        down: [M, H, F].
        activation: The function between them.
    """

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


def stack_experts(model: nn.Module) -> None:
    """Stacks the experts of every sparse MLP of a model, layer by layer; other models stay as they are.

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


def top1_hook(routed: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], runtime: Runtime) -> Any:
    """Returns a forward hook that puts a view's routing in the place of a router's own.

    Args:
        routed: (hidden [N, H], logits [N, M]) -> logits [N, M], weights [N, 1], indices [N, 1].
        runtime: Knows whether the view is in charge of the pass that runs.
    """

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if runtime.current is None:
            return output
        selected, native, logits = output
        hidden, experts = args[0], logits.shape[-1]
        ours, weights, indices = routed(hidden.reshape(-1, hidden.shape[-1]), logits.reshape(-1, experts))
        one_hot = nn.functional.one_hot(indices, experts + 1)[..., :experts]
        return one_hot.view_as(selected), weights.to(native.dtype).view_as(native), ours.view_as(logits)

    return hook


def unstacked(model: nn.Module, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]] | None:
    """Returns a stacked weight as transformers' own names and matrices; None if `name` is not one."""
    if not isinstance(model.get_submodule(name.rpartition(".")[0]), SwitchExperts):
        return None
    modules = published_modules(name, len(weight))
    return ((f"{module}.weight", part) for module, part in zip(modules, weight.unbind(), strict=True))


def published_modules(name: str, experts: int) -> list[str]:
    """Returns transformers' own linear layers, expert by expert, of a stacked weight."""
    path, _, leaf = name.rpartition(".")
    return [f"{path}.expert_{index}.{_PUBLISHED[leaf]}" for index in range(experts)]


def _stacked(experts: SwitchTransformersExperts, linear: str) -> Tensor:
    """Returns [M, out, in], the experts' matrices of one name."""
    weights = [getattr(expert, linear).weight for expert in experts.values()]
    if not all(weight.is_floating_point() for weight in weights):
        raise ModelError(
            "The experts of a SwitchTransformers model cannot be loaded in 4 bit.", "Set model.load_in_4bit=false."
        )
    return torch.stack([weight.detach() for weight in weights])
