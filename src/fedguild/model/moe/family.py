"""Model families: location and routing of an architecture's mixture-of-experts layers, and attachment of the view.

`Family` fits the architectures whose experts transformers fuses into stacked parameters. It uses the extension points
of transformers: the experts run through an implementation registered in `ALL_EXPERTS_FUNCTIONS`, and a forward hook
replaces the router's result. No class of the library is patched. `native.py` checks a family against the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor, nn

from fedguild.core.errors import ModelError, in_one_line
from fedguild.model.info import EXPERT_PROJECTIONS, MoeInfo
from fedguild.model.moe.experts import FrozenExperts
from fedguild.model.moe.layout import canonicalise, layout_of, stacked
from fedguild.model.moe.routing import RoutingRule
from fedguild.model.moe.view import MoeLayer
from fedguild.model.runtime import Runtime

IMPLEMENTATION = "fedguild_slots"


class Family:
    """An architecture, identified by its `model_type` in transformers: data, and methods to override if it needs code.

    The defaults fit a block of M experts with

    - `experts`, a module decorated with transformers' `use_experts_implementation`. Its `gate_up_proj` [M, 2 F, H], or
      `up_proj` [M, F, H] if it has no gate, and its `down_proj` [M, H, F] may be transposed or interleaved
      (`layout.py`) and have biases;
    - a router that returns logits [N, M], weights [N, k] and indices [N, k]. It has `top_k`.

    Attributes:
        router: Name of the router in a block.
        projection: Path of the linear layer in the router whose `weight` is [M, H]; empty if the router has it itself.
        bias: Path in a block of the bias [M] that is added to the scores for the choice alone; if empty, the router's
            `e_score_correction_bias`, if it has one.
        routing: The fields of the rule, as in `RoutingRule.of`.
        unless: A key of the config; a model that sets it is as one of a family without a description.
        since: The first release of transformers that has the architecture as described; empty for any.
        active: The config's key of the active experts per token; empty if the architecture has a fixed number.
        weighs_input: Whether a routing weight scales an expert's input and not its output.
        linear: Whether routers and experts are linear layers in transformers' own model, so that PEFT adapts them as
            modules and not as parameters.

    Args:
        described: Attributes that differ from the class's.
    """

    router: str = "gate"
    projection: str = ""
    bias: str = ""
    routing: Mapping[str, Any] = MappingProxyType({"renormalise": "norm_topk_prob"})
    unless: str = ""
    since: str = ""
    active: str = "num_experts_per_tok"
    weighs_input: bool = False
    linear: bool = False

    def __init__(self, **described: Any) -> None:
        for name, value in described.items():
            if name not in Family.__annotations__:
                raise TypeError(f"a model family has no '{name}', only {', '.join(Family.__annotations__)}")
            setattr(self, name, value)

    def fits(self, config: Any) -> bool:
        """Whether the description covers a model; if not, its routers and experts stay frozen."""
        return not (self.unless and getattr(config, self.unless, None))

    def require_release(self, name: str) -> None:
        """Raises ModelError if the installed transformers is older than `since`."""
        if self.since and Version(transformers.__version__).release < Version(self.since).release:
            raise ModelError(
                f"Models of the family '{name}' need transformers {self.since} or newer; "
                f"{transformers.__version__} is installed.",
                f"Install it: pip install 'transformers>={self.since}'.",
            )

    def prepare(self, model: nn.Module) -> None:
        """Changes a loaded model, or one of meta tensors, before its experts are located.

        By default, experts that are stored in another layout get the view's. An architecture that stores its experts
        as separate modules stacks them here.

        Raises:
            ModelError: the model cannot be changed.
        """
        for _, block in moe_blocks(model):
            canonicalise(block.experts)

    def info(self, name: str, block: Any) -> MoeInfo:
        """Returns names and sizes of a block.

        Args:
            block: A module with the attribute `experts`.
        """
        experts = block.experts
        num_experts, hidden, width = experts.down_proj.shape
        return MoeInfo(
            name=name,
            router=".".join(filter(None, (name, self.router, self.projection))),
            experts=f"{name}.experts",
            num_experts=num_experts,
            top_k=int(getattr(block, self.router).top_k),
            hidden=hidden,
            width=width,
            projections=EXPERT_PROJECTIONS if getattr(experts, "has_gate", True) else EXPERT_PROJECTIONS[1:],
            layout=layout_of(experts),
            biased=bool(getattr(experts, "has_bias", False)),
            weighs_input=self.weighs_input,
        )

    def rule(self, router: Any) -> RoutingRule:
        """Returns the rule from logits to active experts and weights."""
        return RoutingRule.of(router, **self.routing)

    def selection_bias(self, block: Any) -> Tensor | None:
        """Returns the bias [M] of the choice. Called in every pass, because sharding moves it."""
        if not self.bias:
            found: Tensor | None = getattr(getattr(block, self.router), "e_score_correction_bias", None)
            return found
        for name in self.bias.split("."):
            block = getattr(block, name, None)
        return None if block is None else block.reshape(-1)

    def capacity(self, router: Any) -> int | None:
        return None

    def frozen(self, experts: Any) -> FrozenExperts:
        """Returns the experts' weights. Called in every pass, so that 4-bit weights are unpacked for one layer only."""
        has_gate = getattr(experts, "has_gate", True)
        name, gate = ("gate_up_proj", experts._apply_gate) if has_gate else ("up_proj", experts.act_fn)
        bias = getattr(experts, f"{name}_bias") if getattr(experts, "has_bias", False) else None
        if bias is not None and layout_of(experts).interleaved:
            bias = stacked(bias, 1)
        return FrozenExperts(getattr(experts, name), experts.down_proj, gate, bias)

    def output_bias(self, experts: Any) -> Tensor | None:
        """Returns what each expert adds to its output, [M, H]; called in every pass."""
        bias: Tensor | None = experts.down_proj_bias if getattr(experts, "has_bias", False) else None
        return bias

    def decoded(self, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits [N, M], weights [N, k] and indices [N, k] of a router's output."""
        logits, weights, indices, *_ = output
        return logits, weights, indices

    def encoded(self, output: Any, logits: Tensor, weights: Tensor, indices: Tensor) -> Any:
        """Returns the router's output with other logits, weights and indices (M where nothing is active)."""
        return logits, weights.to(output[1].dtype), indices, *output[3:]

    def attach(self, model: Any, layers: Sequence[MoeLayer]) -> None:
        """Routes the experts' output of a model's layers through `layer.run`.

        Args:
            layers: All of its mixture-of-experts layers, at least one.
        """
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # it brings all of the modelling code

        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
        model.set_experts_implementation(IMPLEMENTATION)
        for layer in layers:
            object.__setattr__(layer.experts, "fedguild_layer", layer)

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


def moe_layers(model: Any, family: Family, runtime: Runtime) -> list[MoeLayer]:
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
            raise unlike(model, name, block, error) from error
        experts, bias = block.experts, partial(family.selection_bias, block)
        kind = "biased" if rule.kind == "softmax" and bias() is not None else rule.kind
        info, frozen, added = replace(info, routing=kind), partial(family.frozen, experts), family.output_bias
        layers.append(
            MoeLayer(len(layers), info, router, experts, frozen, rule, runtime, capacity, bias, partial(added, experts))
        )
    return layers


def unlike(model: Any, path: str, block: Any, error: Exception) -> ModelError:
    """Returns the error for a block that is not built as its model's family says."""
    return ModelError(
        f"{path} ({type(block).__name__}) is not built as the layers of '{model.config.model_type}' models are: "
        f"{in_one_line(error)}.",
        "This release of transformers may be too new or too old, or the family is another one.",
    )


def attach(model: Any, family: Family, layers: Sequence[MoeLayer]) -> None:
    """Routes a model's layers through the view.

    While `layer.runtime.current` is set, the router's result comes from `layer.routed`. The experts' output comes
    from `layer.run` in any case.

    Args:
        layers: All of its mixture-of-experts layers, at least one.
    """
    family.attach(model, layers)
    for layer in layers:
        layer.router.register_forward_hook(_router_hook(family, layer))


def _router_hook(family: Family, layer: MoeLayer) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
        if layer.runtime.current is None:
            return output
        logits, _, _ = family.decoded(output)
        return family.encoded(output, *layer.routed(args[0].reshape(-1, args[0].shape[-1]), logits))

    return hook


def _experts_forward(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The registered implementation: hidden [N, H], routing [N, k] -> [N, H]."""
    layer: MoeLayer = module.fedguild_layer
    return layer.run(hidden, top_k_index, top_k_weights)
