"""What a client's training and inference cost, from the shapes of model and adapters alone.

No weights are loaded. A multiplication with its addition counts as two FLOPs; norms, softmaxes
and activation functions are left out, as is usual.

What is trained is what `trainable_shapes` names, LoRA and parts alike. A trainable [M, ..] of a
layer's experts works for a token in the token's active experts only; every other value of a
trainable is multiplied with every token once. That holds for matrices: LoRA's factors, and the
changes of experts and routers trained in full, whose product D x runs beside the frozen W x. It
counts a part's scalars and vectors as if they were matrices, which adds little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedguild.errors import ConfigError
from fedguild.model.plan import AdapterPlan, ModelInfo, MoeInfo, trainable_shapes

TRAINABLE_BYTES = 4  # trainables, their gradients and moments are fp32
LOGIT_COPIES = 2  # fp32 logits and their gradient


@dataclass(frozen=True, slots=True)
class Cost:
    """What one client's model is made of, and what it costs per token.

    Attributes:
        parameters: P, all parameters of the backbone.
        active_parameters: P_a, those that a token uses, with the k_i experts of the plan.
        trainable: All trainable parameters.
        active_trainable: Trainable parameters that a token uses.
        product_parameters: Backbone parameters that a token is multiplied with: the active ones
            without those that are looked up (the input embedding) or added.
        attention_width: Σ over layers of heads times head width.
    """

    parameters: int
    active_parameters: int
    trainable: int
    active_trainable: int
    product_parameters: int
    attention_width: int

    def table_flops(self, tokens: int, *, adapters: bool = True) -> int:
        """Returns the forward FLOPs as FLAME's tables count them: two per active parameter and token.

        Table 2 (tokens=128, without adapters) leaves LoRA out, Table 1 counts it. The input
        embedding, which is looked up, counts as if it were multiplied.
        """
        return 2 * tokens * (self.active_parameters + (self.active_trainable if adapters else 0))

    def forward_flops(self, tokens: int, context_tokens: int) -> int:
        """Returns the FLOPs of a forward pass.

        Args:
            tokens: Tokens in the pass, over all its sequences.
            context_tokens: Length of one sequence. Scores and values of the whole square are
                counted, masked or not (PaLM, appendix B).
        """
        per_token = 2 * (self.product_parameters + self.active_trainable)
        return tokens * (per_token + self._attention_flops(context_tokens))

    def training_flops(self, tokens: int, context_tokens: int, *, checkpointing: bool = False) -> int:
        """Returns the FLOPs of a training step: forward and backward, without the optimizer.

        Frozen products cost one forward and one input gradient, the weight gradient is never
        formed; the products of what is trained cost their forward three times (themselves, the input
        gradient, the weight gradient), as does attention. So an expert trained in full costs five
        times its forward: twice for W, three times for D.

        Args:
            tokens: Tokens in the step, over all its sequences.
            context_tokens: Length of one sequence.
            checkpointing: Whether the forward pass is run again in the backward pass.
        """
        frozen, trained = 2 * self.product_parameters, 2 * self.active_trainable
        step = tokens * (2 * frozen + 3 * (trained + self._attention_flops(context_tokens)))
        return step + (self.forward_flops(tokens, context_tokens) if checkpointing else 0)

    def _attention_flops(self, context_tokens: int) -> int:
        """Returns the FLOPs per token of QKᵀ and of the product with V."""
        return 4 * context_tokens * self.attention_width


@dataclass(frozen=True, slots=True)
class Memory:
    """Estimated bytes that one client's training step holds at its peak."""

    weights_bytes: int
    adapters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.weights_bytes
            + self.adapters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
        )


def cost(model: ModelInfo, plan: AdapterPlan) -> Cost:
    """Returns the cost of a client that runs `model` with `plan`.

    Of an encoder-decoder model every token is counted as if it passed both sides, which is an upper bound.

    Raises:
        ConfigError: the plan wants more active experts than a layer has, or targets no layer.
    """
    idle_parameters, idle_trainable = 0, 0
    sizes = {name: math.prod(shape) for name, shape in trainable_shapes(model, plan).items()}
    for moe in model.moe:
        idle = moe.num_experts - active_experts(moe, plan)
        idle_parameters += idle * expert_parameters(moe)
        adapters = sum(size for name, size in sizes.items() if name.startswith(f"{moe.experts}."))
        idle_trainable += idle * adapters // moe.num_experts
    return Cost(
        parameters=model.parameters,
        active_parameters=model.parameters - idle_parameters,
        trainable=sum(sizes.values()),
        active_trainable=sum(sizes.values()) - idle_trainable,
        product_parameters=_product_parameters(model, plan),
        attention_width=sum(linear.inputs for linear in model.linears if linear.name.endswith((".o_proj", ".o")))
        or model.layers * model.hidden,
    )


def memory(
    model: ModelInfo,
    plan: AdapterPlan,
    tokens: int,
    *,
    dtype: torch.dtype,
    moments: int = 2,
    checkpointing: bool = False,
) -> Memory:
    """Returns an estimate of what a training step of one client holds.

    Logits are counted for every token, the most there may be; the loss wants them at response
    tokens only.

    Args:
        model: The backbone.
        plan: What the client trains.
        tokens: Tokens of one forward pass, padding included.
        dtype: Of the backbone's weights and activations; trainables are fp32.
        moments: Moments that the optimizer keeps: 2 for Adam, 1 for SGD with momentum, 0 for SGD.
        checkpointing: Whether only each layer's input is kept, and one layer's insides at a time.
    """
    trainable_bytes = TRAINABLE_BYTES * cost(model, plan).trainable
    kept = _kept_activations(model, plan)
    if checkpointing:
        kept = model.layers * model.hidden + kept // max(model.layers, 1)
    values = kept + _working_activations(model, plan)
    return Memory(
        weights_bytes=dtype.itemsize * model.parameters,
        adapters_bytes=trainable_bytes,
        gradients_bytes=trainable_bytes,
        optimizer_bytes=moments * trainable_bytes,
        activations_bytes=tokens * (dtype.itemsize * values + 4 * LOGIT_COPIES * model.vocabulary),
    )


def active_experts(moe: MoeInfo, plan: AdapterPlan) -> int:
    """Returns k_i, the experts that a token uses in this layer.

    Raises:
        ConfigError: the plan wants more than the layer has.
    """
    active = moe.top_k if plan.active_experts is None else plan.active_experts
    if active > moe.num_experts:
        raise ConfigError(f"active_experts is {active}, but {moe.name} has {moe.num_experts} experts.")
    return active


def expert_parameters(moe: MoeInfo) -> int:
    """Returns the parameters of one expert: its gate, where it has one, up and down projection."""
    return len(moe.projections) * moe.hidden * moe.width


def _product_parameters(model: ModelInfo, plan: AdapterPlan) -> int:
    routed = sum(moe.hidden * moe.num_experts + active_experts(moe, plan) * expert_parameters(moe) for moe in model.moe)
    linears = sum(linear.inputs * linear.outputs for linear in model.linears)
    return linears + routed + model.vocabulary * model.hidden


def _kept_activations(model: ModelInfo, plan: AdapterPlan) -> int:
    """Returns the values per token that the forward pass keeps for the backward pass, about.

    Every linear layer keeps its input, and what follows it keeps its output; an active expert
    keeps what its input projections give, and its input where it trains something; a layer keeps two
    residuals and two normalised inputs.
    """
    linears = sum(linear.inputs + linear.outputs for linear in model.linears)
    trained = tuple(trainable_shapes(model, plan))
    experts = 0
    for moe in model.moe:
        inputs = any(name.startswith(f"{moe.experts}.") for name in trained)
        experts += active_experts(moe, plan) * ((len(moe.projections) - 1) * moe.width + inputs * moe.hidden)
    return linears + experts + 4 * model.layers * model.hidden


def _working_activations(model: ModelInfo, plan: AdapterPlan) -> int:
    """Returns the values per token that the backward pass of one layer's experts holds, about.

    Of each active expert: the input, the gradients of input and output, and the gradients and
    recomputed values between them.
    """
    return max((active_experts(moe, plan) * (3 * moe.hidden + 4 * moe.width) for moe in model.moe), default=0)
