"""Routing statistics of FedAlign-MoE's clients: mean routing, margins and input regions of the experts.

Source: Fang et al., "Aggregation Alignment for Federated Learning with Mixture-of-Experts under
Data Heterogeneity", Eq. 3, 5 and 12. p(x) [M] is the softmax over all experts of a layer's router
logits for token x, whatever weights the model itself derives from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.client.observing import observing
from fedguild.client.router_means import probabilities
from fedguild.core.seeding import numpy_rng
from fedguild.data.batches import Encoded
from fedguild.model.info import MoeInfo
from fedguild.model.moe.view import Routing


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one client in one layer.

    Attributes:
        routing: [M] p-bar, the mean of p over its tokens (Eq. 3); zero where it had no token.
        margin: [M] m, the mean of max(0, p(e) - max of the others) (Eq. 5).
        region: [M, H] mu, the mean input of the tokens of which e was the likeliest expert (Eq. 12);
            if there were none, of the tokens that activated e; zero if there were none of these either.
    """

    routing: Tensor
    margin: Tensor
    region: Tensor


class RoutingProfile:
    """Adds up p, its margins and the experts' inputs over the passes that it observes.

    It holds two sums of [S, M, H] for each layer, whatever the number of tokens.

    Args:
        layers: The model's MoE layers.
        slots: S, the clients of the cohort.
        device: Where the passes run.
        dtype: The dtype of the sums, fp32 or fp64.
    """

    def __init__(self, layers: Sequence[MoeInfo], slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self._sums = [_Sums(layer, slots, device, dtype) for layer in layers]

    def observe(self, routing: Routing) -> None:
        """Adds one layer's routing of a pass; padding does not count."""
        self._sums[routing.layer].add(routing)

    def of(self, slot: int) -> list[LayerStatistics]:
        """Returns a client's statistics of every layer, in fp32 (or fp64) on the CPU."""
        return [sums.of(slot) for sums in self._sums]


class _Sums:
    """One layer's sums over tokens."""

    def __init__(self, layer: MoeInfo, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        experts = layer.num_experts
        self.routing = torch.zeros(slots, experts, dtype=dtype, device=device)
        self.margin = torch.zeros_like(self.routing)
        self.tokens = torch.zeros(slots, dtype=dtype, device=device)
        # An additional last expert collects the inactive choices (index M).
        self.likeliest = torch.zeros(slots, experts + 1, layer.hidden + 1, dtype=dtype, device=device)
        self.active = torch.zeros_like(self.likeliest)

    @torch.no_grad()
    def add(self, routing: Routing) -> None:
        kind, slot = self.routing.dtype, routing.slot
        p = _only(routing.keep, probabilities(routing.logits).to(kind))
        best = p.topk(2, dim=-1)
        likeliest = best.indices[:, 0]
        margin = torch.zeros_like(p).scatter_(1, likeliest[:, None], best.values[:, :1] - best.values[:, 1:])
        self.routing.index_add_(0, slot, p)
        self.margin.index_add_(0, slot, margin)
        self.tokens.index_add_(0, slot, _only(routing.keep, torch.ones_like(slot, dtype=kind)))
        hidden = routing.hidden.to(kind)
        counted = _only(routing.keep, torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1))
        experts = self.likeliest.shape[1]
        self.likeliest.flatten(0, 1).index_add_(0, slot * experts + likeliest, counted)
        for column in routing.indices.unbind(dim=1):
            self.active.flatten(0, 1).index_add_(0, slot * experts + column, counted)

    def of(self, slot: int) -> LayerStatistics:
        tokens = self.tokens[slot].clamp(min=1)
        likeliest, active = self.likeliest[slot, :-1], self.active[slot, :-1]
        sums = torch.where(likeliest[:, -1:] > 0, likeliest, active)
        region = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        return LayerStatistics((self.routing[slot] / tokens).cpu(), (self.margin[slot] / tokens).cpu(), region.cpu())


def _only(keep: Tensor | None, values: Tensor) -> Tensor:
    """Returns values [N, …] with zeros, which add nothing, in place of padding's; no shape depends on its number."""
    return values if keep is None else values.masked_fill(~keep.view(-1, *[1] * (values.dim() - 1)), 0.0)


def measure_routing(cohort: Cohort, tokens: int | None) -> RoutingProfile:
    """Returns the statistics of every client's routing, from a forward pass over its training examples.

    Args:
        cohort: The clients, after their training.
        tokens: Largest number of tokens of each client, in whole examples, the same in every round; None for all.
    """
    model = cohort.model
    dtype = torch.float64 if model.backbone.dtype is torch.float64 else torch.float32
    profile = RoutingProfile(model.backbone.info.moe, len(cohort.work), model.device, dtype)
    rows = [sample_rows(work.examples, tokens, cohort.seed, work.client.index) for work in cohort.work]
    with observing(model.backbone.moe, profile.observe):
        for _ in cohort.passes(rows):
            pass
    return profile


def sample_rows(examples: Sequence[Encoded], tokens: int | None, seed: int, client: int) -> list[Encoded]:
    """Returns as many of a client's examples, in a random order, as have at most `tokens` tokens; at least one."""
    if tokens is None:
        return list(examples)
    order = numpy_rng(seed, "routing statistics", client).permutation(len(examples)).tolist()
    totals = accumulate(len(examples[index].input_ids) for index in order)
    count = sum(total <= tokens for total in totals)
    return [examples[index] for index in order[: max(1, count)]]
