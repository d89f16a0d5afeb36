"""One view of the mixture-of-experts layers of every family.

Transformers' own extension points are used: the experts run through an implementation
registered in `ALL_EXPERTS_FUNCTIONS`, the router's result is rewritten by a forward hook. No
class of the library is patched. SwitchTransformers, which keeps its experts one by one, gets
stacked ones first (switch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fedguild.errors import ModelError
from fedguild.model.info import MoeInfo
from fedguild.model.moe.dense import prefers_dense, run_every_expert
from fedguild.model.moe.dispatch import dispatch
from fedguild.model.moe.experts import Factors, FrozenExperts, run_experts
from fedguild.model.moe.low_rank import prefers_blocks
from fedguild.model.moe.routing import RoutingRule, route, routing_rule, within_capacity
from fedguild.model.moe.switch import FAMILY as SWITCH
from fedguild.model.moe.switch import PROJECTIONS as SWITCH_PROJECTIONS
from fedguild.model.moe.switch import SwitchExperts, top1_hook
from fedguild.model.moe.token_side import prefers_token_side, run_token_side
from fedguild.model.runtime import Runtime

IMPLEMENTATION = "fedguild_slots"
FAMILIES = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", SWITCH)


@dataclass(frozen=True)
class Routing:
    """One layer's routing in one pass, gradients attached.

    Attributes:
        layer: Index among the model's MoE layers.
        hidden: [N, H] the layer's input.
        logits: [N, M] the router's logits, adapters included.
        weights: [N, k] the active experts' weights, before the output scale.
        indices: [N, k] the active experts; M where nothing is active.
        slot: [N] slot of each token.
        keep: [N] bool, False for padding; None where every token is real.
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
            most_active: The most active experts that any token has.
            active: [N] active experts of each token; None where all have `most_active`.
        """
        ...


@dataclass
class MoeLayer:
    """One mixture-of-experts layer and what is attached to it at run time.

    Attributes:
        index: Position among the model's MoE layers.
        info: Its names and sizes.
        router: The router module; `experts` the fused experts module.
        rule: The family's routing.
        runtime: The backbone's runtime.
        capacity: Most tokens of a row that an expert takes, or None without a limit.
        expert_lora: The factors of gate, up and down, stored as `run_experts` takes them, or None.
        expert_scale: [S, r] LoRA's scale of each slot's ranks, or None.
        expert_delta: [M, S, out, in] of every projection, what each slot adds to the frozen weights, or None.
        output_scale: [S] factor on the routed output, or None.
        logit_terms: Functions of the layer's input [N, H] whose results [N, M] are added to the logits.
        chooser: Chooses the experts in place of the family's rule, or None.
        observers: Called with every routing of a pass that counts.
    """

    index: int
    info: MoeInfo
    router: nn.Module
    experts: nn.Module
    rule: RoutingRule
    runtime: Runtime
    capacity: int | None = None
    expert_lora: tuple[Factors, ...] | None = None
    expert_scale: Tensor | None = None
    expert_delta: tuple[Tensor, ...] | None = None
    output_scale: Tensor | None = None
    logit_terms: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    chooser: Chooser | None = None
    observers: list[Callable[[Routing], None]] = field(default_factory=list)

    def detach(self) -> None:
        """Takes away everything that was attached."""
        self.expert_lora = self.expert_scale = self.output_scale = self.chooser = None
        self.expert_delta = None
        self.logit_terms.clear()
        self.observers.clear()

    def routed(self, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the router's (logits, weights [N, k], indices [N, k]) for the pass that runs."""
        current = self.runtime.current
        assert current is not None
        slot = current.slot_of_token(logits.shape[0], logits.device)
        for term in self.logit_terms:
            logits = logits + term(hidden).to(logits.dtype)
        active = None if current.active_experts is None else current.active_experts[slot]
        most = current.most_active or self.info.top_k
        if self.chooser is not None:
            weights, indices = self.chooser(logits, slot, most, active)
        else:
            bias = getattr(self.router, "e_score_correction_bias", None)
            weights, indices = route(logits, self.rule, most, active, bias)
        if self.capacity is not None:
            weights, indices = within_capacity(
                weights, indices, self.capacity, self.info.num_experts, sum(current.rows_per_slot)
            )
        self.runtime.count(self.index, indices)
        if self.observers and self.runtime.counting:
            routing = Routing(self.index, hidden, logits, weights, indices, slot, current.keep(logits.shape[0]))
            for observer in self.observers:
                observer(routing)
        if self.output_scale is not None:
            weights = weights * self.output_scale[slot][:, None]
        return logits, weights, indices

    def run(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Returns the experts' output [N, H] of hidden [N, H], routed by indices and weights [N, k]."""
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
            return run_every_expert(hidden, weights, indices, keep, experts, self._frozen, lora, self.expert_scale)
        blocks = lora is not None and delta is None and prefers_blocks(hidden)
        plan = dispatch(indices, slot, keep, self.info.num_experts, slots, blocks)
        scale = self.expert_scale
        if current is not None and plain and lora and scale is not None and prefers_token_side(hidden, plan):
            return run_token_side(hidden, weights, plan, current.rows_per_slot, self._frozen, lora, scale)
        return run_experts(hidden, weights, plan, self._frozen, lora, scale, delta)

    def _prefers_dense(self, hidden: Tensor, top_k: int, slots: int) -> bool:
        return prefers_dense(hidden, top_k, self.info.num_experts, self.info.hidden * self.info.width, slots)

    def _frozen(self) -> FrozenExperts:
        experts: Any = self.experts
        if isinstance(experts, SwitchExperts):
            return FrozenExperts(experts.up_proj, experts.down_proj, experts.activation)
        return FrozenExperts(experts.gate_up_proj, experts.down_proj, experts._apply_gate)


def find_moe_layers(model: nn.Module, family: str, runtime: Runtime) -> list[MoeLayer]:
    """Returns the model's MoE layers, in module order; empty for a dense model.

    Raises:
        ModelError: the model has experts of a family that the view does not know.
    """
    found: list[MoeLayer] = []
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        if not isinstance(experts, nn.Module):
            continue
        if isinstance(experts, SwitchExperts):
            router, info = block.router, _describe_switch(name, experts)
        else:
            router = getattr(block, "gate", None)
            if family not in FAMILIES or router is None or not hasattr(experts, "gate_up_proj"):
                raise ModelError(
                    f"The experts of '{family}' models ({type(experts).__name__}) are not supported.",
                    f"Supported mixture-of-experts families: {', '.join(FAMILIES)}.",
                )
            info = _describe(name, router, experts)
        rule, capacity = routing_rule(family, router), getattr(router, "expert_capacity", None)
        found.append(MoeLayer(len(found), info, router, experts, rule, runtime, capacity))
    return found


def _describe(name: str, router: Any, experts: Any) -> MoeInfo:
    return MoeInfo(
        name=name,
        router=f"{name}.gate",
        experts=f"{name}.experts",
        num_experts=experts.gate_up_proj.shape[0],
        top_k=int(router.top_k),
        hidden=experts.gate_up_proj.shape[2],
        width=experts.down_proj.shape[2],
    )


def _describe_switch(name: str, experts: SwitchExperts) -> MoeInfo:
    num_experts, width, hidden = experts.up_proj.shape
    router = f"{name}.router.classifier"
    return MoeInfo(name, router, f"{name}.experts", num_experts, 1, hidden, width, SWITCH_PROJECTIONS)


def attach(model: Any, layers: list[MoeLayer]) -> None:
    """Routes the model's MoE layers through the view."""
    if not layers:
        return
    if not isinstance(layers[0].experts, SwitchExperts):
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
        model.set_experts_implementation(IMPLEMENTATION)
    for layer in layers:
        if isinstance(layer.experts, SwitchExperts):
            layer.experts.run = layer.run
            layer.router.register_forward_hook(top1_hook(layer.routed, layer.runtime))
        else:
            object.__setattr__(layer.experts, "fedguild_layer", layer)
            layer.router.register_forward_hook(_router_hook(layer))


def _router_hook(layer: MoeLayer) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if layer.runtime.current is None:
            return output
        logits, native, _ = output
        logits, weights, indices = layer.routed(args[0].reshape(-1, args[0].shape[-1]), logits)
        return logits, weights.to(native.dtype), indices

    return hook


def _experts_forward(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The registered implementation: hidden [N, H], routing [N, k] -> [N, H]."""
    layer: MoeLayer = module.fedguild_layer
    return layer.run(hidden, top_k_index, top_k_weights)
