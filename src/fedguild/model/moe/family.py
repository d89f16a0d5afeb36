"""Model families: location and routing of an architecture's mixture-of-experts layers, and attachment of the view.

`Family` fits the architectures whose experts transformers fuses into stacked parameters. It uses the extension points
of transformers: the experts run through an implementation registered in `ALL_EXPERTS_FUNCTIONS`, and a forward hook
replaces the router's result. No class of the library is patched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from fedguild.core.errors import ModelError
from fedguild.model.info import MoeInfo
from fedguild.model.moe.experts import FrozenExperts
from fedguild.model.moe.routing import RoutingRule
from fedguild.model.moe.view import MoeLayer
from fedguild.model.runtime import Runtime

IMPLEMENTATION = "fedguild_slots"


class Family:
    """An architecture, identified by its `model_type` in transformers.

    The defaults fit a block of M experts with

    - `experts`, a module decorated with transformers' `use_experts_implementation`, with the parameters `gate_up_proj`
      [M, 2 F, H] and `down_proj` [M, H, F];
    - `gate`, a module that returns logits [N, M], weights [N, k] and indices [N, k]. It has `top_k` and, if the active
      experts' weights can be made to sum to one, `norm_topk_prob`. Its parameter is `weight` [M, H]; a buffer
      `e_score_correction_bias` [M] is added to the scores for the choice alone.

    Subclasses override whatever differs.

    Attributes:
        router: Name of the router in a block.
        linear: Whether routers and experts are linear layers in transformers' own model, so that PEFT adapts them as
            modules and not as parameters.
    """

    router = "gate"
    linear = False

    def prepare(self, model: nn.Module) -> None:
        """Changes a loaded model, or one of meta tensors, before its experts are located; does nothing by default.

        An architecture that stores its experts as separate modules stacks them here.

        Raises:
            ModelError: the model cannot be changed.
        """

    def info(self, name: str, block: Any) -> MoeInfo:
        """Returns names and sizes of a block.

        Args:
            block: A module with the attribute `experts`.
        """
        experts = block.experts
        return MoeInfo(
            name=name,
            router=f"{name}.{self.router}",
            experts=f"{name}.experts",
            num_experts=experts.gate_up_proj.shape[0],
            top_k=int(getattr(block, self.router).top_k),
            hidden=experts.gate_up_proj.shape[2],
            width=experts.down_proj.shape[2],
        )

    def rule(self, router: Any) -> RoutingRule:
        """Returns the rule from logits to active experts and weights; by default softmax over all and the best k."""
        return RoutingRule(renormalise=bool(getattr(router, "norm_topk_prob", False)))

    def capacity(self, router: Any) -> int | None:
        return None

    def frozen(self, experts: Any) -> FrozenExperts:
        """Returns the experts' weights. Called in every pass, so that 4-bit weights are unpacked for one layer only."""
        return FrozenExperts(experts.gate_up_proj, experts.down_proj, experts._apply_gate)

    def attach(self, model: Any, layers: Sequence[MoeLayer]) -> None:
        """Routes a model's layers through the view.

        While `layer.runtime.current` is set, the router's result comes from `layer.routed`. The experts' output comes
        from `layer.run` in any case.

        Args:
            layers: All of its mixture-of-experts layers, at least one.
        """
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # it brings all of the modelling code

        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
        model.set_experts_implementation(IMPLEMENTATION)
        for layer in layers:
            object.__setattr__(layer.experts, "fedguild_layer", layer)
            layer.router.register_forward_hook(_router_hook(layer))

    def published(self, weight: str, experts: int) -> list[str]:
        """Returns the linear layers of transformers' own model that `prepare` stacked into a weight, one per expert.

        Args:
            weight: Name of a parameter of the experts module.
            experts: M.

        Returns:
            M module paths; none, the default, for a weight that was not stacked.
        """
        return []


def moe_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields path and module of every block with experts, in module order."""
    for name, block in model.named_modules():
        if isinstance(getattr(block, "experts", None), nn.Module):
            yield name, block


def moe_layers(model: nn.Module, family: Family, runtime: Runtime) -> list[MoeLayer]:
    """Returns the mixture-of-experts layers of a prepared model, in module order.

    Raises:
        ModelError: a block is not built as the family expects.
    """
    layers: list[MoeLayer] = []
    for name, block in moe_blocks(model):
        try:
            info, router = family.info(name, block), getattr(block, family.router)
            rule, capacity = family.rule(router), family.capacity(router)
        except AttributeError as error:
            raise ModelError(
                f"{name} ({type(block).__name__}) is not built as its family's layers are: {error}.",
                "This release of transformers may be too new or too old.",
            ) from error
        frozen = partial(family.frozen, block.experts)
        info = replace(info, routing=rule.kind)
        layers.append(MoeLayer(len(layers), info, router, block.experts, frozen, rule, runtime, capacity))
    return layers


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
