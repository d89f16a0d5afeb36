"""Counts of activated experts per layer and slot, padding excluded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RoutingStatistics:
    """Activation counts of each expert.

    Attributes:
        counts: [L, S, M] tokens of slot s that activated expert m in MoE layer l.
        layer_tokens: [L, S] tokens that each layer processed; they differ between encoder and decoder layers.
        step_hits: [L, S, M] optimizer steps in which expert m was activated at least once.
        steps: [S] optimizer steps in which the slot had tokens.
    """

    counts: Tensor
    layer_tokens: Tensor
    step_hits: Tensor
    steps: Tensor

    @classmethod
    def empty(cls, layers: int, slots: int, experts: int, device: torch.device) -> RoutingStatistics:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        return cls(zeros(layers, slots, experts), zeros(layers, slots), zeros(layers, slots, experts), zeros(slots))

    @property
    def tokens(self) -> Tensor:
        """[S], the tokens that the first layer processed; 0 in a model without MoE layers."""
        return self.layer_tokens[:1].sum(dim=0)

    def frequency(self, unit: str = "token") -> Tensor:
        """Returns [L, S, M] activation frequencies in [0, 1] in fp64, on the CPU; 0 for a slot without tokens.

        Args:
            unit: `token`, the fraction of tokens that activated the expert, or `step`, the
                fraction of optimizer steps in which any token did.
        """
        hits, total = (self.counts, self.layer_tokens) if unit == "token" else (self.step_hits, self.steps[None])
        return hits.cpu().double() / total.cpu().clamp(min=1)[..., None].double()  # Apple's GPUs have no fp64

    def add(self, other: RoutingStatistics) -> None:
        self.counts += other.counts
        self.layer_tokens += other.layer_tokens
        self.step_hits += other.step_hits
        self.steps += other.steps

    def close_step(self, before: Tensor, tokens_before: Tensor) -> None:
        """Counts one optimizer step, given the counts and tokens from before it."""
        self.step_hits += (self.counts > before).to(self.step_hits.dtype)
        self.steps += (self.tokens > tokens_before).to(self.steps.dtype)
