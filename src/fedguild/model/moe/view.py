"""A common view of the mixture-of-experts layers of all families; `family.py` attaches it to a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fedguild.model.info import MoeInfo
from fedguild.model.moe.casts import Casts
from fedguild.model.moe.dense import prefers_dense, run_every_expert, shares
from fedguild.model.moe.dispatch import all_active, dispatch
from fedguild.model.moe.experts import Factors, FrozenExperts, run_experts
from fedguild.model.moe.low_rank import prefers_blocks
from fedguild.model.moe.routing import RoutingRule, route, within_capacity
from fedguild.model.moe.token_side import prefers_token_side, run_token_side
from fedguild.model.runtime import Pass, Runtime


@dataclass(frozen=True)
class Routing:
    """One layer's routing in one pass, with gradients.

    Attributes:
        layer: Index among the model's MoE layers.
        hidden: [N, H] the layer's input.
        logits: [N, M] the router's logits, adapters included.
        weights: [N, k] the active experts' weights, before the output scale.
        indices: [N, k] the active experts; M for places without one.
        slot: [N] slot of each token.
        keep: [N] bool, False for padding; None if every token is real.
    """

    layer: int
    hidden: Tensor
    logits: Tensor
    weights: Tensor
    indices: Tensor
    slot: Tensor
    keep: Tensor | None


class Chooser(Protocol):
    """Chooses a layer's active experts."""

    def __call__(self, logits: Tensor, slot: Tensor, most_active: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns weights [N, most_active] in fp32 and indices, M beyond a token's active experts.

        Args:
            logits: [N, M], adapters included.
            slot: [N] slot of each token.
            most_active: The largest number of active experts of any token.
            active: [N] active experts of each token; None where all have `most_active`.
        """
        ...


@dataclass
class MoeLayer:
    """One mixture-of-experts layer and everything attached to it at run time.

    Attributes:
        index: Position among the model's MoE layers.
        router: The router module; `experts` the fused experts module.
        frozen: Returns the experts' frozen weights.
        capacity: Largest number of tokens of a row that an expert takes, or None without a limit.
        selection_bias: Returns what is added to the scores for the choice alone, [M], or None.
        output_bias: Returns what each expert adds to its output, [M, H], or None.
        expert_lora: The factors of gate, up and down, stored as `run_experts` takes them, or None.
        expert_scale: [S, r] LoRA's scale of each slot's ranks, or None.
        expert_delta: [M, S, out, in] of every projection, each slot's change of the frozen weights, or None.
        output_scale: [S] factor on the routed output, or None.
        logit_terms: Functions of the layer's input [N, H] whose results [N, M] are added to the logits.
        chooser: Chooses the experts in place of the family's rule, or None.
        observers: Called with the routing of every pass, but not of recomputations.
        casts: The trained tensors in the dtype of the products.
    """

    index: int
    info: MoeInfo
    router: nn.Module
    experts: nn.Module
    frozen: Callable[[], FrozenExperts]
    rule: RoutingRule
    runtime: Runtime
    capacity: int | None = None
    selection_bias: Callable[[], Tensor | None] = lambda: None
    output_bias: Callable[[], Tensor | None] = lambda: None
    expert_lora: tuple[Factors, ...] | None = None
    expert_scale: Tensor | None = None
    expert_delta: tuple[Tensor, ...] | None = None
    output_scale: Tensor | None = None
    logit_terms: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    chooser: Chooser | None = None
    observers: list[Callable[[Routing], None]] = field(default_factory=list)
    casts: Casts = field(default_factory=Casts)

    def detach(self) -> None:
        self.expert_lora = self.expert_scale = self.output_scale = self.chooser = None
        self.expert_delta = None
        self.logit_terms.clear()
        self.observers.clear()
        self.casts.clear()

    def routed(self, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the router's (logits, weights [N, k], indices [N, k]) for the current pass."""
        current = self.runtime.current
        assert current is not None
        slot = current.slot_of_token(logits.shape[0], logits.device)
        for term in self.logit_terms:
            logits = logits + term(hidden).to(logits.dtype)
        weights, indices = self._chosen(logits, slot, current)
        self.runtime.count(self.index, indices)
        if self.observers and self.runtime.counting:
            routing = Routing(self.index, hidden, logits, weights, indices, slot, current.keep(logits.shape[0]))
            for observer in self.observers:
                observer(routing)
        if self.output_scale is not None and not self.info.weighs_input:
            weights = weights * self.output_scale[slot][:, None]
        return logits, weights, indices

    def _chosen(self, logits: Tensor, slot: Tensor, current: Pass) -> tuple[Tensor, Tensor]:
        active = None if current.active_experts is None else current.active_experts[slot]
        most = current.most_active or self.info.top_k
        if self.chooser is not None:
            weights, indices = self.chooser(logits, slot, most, active)
        else:
            weights, indices = route(logits, self.rule, most, active, self.selection_bias())
        if self.capacity is None:
            return weights, indices
        return within_capacity(weights, indices, self.capacity, self.info.num_experts, sum(current.rows_per_slot))

    def outputs_of(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Returns the experts' output of this pass, and their output with the model's own number of active experts.

        Returns:
            [N, H] with each slot's own active experts and its output scale, and [N, H] with the model's own number of
                active experts and no scale, for the same input.
        """
        current = self.runtime.current
        assert current is not None
        weights = routing.weights
        if self.output_scale is not None and not self.info.weighs_input:
            weights = weights * self.output_scale[routing.slot][:, None]
        own = self.run(routing.hidden, routing.indices, weights)
        top_k = self.info.top_k
        experts_per_slot = (top_k,) * len(current.rows_per_slot)
        self.runtime.current = replace(
            current, active_experts=None, most_active=top_k, experts_per_slot=experts_per_slot
        )
        try:
            weights, indices = self._chosen(routing.logits, routing.slot, self.runtime.current)
            return own, self.run(routing.hidden, indices, weights, scaled=False)
        finally:
            self.runtime.current = current

    def run(self, hidden: Tensor, indices: Tensor, weights: Tensor, *, scaled: bool = True) -> Tensor:
        """Returns the experts' output [N, H] of hidden [N, H], routed by indices and weights [N, k].

        Args:
            weights: With the output scale, unless they weigh the input.
            scaled: Whether the output scale applies where the weights are without it.
        """
        if self.info.weighs_input:
            hidden, weights = hidden * weights.to(hidden.dtype), torch.ones_like(weights)
            if scaled and self.output_scale is not None and self.runtime.current is not None:
                slot = self.runtime.current.slot_of_token(len(hidden), hidden.device)
                weights = weights * self.output_scale[slot][:, None]
        output, bias = self._without_output_bias(hidden, indices, weights), self.output_bias()
        if bias is None:
            return output
        keep = None if self.runtime.current is None else self.runtime.current.keep(len(hidden))
        return output + shares(weights, indices, keep, len(bias)).to(bias.dtype) @ bias

    def _without_output_bias(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        current = self.runtime.current
        tokens = hidden.shape[0]
        if current is None:
            slots, keep = 1, None
            slot = torch.zeros(tokens, dtype=torch.int64, device=hidden.device)
        else:
            slots, keep = len(current.rows_per_slot), current.keep(tokens)
            slot = current.slot_of_token(tokens, hidden.device)
        lora = self.expert_lora if current is not None else None
        delta = self.expert_delta if current is not None else None
        plain = delta is None and (lora is None or len(lora[0]) == 2)
        if plain and self._prefers_dense(hidden, indices.shape[1], slots):
            experts = self.info.num_experts
            return run_every_expert(hidden, weights, indices, keep, experts, self.frozen, lora, self.expert_scale)
        blocks = lora is not None and delta is None and prefers_blocks(hidden)
        pairs = None if current is None or self.capacity is not None else current.active_pairs(tokens)
        if pairs is None and waits_for_values(hidden.device):
            weights, indices = all_active(weights, indices, keep, self.info.num_experts)
            keep, pairs = None, indices.numel()
        plan = dispatch(indices, slot, keep, self.info.num_experts, slots, blocks, pairs)
        scale = self.expert_scale
        if current is not None and plain and lora and scale is not None and prefers_token_side(hidden, plan):
            return run_token_side(hidden, weights, plan, current.rows_per_slot, self.frozen, lora, scale)
        return run_experts(hidden, weights, plan, self.frozen, lora, scale, delta, self.casts)

    def _prefers_dense(self, hidden: Tensor, top_k: int, slots: int) -> bool:
        return prefers_dense(hidden, top_k, self.info.num_experts, self.info.hidden * self.info.width, slots)


def waits_for_values(device: torch.device) -> bool:
    """Whether the host must wait for everything queued on a device to read a value from it."""
    return device.type != "cpu"
