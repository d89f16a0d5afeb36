"""Importance of the experts to a client, information under the bottleneck, and the choice within a budget.

HFedMoE, Eq. 3 to 5 and 9 to 16. A batch is an optimizer step: all of its passes are counted together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedguild.client.router_means import probabilities
from fedguild.model.info import MoeInfo
from fedguild.model.moe.view import Routing
from fedguild.model.on_device import kept_on_device


@dataclass
class _Layer:
    """Sums over a batch's real tokens in one layer, fp64 on the device of the router.

    Attributes:
        total: [S, M] of G_e.
        peak: [S, M] the largest G_e.
        logs: [S, M] of G_e log G_e.
        routed: [S, M] tokens that activated the expert.
        tokens: [S].
    """

    total: Tensor
    peak: Tensor
    logs: Tensor
    routed: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, slots: int, experts: int, device: torch.device) -> _Layer:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        wide = (slots, experts)
        return cls(zeros(*wide), zeros(*wide), zeros(*wide), zeros(*wide), zeros(slots))


class Importance:
    """The routing of every client of a cohort, and what follows from it for its experts.

    Args:
        layers: The model's MoE layers, in module order.
        slots: S, the clients of the cohort.
        cumulative: lambda of Eq. 5.
        redundancy: beta of Eq. 14.
        rank_by: What the experts are chosen by, I_b or s_b.
    """

    def __init__(
        self,
        layers: Sequence[MoeInfo],
        slots: int,
        cumulative: float,
        redundancy: float,
        rank_by: Literal["information", "importance"] = "information",
    ) -> None:
        self.experts = [layer.num_experts for layer in layers]
        self.slots = slots
        self.cumulative = cumulative
        self.redundancy = redundancy
        self.rank_by = rank_by
        self._batch: dict[int, _Layer] = {}
        self._round: dict[int, _Layer] = {}
        self._scores: dict[int, Tensor] = {}
        self._batches: dict[int, Tensor] = {}

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        """Adds a layer's routing in one pass."""
        p = probabilities(routing.logits.detach()).double()
        active = p.new_zeros(len(p), p.shape[1] + 1).scatter_(1, routing.indices, 1.0)[:, :-1]
        real = torch.ones_like(routing.slot) if routing.keep is None else routing.keep
        p, active = p * real[:, None], active * real[:, None]
        if routing.layer not in self._batch:
            self._batch[routing.layer] = _Layer.empty(self.slots, p.shape[1], p.device)
        layer = self._batch[routing.layer]
        layer.total.index_add_(0, routing.slot, p)
        layer.peak.scatter_reduce_(0, routing.slot[:, None].expand_as(p), p, "amax")
        layer.logs.index_add_(0, routing.slot, torch.special.xlogy(p, p))
        layer.routed.index_add_(0, routing.slot, active)
        layer.tokens.index_add_(0, routing.slot, real.double())

    @torch.no_grad()
    def close_step(self, shares: Sequence[float], scope: Literal["model", "layer"]) -> list[Tensor]:
        """Ends a batch; returns [S, M] bool for every layer, the experts that train.

        Args:
            shares: C_c of every slot, as a share of the experts.
            scope: Whether C_c is that of all layers together or of each.
        """
        values = []
        for index in range(len(self.experts)):
            layer = self._batch[index]
            score = importance(layer.total, layer.peak, layer.tokens, self.cumulative)
            worth = score - self.redundancy * divergence(layer.total, layer.logs, layer.tokens)
            value = worth if self.rank_by == "information" else score
            values.append(value.masked_fill(layer.routed == 0, float("-inf")))
            self._remember(index, layer, score)
        self._batch = {}
        if scope == "layer":
            return [within_budget(value, shares) for value in values]
        chosen: list[Tensor] = list(within_budget(torch.cat(values, dim=1), shares).split(self.experts, dim=1))
        return chosen

    def usage(self, slot: int) -> list[Tensor]:
        """Returns a slot's u_c [M] of every layer (Eq. 16), in fp32 on the CPU; 0 without tokens."""
        if not self._round:
            return [torch.zeros(experts) for experts in self.experts]
        layers = [self._round[index] for index in range(len(self.experts))]
        return [(layer.total[slot] / layer.tokens[slot].clamp(min=1)).float().cpu() for layer in layers]

    def mean_score(self, slot: int) -> list[Tensor]:
        """Returns a slot's mean of s_b over its batches, [M] of every layer, in fp32 on the CPU; 0 without any."""
        if not self._round:
            return [torch.zeros(experts) for experts in self.experts]
        return [
            (self._scores[index][slot] / self._batches[index][slot].clamp(min=1)).float().cpu()
            for index in range(len(self.experts))
        ]

    def _remember(self, index: int, layer: _Layer, score: Tensor) -> None:
        """Adds a batch to the round."""
        took_part = (layer.tokens > 0).double()
        if index not in self._round:
            self._round[index] = _Layer.empty(self.slots, self.experts[index], layer.total.device)
            self._scores[index], self._batches[index] = torch.zeros_like(score), torch.zeros_like(took_part)
        self._round[index].total += layer.total
        self._round[index].tokens += layer.tokens
        self._scores[index] += score
        self._batches[index] += took_part


def importance(total: Tensor, peak: Tensor, tokens: Tensor, cumulative: float) -> Tensor:
    """Returns s_b [S, M] = lambda mean_i G_e(x_i) + (1 - lambda) max_i G_e(x_i) (Eq. 3 to 5); 0 without tokens.

    Args:
        total: [S, M] sums of G_e over the tokens.
        peak: [S, M] the largest G_e.
        tokens: [S].
        cumulative: lambda.
    """
    return cumulative * total / tokens.clamp(min=1)[:, None] + (1 - cumulative) * peak


def divergence(total: Tensor, logs: Tensor, tokens: Tensor) -> Tensor:
    """Returns [S, M], mean_i G_e(x_i) log(G_e(x_i) / mean_j G_e(x_j)) (Eq. 10, 11).

    With q the mean of G_e this is mean_i G_e log G_e - q log q.

    Args:
        total: [S, M] sums of G_e over the tokens.
        logs: [S, M] sums of G_e log G_e.
        tokens: [S].
    """
    count = tokens.clamp(min=1)[:, None]
    mean = total / count
    apart: Tensor = logs / count - torch.special.xlogy(mean, mean)
    return apart.clamp(min=0)


def within_budget(value: Tensor, shares: Sequence[float]) -> Tensor:
    """Returns [S, E] bool: the experts with the largest positive values, at most each slot's share of E (Eq. 15).

    A negative value would lower the sum that Eq. 15 maximises. Of equal values the first come first.

    Args:
        value: [S, E], -inf for an expert without a token.
        shares: Each slot's C_c over E; at least one expert.
    """
    most = kept_on_device(tuple(max(1, math.floor(share * value.shape[1] + 1e-9)) for share in shares), value.device)
    place = value.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (place < most[:, None]) & (value > 0)
