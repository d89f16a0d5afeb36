"""Routing token by token in Python floats, and a recount of what was activated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor


def route_token(
    logits: list[float],
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    renormalise: bool = False,
    scaling: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
    group_score: Literal["max", "top2"] = "max",
    bias: list[float] | None = None,
) -> dict[int, float]:
    """Returns the active experts of one token and their weights.

    Sources: OLMoE (Eq. 1: softmax, then top-k, not renormalised), Mixtral (renormalised over the
    chosen), DeepSeek-V2 (Section 2.2.2: a token stays in the groups of highest maximum),
    DeepSeek-V3 (Eq. 12-16: sigmoid affinity, bias for choosing only, groups by their two best).
    """
    if score == "softmax":
        highest = max(logits)
        powers = [math.exp(value - highest) for value in logits]
        scores = [power / sum(powers) for power in powers]
    else:
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    choice = [value + (bias[expert] if bias else 0.0) for expert, value in enumerate(scores)]
    size = len(choice) // groups
    members = [list(range(group * size, (group + 1) * size)) for group in range(groups)]
    best = [sorted((choice[expert] for expert in group), reverse=True) for group in members]
    worth = [values[0] if group_score == "max" else sum(values[:2]) for values in best]
    kept = sorted(range(groups), key=lambda group: -worth[group])[:groups_kept] if groups > 1 else [0]
    allowed = [expert for group in kept for expert in members[group]]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[:top_k]
    total = sum(scores[expert] for expert in chosen) if renormalise else 1.0
    return {expert: scores[expert] / total * scaling for expert in chosen}


def as_dicts(weights: Tensor, indices: Tensor, experts: int) -> list[dict[int, float]]:
    """Returns each token's active experts and weights from a routing [N, k]; index M is not active."""
    return [
        {int(e): float(w) for e, w in zip(token_indices, token_weights, strict=True) if e < experts}
        for token_indices, token_weights in zip(indices.tolist(), weights.tolist(), strict=True)
    ]


class Recount:
    """Writes down every routing of a model's forward passes by hooks of its own.

    Args:
        routers: The router modules, in layer order.
    """

    def __init__(self, routers: Sequence[Any]) -> None:
        self.chosen: list[list[Tensor]] = [[] for _ in routers]
        self._handles = [router.register_forward_hook(self._note(layer)) for layer, router in enumerate(routers)]

    def _note(self, layer: int) -> Any:
        def hook(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self.chosen[layer].append(output[2].detach().clone())

        return hook

    def close(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def counts(self, owners: Sequence[Sequence[int | None]], slots: int, experts: int) -> list[list[list[int]]]:
        """Returns [layer][slot][expert] activations.

        Args:
            owners: For every forward pass, the slot of each token; None for padding.
            slots: Number of slots.
            experts: Number of experts.
        """
        table = [[[0] * experts for _ in range(slots)] for _ in self.chosen]
        for layer, passes in enumerate(self.chosen):
            for indices, owner in zip(passes, owners, strict=True):
                for token, slot in enumerate(owner):
                    for expert in indices[token].tolist():
                        if slot is not None and expert < experts:
                            table[layer][slot][expert] += 1
        return table
