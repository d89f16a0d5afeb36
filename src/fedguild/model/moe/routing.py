"""Routing rules: each family's function from router logits to active experts and their weights.

Transformers has a router class for each family; the fields of a `RoutingRule` describe how they differ. That `route`
equals a model's own router is checked as the model is loaded (`native.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from fedguild.model.info import Routing


@dataclass(frozen=True)
class RoutingRule:
    """A family's routing.

    Attributes:
        score: `softmax` over all experts, `sigmoid` of each (DeepSeek-V3), or `sparsemixer` (Phi-3.5-MoE): one expert
            after another, each with its softmax over the experts left whose logits are close to the best one's.
        renormalise: Whether the active experts' weights are scaled to sum to one.
        epsilon: Added to that sum.
        scaling: Factor on the weights (DeepSeek).
        groups: Number of expert groups, of which a token may use `groups_kept`; 1 means no limit.
        groups_kept: Groups that a token may use.
        group_score: A group's score is its best expert's (`max`) or its two best experts' sum.
        jitter: Half of the largest relative distance of a logit from the best that `sparsemixer` takes for close.
    """

    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalise: bool = False
    epsilon: float = 0.0
    scaling: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    jitter: float = 0.0

    @classmethod
    def of(cls, router: Any, **described: Any) -> Self:
        """Returns the rule that a family's data describe.

        Args:
            router: The router, for what its config decides.
            described: The fields that differ from the default. A name in place of a number or a truth value is the
                attribute of the router that has the value, where None means the default.

        Raises:
            AttributeError: the router has no such attribute.
        """
        found = {}
        for field in fields(cls):
            value = described.pop(field.name, None)
            if isinstance(value, str) and not isinstance(field.default, str):
                value = getattr(router, value)
            if value is not None:
                kind: Any = type(field.default)
                found[field.name] = kind(value)
        if described:
            raise AttributeError(f"a routing rule has no '{next(iter(described))}'")
        return cls(**found)

    def scores(self, logits: Tensor) -> Tensor:
        """Returns the experts' scores [N, M] in fp32, before any is chosen."""
        return logits.float().softmax(dim=-1) if self.score == "softmax" else logits.float().sigmoid()

    @property
    def kind(self) -> Routing:
        if self.score != "softmax":
            return self.score
        return "groups" if self.groups > 1 else "softmax"


def route(
    logits: Tensor,
    rule: RoutingRule,
    top_k: int,
    active_experts: Tensor | None = None,
    selection_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the active experts of every token.

    Args:
        logits: [N, M] router logits.
        top_k: The largest number of active experts of any token.
        active_experts: [N] active experts of each token, at most `top_k`; None means `top_k`.
        selection_bias: [M] added to the scores for the selection but not for the weights (DeepSeek-V3).

    Returns:
        Weights [N, top_k], in fp32, and expert indices [N, top_k]; beyond a token's active
        experts the weight is 0 and the index is M.
    """
    experts = logits.shape[-1]
    if rule.score == "sparsemixer":
        weights, indices = _sparse_mixer(logits.float(), top_k, rule.jitter)
    else:
        scores = rule.scores(logits)
        choice = scores if selection_bias is None else scores + selection_bias
        if rule.groups > 1:
            choice = choice.masked_fill(~_allowed(choice, rule), float("-inf"))
        indices = choice.topk(top_k, dim=-1).indices
        weights = scores.gather(-1, indices)
    if active_experts is not None:
        beyond = torch.arange(top_k, device=logits.device) >= active_experts[:, None]
        weights = weights.masked_fill(beyond, 0.0)
        indices = indices.masked_fill(beyond, experts)
    if rule.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.epsilon)
    return weights * rule.scaling, indices


def _sparse_mixer(logits: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Returns weights and experts [N, k] of a model that is not trained itself.

    Source: Liu et al., GRIN, 2024 (arXiv:2409.12136), and transformers' `sparsemixer`.
    """
    weights, indices, left = [], [], logits
    for _ in range(top_k):
        with torch.no_grad():
            best, index = left.max(dim=-1, keepdim=True)
            far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(-1, index))
        indices.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(indices, dim=-1)


def within_capacity(weights: Tensor, indices: Tensor, capacity: int, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Drops the pairs beyond an expert's capacity in each row; earlier tokens of a row take precedence.

    Source: Fedus et al., Switch Transformers, 2022, Section 2.2; padding must lie on the right.

    Args:
        weights: [N, k].
        indices: [N, k] experts; M for a pair that is not active.
        capacity: Largest number of pairs of an expert in one row.
        experts: M.
        rows: R; every N / R tokens are one row.

    Returns:
        Weights and indices, 0 and M for a pair that was dropped.
    """
    pairs = indices.reshape(rows, -1) if rows else indices
    if pairs.shape[1] <= capacity:
        return weights, indices
    place = nn.functional.one_hot(pairs, experts + 1).cumsum(dim=1).gather(-1, pairs[..., None])
    beyond = (place > capacity).view_as(indices)
    return weights.masked_fill(beyond, 0.0), indices.masked_fill(beyond, experts)


def _allowed(choice: Tensor, rule: RoutingRule) -> Tensor:
    """Returns [N, M] bool: the experts of the groups that a token may use."""
    grouped = choice.unflatten(-1, (rule.groups, -1))
    score = grouped.amax(dim=-1) if rule.group_score == "max" else grouped.topk(2, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.topk(rule.groups_kept, dim=-1).indices, True)
    return kept.unsqueeze(-1).expand_as(grouped).flatten(-2)
