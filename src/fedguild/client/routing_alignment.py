"""What FedAlign-MoE's clients measure of their routing, and what pulls it towards the others'.

Source: Fang et al., "Aggregation Alignment for Federated Learning with Mixture-of-Experts under
Data Heterogeneity", Eq. 3, 5, 8-12. Throughout, p(x) [M] is the softmax over all experts of a
layer's router logits for token x, whatever weights the model itself makes of them: over the
active experts alone, top-1 routing would give p = 1 and no gradient, and Eq. 10 needs p of
experts that are not active.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.client.observing import observing
from fedguild.data.batches import Encoded
from fedguild.model.info import MoeInfo
from fedguild.model.moe.view import Routing
from fedguild.seeding import numpy_rng

Divergence = Literal["pointwise", "bernoulli"]
SMALLEST = 1e-8
"""The least probability inside a logarithm."""


def probabilities(logits: Tensor) -> Tensor:
    """Returns p [N, M], the softmax over all experts, in at least fp32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)


def token_means(values: Tensor, slot: Tensor, keep: Tensor | None, slots: int) -> Tensor:
    """Returns [S, ..], each slot's mean of `values` [N, ..] over its real tokens; 0 for a slot without any.

    Args:
        values: A value, or several, of every token.
        slot: [N] slot of each token.
        keep: [N] bool, False for padding; None where every token is real.
        slots: S.
    """
    real = torch.ones_like(slot) if keep is None else keep
    real = real.to(values.dtype).view(-1, *[1] * (values.dim() - 1))
    sums = values.new_zeros(slots, *values.shape[1:]).index_add(0, slot, values * real)
    return sums / real.new_zeros(slots, *real.shape[1:]).index_add(0, slot, real).clamp(min=1)


@dataclass(frozen=True)
class LayerStatistics:
    """What one client measured in one layer.

    Attributes:
        routing: [M] p-bar, the mean of p over its tokens (Eq. 3); zero where it had no token.
        margin: [M] m, the mean of max(0, p(e) - max of the others) (Eq. 5).
        region: [M, H] mu, the mean input of the tokens of which e was the likeliest expert (Eq. 12);
            of those that activated e where there were none, and zero where nothing activated it.
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
        dtype: Of the sums, fp32 or fp64.
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
        # The last expert takes what is not active (index M).
        self.likeliest = torch.zeros(slots, experts + 1, layer.hidden + 1, dtype=dtype, device=device)
        self.active = torch.zeros_like(self.likeliest)

    @torch.no_grad()
    def add(self, routing: Routing) -> None:
        kind = self.routing.dtype
        keep = slice(None) if routing.keep is None else routing.keep
        p = probabilities(routing.logits)[keep].to(kind)
        slot, indices = routing.slot[keep], routing.indices[keep]
        best = p.topk(2, dim=-1)
        likeliest = best.indices[:, 0]
        margin = torch.zeros_like(p).scatter_(1, likeliest[:, None], best.values[:, :1] - best.values[:, 1:])
        self.routing.index_add_(0, slot, p)
        self.margin.index_add_(0, slot, margin)
        self.tokens.index_add_(0, slot, torch.ones_like(slot, dtype=kind))
        hidden = routing.hidden[keep].to(kind)
        counted = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
        experts = self.likeliest.shape[1]
        self.likeliest.flatten(0, 1).index_add_(0, slot * experts + likeliest, counted)
        for column in indices.unbind(dim=1):
            self.active.flatten(0, 1).index_add_(0, slot * experts + column, counted)

    def of(self, slot: int) -> LayerStatistics:
        tokens = self.tokens[slot].clamp(min=1)
        likeliest, active = self.likeliest[slot, :-1], self.active[slot, :-1]
        sums = torch.where(likeliest[:, -1:] > 0, likeliest, active)
        region = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        return LayerStatistics((self.routing[slot] / tokens).cpu(), (self.margin[slot] / tokens).cpu(), region.cpu())


def measure_routing(cohort: Cohort, tokens: int | None) -> RoutingProfile:
    """Returns the statistics of every client's routing, from a forward pass over its training examples.

    Args:
        cohort: The clients, after their training.
        tokens: Most tokens to look at of each client, whole examples, the same in every round; None for all.
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


@dataclass(frozen=True)
class LayerTarget:
    """What one layer's gates are pulled towards.

    Attributes:
        reference: [M] p_g, summing to one.
        weights: [S, M] alpha, each client's strength for each expert.
    """

    reference: Tensor
    weights: Tensor


def adaptive_weights(overlap: Tensor, threshold: float, temperature: float = 1.0) -> Tensor:
    """Returns alpha = sigmoid((o - eta) / temperature), of the shape of `overlap` (Eq. 9 at temperature 1)."""
    return torch.sigmoid((overlap - threshold) / temperature)


class Regulariser:
    """L_reg of every client of a cohort (Eq. 10), collected while the model runs.

    The observer only takes note of the logits; the loss is computed outside the layers, so that
    it stays out of what gradient checkpointing runs again.

    Args:
        targets: Layer index -> what its gates are pulled towards; the other layers have no part in L_reg.
        slots: S, the clients of the cohort.
        top_k: k of Top-k(p(x)) and Top-k(p_g), the model's active experts.
        divergence: `pointwise`, p log(p / p_g), or `bernoulli`, the same plus (1-p) log((1-p) / (1-p_g)).
    """

    def __init__(self, targets: Mapping[int, LayerTarget], slots: int, top_k: int, divergence: Divergence) -> None:
        self.targets = targets
        self.slots = slots
        self.top_k = top_k
        self.divergence = divergence
        self._seen: list[tuple[LayerTarget, Tensor, Tensor, Tensor | None]] = []

    def observe(self, routing: Routing) -> None:
        """Takes note of one layer's logits, without holding on to its input."""
        if routing.layer in self.targets:
            self._seen.append((self.targets[routing.layer], routing.logits, routing.slot, routing.keep))

    def loss(self) -> Tensor | float:
        """Returns [S], the mean over layers and each client's tokens, of the pass just seen; 0.0 without targets."""
        seen, self._seen = self._seen, []
        if not seen:
            return 0.0
        return torch.stack([self._layer_loss(*layer) for layer in seen]).mean(dim=0)

    def _layer_loss(self, target: LayerTarget, logits: Tensor, slot: Tensor, keep: Tensor | None) -> Tensor:
        """Returns [S]; 0 for a client without tokens."""
        p = probabilities(logits)
        reference = target.reference.to(p)
        divergence = kl_terms(p, reference, self.divergence)
        counts = top_k_mask(p, self.top_k) | top_k_mask(reference, self.top_k)
        per_token = (target.weights.to(p)[slot] * divergence * counts).sum(dim=-1)
        return token_means(per_token, slot, keep, self.slots)


def kl_terms(p: Tensor, reference: Tensor, divergence: Divergence) -> Tensor:
    """Returns each expert's part [N, M] of the divergence of p from p_g.

    `pointwise` is the expert's term of the sum KL(p || p_g); under a mask or weights it can be
    negative. `bernoulli` is the divergence of "goes to e or not", which cannot.
    """
    terms = p * _log_ratio(p, reference)
    if divergence == "bernoulli":
        terms = terms + (1 - p) * _log_ratio(1 - p, 1 - reference)
    return terms


def top_k_mask(values: Tensor, top_k: int) -> Tensor:
    """Returns a bool mask of the shape [.., M] of `values`, True at the `top_k` largest of each row."""
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, values.topk(top_k, dim=-1).indices, True)


def _log_ratio(p: Tensor, reference: Tensor) -> Tensor:
    return p.clamp(min=SMALLEST).log() - reference.clamp(min=SMALLEST).log()
