"""Parameters and FLOPs of a client's training and inference, from the shapes of model and adapters alone.

No weights are loaded. A multiplication with its addition counts as two FLOPs. Norms, softmaxes and activation functions
are left out, as is usual.

The adapter consists of the tensors of `adapter_shapes`; those of `trainable_shapes` are trained. A tensor [M, ..] of a
layer's experts is used by a token in its active experts only. Every other value is multiplied with every token once.
That holds for matrices: LoRA's factors, and the changes D of experts and routers trained in full, whose product D x is
computed in addition to the frozen W x. A part's scalars and vectors are counted as if they were matrices, which adds
little. Experts of a family without a description count as far as its config says how many of them a token uses, else
all of them.

A soft prompt's positions count as tokens in front of every sequence. Its own values, and the encoder that computes them
once a pass, are multiplied with no token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedguild.core.errors import ConfigError
from fedguild.model.info import ModelInfo, MoeInfo
from fedguild.model.plan import AdapterPlan, adapter_shapes, trainable_shapes


@dataclass(frozen=True, slots=True)
class Cost:
    """Parameters of one client's model, and its FLOPs.

    Attributes:
        parameters: P, all parameters of the backbone.
        active_parameters: P_a, those that a token uses, with the k_i experts of the plan.
        trainable: All trainable parameters.
        active_trainable: Trainable parameters that a token uses.
        product_parameters: Backbone parameters that a token is multiplied with: the active ones without those that are
            looked up (the input embedding) or added.
        attention_width: Σ over layers of heads times head width.
        frozen: Parameters of the adapter that are not trained, such as a shared A of LoRA.
        active_frozen: Of those, what a token uses.
        prefix_tokens: Positions that a soft prompt puts in front of every sequence.
        prefix_trainable: Of the active trainable parameters, those of the soft prompt and its encoder.
    """

    parameters: int
    active_parameters: int
    trainable: int
    active_trainable: int
    product_parameters: int
    attention_width: int
    frozen: int = 0
    active_frozen: int = 0
    prefix_tokens: int = 0
    prefix_trainable: int = 0

    def table_flops(self, tokens: int, *, adapters: bool = True) -> int:
        """Returns the forward FLOPs as FLAME's tables count them: two per active parameter and token.

        Table 2 (tokens=128, without adapters) leaves LoRA out, Table 1 counts it. The input embedding, which is looked
        up, counts as if it were multiplied.
        """
        return 2 * tokens * (self.active_parameters + (self.active_trainable + self.active_frozen if adapters else 0))

    def forward_flops(self, tokens: int, context_tokens: int) -> int:
        """Returns the FLOPs of a forward pass.

        Args:
            tokens: Tokens in the pass, over all its sequences, without a soft prompt's; so is the length.
            context_tokens: Length of one sequence. Scores and values of the whole square are counted, masked or not
                (PaLM, appendix B).
        """
        per_token = 2 * (self.product_parameters + self._multiplied_trainable + self.active_frozen)
        return self._with_prefix(tokens, context_tokens) * (per_token + self._attention_flops(context_tokens))

    def training_flops(self, tokens: int, context_tokens: int, *, checkpointing: bool = False) -> int:
        """Returns the FLOPs of a training step: forward and backward, without the optimizer.

        A frozen product, of the backbone or of an adapter's frozen factor, costs one forward and one input gradient;
        its weight gradient is never formed. A trained product costs its forward three times (itself, the input
        gradient, the weight gradient), as does attention. So an expert trained in full costs five times its forward:
        twice for W, three times for D.

        The output head counts at every token, as plain transformers computes it. That is an upper bound, since the loss
        needs it at response tokens only.

        Args:
            tokens: Tokens in the step, over all its sequences, without a soft prompt's; so is the length.
            context_tokens: Length of one sequence.
            checkpointing: Whether the forward pass is run again in the backward pass.
        """
        frozen, trained = 2 * (self.product_parameters + self.active_frozen), 2 * self._multiplied_trainable
        step = self._with_prefix(tokens, context_tokens) * (
            2 * frozen + 3 * (trained + self._attention_flops(context_tokens))
        )
        return step + (self.forward_flops(tokens, context_tokens) if checkpointing else 0)

    def _attention_flops(self, context_tokens: int) -> int:
        return 4 * (context_tokens + self.prefix_tokens) * self.attention_width

    @property
    def _multiplied_trainable(self) -> int:
        return self.active_trainable - self.prefix_trainable

    def _with_prefix(self, tokens: int, context_tokens: int) -> int:
        return tokens + round(tokens * self.prefix_tokens / context_tokens)


def cost(model: ModelInfo, plan: AdapterPlan) -> Cost:
    """Returns the cost of a client with this plan.

    In an encoder-decoder model every token is counted as if it passed through both sides, which is an upper bound.

    Raises:
        ConfigError: the plan wants more active experts than a layer has, or targets no layer.
    """
    idle_parameters = sum((moe.num_experts - active_experts(moe, plan)) * moe.expert_parameters for moe in model.moe)
    idle_parameters += sum(moe.expert_parameters - moe.active_parameters for moe in model.undescribed)
    again = sum(part.frozen_product_parameters(model) for part in plan.parts)
    trainable, active_trainable = _adapter_parameters(model, plan, trainable_shapes(model, plan))
    whole, active_whole = _adapter_parameters(model, plan, adapter_shapes(model, plan))
    prefixes = [part for part in plan.parts if part.prefix_tokens]
    return Cost(
        parameters=model.parameters,
        active_parameters=model.parameters - idle_parameters + again,
        trainable=trainable,
        active_trainable=active_trainable,
        product_parameters=_product_parameters(model, plan) + again,
        attention_width=_attention_width(model),
        frozen=whole - trainable,
        active_frozen=active_whole - active_trainable,
        prefix_tokens=plan.prefix_tokens,
        prefix_trainable=sum(math.prod(shape) for part in prefixes for shape in part.shapes(model).values()),
    )


def _attention_width(model: ModelInfo) -> int:
    """Returns Σ over layers of heads times head width; where no output projection tells, every layer's is its width.

    Other token mixers, whose cost does not grow with the context, count by their projections alone.
    """
    attention = [linear for linear in model.linears if linear.group == "attention"]
    width = sum(linear.inputs for linear in attention if linear.name.endswith((".o_proj", ".o", ".out_proj", ".dense")))
    if width or any(linear.group == "mixer" for linear in model.linears):
        return width
    return model.layers * model.hidden


def active_experts(moe: MoeInfo, plan: AdapterPlan) -> int:
    """Returns k_i, the experts that a token uses in this layer.

    Raises:
        ConfigError: the plan wants more than the layer has.
    """
    active = moe.top_k if plan.active_experts is None else plan.active_experts
    if active > moe.num_experts:
        raise ConfigError(f"active_experts is {active}, but {moe.name} has {moe.num_experts} experts.")
    return active


def _adapter_parameters(model: ModelInfo, plan: AdapterPlan, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Returns the number of values of these shapes, and the number that a token uses."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    idle = 0
    for moe in model.moe:
        expert_values = sum(size for name, size in sizes.items() if name.startswith(f"{moe.experts}."))
        idle += (moe.num_experts - active_experts(moe, plan)) * expert_values // moe.num_experts
    return sum(sizes.values()), sum(sizes.values()) - idle


def _product_parameters(model: ModelInfo, plan: AdapterPlan) -> int:
    routed = sum(moe.hidden * moe.num_experts + active_experts(moe, plan) * moe.expert_parameters for moe in model.moe)
    routed += sum(moe.active_parameters + moe.router_parameters for moe in model.undescribed)
    linears = sum(linear.inputs * linear.outputs for linear in model.linears)
    return linears + routed + model.vocabulary * model.hidden
