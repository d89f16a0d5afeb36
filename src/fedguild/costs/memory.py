"""Estimated peak memory of a client's training step, from the shapes of model and adapters alone."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedguild.costs.flops import active_experts, expert_parameters
from fedguild.model.chunked_loss import chunk_rows
from fedguild.model.info import LinearInfo, ModelInfo
from fedguild.model.plan import AdapterPlan, adapter_shapes

TRAINABLE_BYTES = 4  # adapters, their gradients and moments are fp32
LOGIT_COPIES = 2  # fp32 logits and their gradient
NF4_BYTES = 0.5 + 4 / 64  # four bits a weight, and an fp32 scale for each block of 64 (no double quantisation)


@dataclass(frozen=True, slots=True)
class Memory:
    """Estimated bytes that the training step of a cohort, by default of one client, holds at its peak.

    Attributes:
        weights_bytes: The backbone, once for all clients.
        adapters_bytes: The adapters, at the shapes in which they are stored: in fp32, and in the dtype of the products.
        gradients_bytes: Their gradients.
        optimizer_bytes: The optimizer's moments.
        activations_bytes: Activations and logits.
    """

    weights_bytes: int
    adapters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.weights_bytes + self.cohort_bytes

    @property
    def cohort_bytes(self) -> int:
        """The sum without the backbone's weights."""
        return self.adapters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


def memory(
    model: ModelInfo,
    plan: AdapterPlan,
    tokens: int,
    *,
    dtype: torch.dtype,
    moments: int = 2,
    checkpointing: bool = False,
    four_bit: bool = False,
    slots: int = 1,
    beside: AdapterPlan | None = None,
) -> Memory:
    """Returns an estimate of the peak memory of a training step.

    Logits are counted for every token up to a chunk of them (`fedguild.model.chunked_loss`), an upper bound: the loss
    needs them at response tokens only. An encoder-decoder model has no chunks.

    Args:
        model: The backbone.
        plan: The adapter plan of each client.
        tokens: Tokens of each client's share of a forward pass, with the padding that is computed.
        dtype: Dtype of the backbone's weights and activations; trainables are fp32.
        moments: Moments that the optimizer keeps: 2 for Adam, 1 for SGD with momentum, 0 for SGD.
        checkpointing: Whether only each layer's input is kept, and the activations inside one layer at a time.
        four_bit: Whether linear layers and experts are in NF4 (`fedguild.model.four_bit`).
        slots: Clients that train at once.
        beside: The plan of further slots that are trained, or whose gradients are summed, while those of `plan` only
            lie there (`Method.further_plan`).
    """
    gradients, frozen = _stored_values(model, plan, dtype)
    held = gradients + frozen
    if beside is not None:
        gradients, frozen = _stored_values(model, beside, dtype)
        held, moments = held + gradients + frozen, max(moments, 1)
    casts = dtype.itemsize if dtype.itemsize < TRAINABLE_BYTES else 0
    kept = _kept_activations(model, beside or plan)
    if checkpointing:
        kept = model.layers * model.hidden + kept // max(model.layers, 1)
    values = kept + _working_activations(model, beside or plan)
    logits = slots * tokens
    if model.seq2seq is None:
        logits = min(logits, chunk_rows(model.vocabulary, torch.float32))
    return Memory(
        weights_bytes=weight_bytes(model, dtype, four_bit=four_bit),
        adapters_bytes=slots * (TRAINABLE_BYTES + casts) * held,
        gradients_bytes=slots * TRAINABLE_BYTES * gradients,
        optimizer_bytes=slots * moments * TRAINABLE_BYTES * gradients,
        activations_bytes=slots * tokens * dtype.itemsize * values
        + logits * TRAINABLE_BYTES * LOGIT_COPIES * model.vocabulary,
    )


def largest_cohort(
    model: ModelInfo,
    plan: AdapterPlan,
    tokens: int,
    clients: int,
    free: int,
    *,
    dtype: torch.dtype,
    moments: int = 2,
    checkpointing: bool = False,
    beside: AdapterPlan | None = None,
) -> int:
    """Returns how many clients train at once in some free bytes beside the backbone: at most all, at least one.

    Args:
        model: The backbone.
        plan: The largest of the clients' plans.
        tokens: Tokens of one client's share of a forward pass, with the padding that is computed.
        clients: Number of clients.
        free: The bytes.
        dtype: As in `memory`.
        moments: As in `memory`.
        checkpointing: As in `memory`.
        beside: As in `memory`.
    """

    def fits(slots: int) -> bool:
        need = memory(
            model,
            plan,
            tokens,
            dtype=dtype,
            moments=moments,
            checkpointing=checkpointing,
            slots=slots,
            beside=beside,
        )
        return need.cohort_bytes <= free

    return max(1, bisect_left(range(1, clients + 1), True, key=lambda slots: not fits(slots)))


def _stored_values(model: ModelInfo, plan: AdapterPlan, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the values that one slot's tensors take in their storage, trained and frozen; ranks are padded there."""
    trained = frozen = 0
    for part in plan.parts:
        for name, shape in part.shapes(model).items():
            values = math.prod(part.layout(name, shape, dtype).shape)
            trained, frozen = (trained + values, frozen) if part.trains(name) else (trained, frozen + values)
    return trained, frozen


def weight_bytes(model: ModelInfo, dtype: torch.dtype, *, four_bit: bool = False) -> int:
    """Returns the bytes of the backbone's weights while it runs.

    Args:
        model: The backbone.
        dtype: Dtype of its weights, and of those that are not packed.
        four_bit: Whether linear layers and experts are in NF4; embeddings, routers, norms and the head are
            not. The experts of one layer, or one linear layer, are unpacked at a time.
    """
    if not four_bit:
        return dtype.itemsize * model.parameters
    linears = [linear.inputs * linear.outputs for linear in model.linears]
    experts = [moe.num_experts * expert_parameters(moe) for moe in model.moe]
    packed = sum(linears) + sum(experts)
    unpacked = model.parameters - packed + max([*linears, *experts], default=0)
    return math.ceil(NF4_BYTES * packed) + dtype.itemsize * unpacked


def evaluation_bytes(model: ModelInfo, plan: AdapterPlan, *, dtype: torch.dtype, row_tokens: int = 0) -> int:
    """Returns an estimate of the bytes that a token of an evaluation's batch holds while it is generated from.

    Those are the keys and values of all layers, what one layer holds at a time, and the token's row of the attention's
    mask, as booleans and as what attention adds to its scores.

    Args:
        model: The backbone.
        plan: The plan of the slot with the most active experts.
        dtype: Dtype of the backbone's products.
        row_tokens: Tokens of the longest row.
    """
    mask = row_tokens * (1 + dtype.itemsize)
    return mask + dtype.itemsize * (cached_values(model) + 2 * sum(_layer_widths(model, plan)))


def evaluation_batch_tokens(
    model: ModelInfo, plan: AdapterPlan, *, dtype: torch.dtype, free: int, row_tokens: int = 0
) -> int:
    """Returns the tokens of an evaluation's batch that fit some free bytes of memory.

    No tensor of a pass gets more than 2^31 values, which kernels count in 32 bits.
    """
    widest = max(*_layer_widths(model, plan), row_tokens)
    each = evaluation_bytes(model, plan, dtype=dtype, row_tokens=row_tokens)
    return max(1, min(free // each, (2**31 - 1) // widest))


def cached_values(model: ModelInfo) -> int:
    """Returns the keys and values that generation keeps for each token, over all layers.

    With latent attention (DeepSeek), transformers keeps the keys and values of all heads. A projection of queries, keys
    and values in one counts as if there were as many keys and values as it has inputs, an upper bound.
    """
    layers: dict[str, dict[str, LinearInfo]] = {}
    for linear in model.linears:
        if linear.group == "attention":
            name, _, leaf = linear.name.rpartition(".")
            layers.setdefault(name, {})[leaf] = linear
    return sum(map(_cached_values, layers.values()))


def _cached_values(attention: Mapping[str, LinearInfo]) -> int:
    for key, value in (("k_proj", "v_proj"), ("k", "v")):
        if key in attention and value in attention:
            return attention[key].outputs + attention[value].outputs
    query = attention.get("q_b_proj") or attention.get("q_proj")
    if "kv_b_proj" in attention and "o_proj" in attention and query is not None:
        return query.outputs + attention["o_proj"].inputs
    return 2 * max(linear.inputs for linear in attention.values())


def _layer_widths(model: ModelInfo, plan: AdapterPlan) -> tuple[int, ...]:
    """Returns the values per token of one layer's largest tensors, of which a pass holds about two of each kind.

    They are the active experts' inputs or outputs, what lies between them, a linear layer's output, and the residual.
    """
    experts = max((active_experts(moe, plan) for moe in model.moe), default=0)
    hidden = max((moe.hidden for moe in model.moe), default=0)
    inner = max((moe.width * (len(moe.projections) - 1) for moe in model.moe), default=0)
    linear = max((linear.outputs for linear in model.linears), default=0)
    return experts * hidden, experts * inner, linear, 2 * model.hidden


def _kept_activations(model: ModelInfo, plan: AdapterPlan) -> int:
    """Returns the values per token that the forward pass keeps for the backward pass, approximately.

    Every linear layer keeps its input, and what follows it keeps its output; an active expert
    keeps the outputs of its input projections, and its input where it has an adapter; a layer keeps two
    residuals and two normalised inputs.
    """
    linears = sum(linear.inputs + linear.outputs for linear in model.linears)
    adapter = tuple(adapter_shapes(model, plan))
    experts = 0
    for moe in model.moe:
        inputs = any(name.startswith(f"{moe.experts}.") for name in adapter)
        experts += active_experts(moe, plan) * ((len(moe.projections) - 1) * moe.width + inputs * moe.hidden)
    return linears + experts + 4 * model.layers * model.hidden


def _working_activations(model: ModelInfo, plan: AdapterPlan) -> int:
    """Returns the values per token that the backward pass of one layer's experts holds, approximately.

    For each active expert: the input, the gradients of input and output, and the gradients and
    recomputed values between them.
    """
    return max((active_experts(moe, plan) * (3 * moe.hidden + 4 * moe.width) for moe in model.moe), default=0)
