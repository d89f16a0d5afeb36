"""Estimated peak memory of a client's training step, from the shapes of model and adapters alone."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedguild.measuring.costs.flops import active_experts
from fedguild.model.chunked_loss import chunk_rows
from fedguild.model.info import LinearInfo, ModelInfo
from fedguild.model.plan import AdapterPlan, adapter_shapes

TRAINABLE_BYTES = 4  # adapters, their gradients and moments are fp32
EXACT_BYTES = 8  # sums of clipped gradients are fp64
STEP_COPIES = 4  # a clipped gradient, a new moment and what both are computed from
QUERIES = ("q_proj", "q_b_proj", "q")  # the layers that give queries to the attention
SCORE_BYTES = 4  # eager attention's softmax is fp32
SCORE_COPIES = 2  # its probabilities and its scores, or their gradients
LOGIT_COPIES = 2  # fp32 logits and their gradient
NF4_BYTES = 0.5 + 4 / 64  # four bits a weight, and an fp32 scale for each block of 64 (no double quantisation)


@dataclass(frozen=True, slots=True)
class Memory:
    """Estimated bytes that the training step of a cohort, by default of one client, holds at its peak.

    Attributes:
        weights_bytes: The backbone, once for all clients.
        adapters_bytes: The adapters, at the shapes in which they are stored: in fp32, and in the dtype of the products;
            and what a method holds beside them (`AdapterPlan.buffers`).
        gradients_bytes: Their gradients.
        optimizer_bytes: The optimizer's moments.
        activations_bytes: Activations and logits.
        scratch_bytes: What a step holds beside all these for a while: the gradients of one layer's experts before they
            are fp32, moments that wait while their client rests, and what the update takes in excess of the
            activations, which are gone by then.
    """

    weights_bytes: int
    adapters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cohort_bytes

    @property
    def cohort_bytes(self) -> int:
        """The total without the backbone's weights."""
        kept = self.adapters_bytes + self.gradients_bytes + self.optimizer_bytes
        return kept + self.activations_bytes + self.scratch_bytes


@dataclass(frozen=True, slots=True)
class StepForm:
    """How a cohort takes its steps, as far as memory depends on it.

    Attributes:
        accumulation: Passes whose gradients add up to a step.
        by_torch: Whether torch takes the optimizer's steps, not a kernel (`fedguild.client.optimizer`).
        examples: Slots of single examples in which each client trains in turn with DP-SGD
            (`fedguild.client.private_training`); 0 without DP-SGD.
        padded_tokens: Tokens of a client's rows where only attention pads packed rows (`fedguild.model.packed_rows`); 0
            elsewhere.
        row_tokens: Tokens of a client's longest row; None if all tokens of its pass are one row.
    """

    accumulation: int = 1
    by_torch: bool = False
    examples: int = 0
    padded_tokens: int = 0
    row_tokens: int | None = None


PLAIN = StepForm()
"""One pass a step, of clients that take the same steps."""


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
    form: StepForm = PLAIN,
) -> Memory:
    """Returns an estimate of the peak memory of a training step.

    Logits are counted for every token up to a chunk of them (`fedguild.model.chunked_loss`), an upper bound: the loss
    needs them at response tokens only. An encoder-decoder model has no chunks. Eager attention keeps the probabilities
    of all pairs of tokens of a row, for every head, in fp32 and in the dtype of the products (gpt-oss in the latter
    alone); those of an encoder-decoder model count as if each side had all tokens, both upper bounds.

    Args:
        plan: The adapter plan of each client.
        tokens: Tokens of each client's share of a forward pass, with the padding that is computed and without a soft
            prompt's.
        dtype: Dtype of the backbone's weights and activations; trainables are fp32.
        moments: Moments that the optimizer keeps: 2 for Adam, 1 for SGD with momentum, 0 for SGD.
        checkpointing: Whether only each layer's input is kept, and the activations inside one layer at a time.
        four_bit: Whether linear layers and experts are in NF4 (`fedguild.model.four_bit`).
        slots: Clients that train at once.
        beside: The plan of further slots that are trained, or whose gradients are summed, while those of `plan` are
            only stored.
    """
    trained, frozen = _stored_values(model, plan, dtype)
    gradients = sum(trained.values())
    held = gradients + frozen
    if beside is not None:
        trained, frozen = _stored_values(model, beside, dtype)
        gradients = sum(trained.values())
        held, moments = held + gradients + frozen, max(moments, 1)
    casts = dtype.itemsize if dtype.itemsize < TRAINABLE_BYTES else 0
    kept, padded = _kept_activations(model, beside or plan), attention_values(model) if form.padded_tokens else 0
    scores = model.eager_heads
    if checkpointing:
        layers = max(model.layers, 1)
        kept, padded = model.layers * model.hidden + kept // layers, padded // layers
        scores = _scoring_heads(model)
    row, prefix = form.row_tokens or tokens, (beside or plan).prefix_tokens
    length, computed = row + prefix, tokens + math.ceil(tokens * prefix / row)
    running = 1 if form.examples else slots  # with DP-SGD, clients run one after the other
    logits = running * tokens
    if model.seq2seq is None:
        logits = min(logits, chunk_rows(model.vocabulary, torch.float32))
    every = slots + form.examples
    optimizer = slots * moments * TRAINABLE_BYTES * gradients
    token_bytes = (
        dtype.itemsize * kept
        + length * scores * (SCORE_BYTES + casts)
        + max(
            dtype.itemsize * _working_activations(model, beside or plan),
            length * _scoring_heads(model) * SCORE_BYTES * SCORE_COPIES,
        )
    )
    activations = (
        running * (computed * token_bytes + dtype.itemsize * form.padded_tokens * padded)
        + logits * TRAINABLE_BYTES * LOGIT_COPIES * model.vocabulary
    )
    of_layer = (form.examples or slots) * _largest_layer(model, trained)
    passing = of_layer * (casts + (TRAINABLE_BYTES if form.accumulation > 1 else 0))
    return Memory(
        weights_bytes=weight_bytes(model, dtype, four_bit=four_bit),
        adapters_bytes=every * (TRAINABLE_BYTES + casts) * held + slots * TRAINABLE_BYTES * plan.buffers,
        gradients_bytes=every * TRAINABLE_BYTES * gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        scratch_bytes=max(passing, _update_bytes(trained, slots, form) - activations),
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
    form: StepForm = PLAIN,
) -> int:
    """Returns how many clients, at least one, can train at once in `free` bytes besides the backbone's weights.

    The other arguments are those of `memory`.
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
            form=form,
        )
        return need.cohort_bytes <= free

    return max(1, bisect_left(range(1, clients + 1), True, key=lambda slots: not fits(slots)))


def _stored_values(model: ModelInfo, plan: AdapterPlan, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Returns the stored values of one slot: those of each trained tensor by name, and the total of the frozen ones.

    Storage pads ranks.
    """
    trained, frozen = {}, 0
    for part in plan.parts:
        for name, shape in part.shapes(model).items():
            values = math.prod(part.layout(name, shape, dtype).shape)
            if part.trains(name):
                trained[name] = values
            else:
                frozen += values
    return trained, frozen


def _largest_layer(model: ModelInfo, trained: Mapping[str, int]) -> int:
    names = sorted(trained)
    return max((sum(trained[name] for name in _below(names, moe.experts)) for moe in model.moe), default=0)


def _below(names: Sequence[str], module: str) -> Sequence[str]:
    """Returns those of sorted names that begin with a module's; a dot comes right before a slash."""
    return names[bisect_left(names, f"{module}.") : bisect_left(names, f"{module}/")]


def _update_bytes(trained: Mapping[str, int], slots: int, form: StepForm) -> int:
    """Returns the peak bytes of the update in addition to trainables, gradients and moments.

    To clip, a CPU squares one tensor after the other. torch's steps hold up to `STEP_COPIES` tensors of the largest
    trainable's size. DP-SGD clips and sums in fp64, one tensor after the other.
    """
    largest, whole = max(trained.values(), default=0), sum(trained.values())
    if form.examples:
        clipping = EXACT_BYTES * (2 * form.examples * largest + 3 * whole)
    else:
        clipping = TRAINABLE_BYTES * slots * largest
    return max(clipping, STEP_COPIES * TRAINABLE_BYTES * slots * largest) if form.by_torch else clipping


def weight_bytes(model: ModelInfo, dtype: torch.dtype, *, four_bit: bool = False) -> int:
    """Returns the bytes of the backbone's weights while it runs.

    Args:
        dtype: Dtype of the weights that are not packed.
        four_bit: Whether linear layers and experts are in NF4; embeddings, routers, norms and the head are not. The
            experts of one layer, or one linear layer, are unpacked at a time.
    """
    if not four_bit:
        return dtype.itemsize * model.parameters
    linears = [linear.inputs * linear.outputs for linear in model.linears]
    experts = [moe.num_experts * moe.expert_parameters for moe in model.moe]
    packed = sum(linears) + sum(experts)
    unpacked = model.parameters - packed + max([*linears, *experts], default=0)
    return math.ceil(NF4_BYTES * packed) + dtype.itemsize * unpacked


def evaluation_bytes(model: ModelInfo, plan: AdapterPlan, *, dtype: torch.dtype, row_tokens: int = 0) -> int:
    """Returns an estimate of the bytes that generation holds for each token of a batch.

    They are the keys and values of all layers, the activations of one layer, and the token's row of the attention mask,
    as booleans and as what attention adds to its scores. Eager attention has such a row of scores for each head of a
    layer, in the dtype of the products and in fp32, before and after the softmax.

    Args:
        plan: The plan of the slot with the most active experts.
        row_tokens: Tokens of the longest row.
    """
    rows = 1 + dtype.itemsize + _scoring_heads(model) * (dtype.itemsize + SCORE_COPIES * SCORE_BYTES)
    return row_tokens * rows + dtype.itemsize * (cached_values(model) + 2 * sum(_layer_widths(model, plan)))


def evaluation_batch_tokens(
    model: ModelInfo, plan: AdapterPlan, *, dtype: torch.dtype, free: int, row_tokens: int = 0
) -> int:
    """Returns the tokens of an evaluation's batch that fit into `free` bytes.

    No tensor of a pass may exceed 2^31 values, which kernels count in 32 bits.
    """
    widest = max(*_layer_widths(model, plan), row_tokens * max(1, _scoring_heads(model)))
    each = evaluation_bytes(model, plan, dtype=dtype, row_tokens=row_tokens)
    return max(1, min(free // each, (2**31 - 1) // widest))


def cached_values(model: ModelInfo) -> int:
    """Returns the keys and values that generation keeps for each token, over all layers.

    With latent attention (DeepSeek), transformers keeps the keys and values of all heads. A fused projection of
    queries, keys and values counts as if keys and values were as wide as its input, an upper bound.
    """
    layers: dict[str, dict[str, LinearInfo]] = {}
    for linear in model.linears:
        if linear.group == "attention":
            name, _, leaf = linear.name.rpartition(".")
            layers.setdefault(name, {})[leaf] = linear
    return sum(map(_cached_values, layers.values()))


def attention_values(model: ModelInfo) -> int:
    """Returns the queries, keys, values and outputs of a token's attention, over all layers."""
    outputs = (linear.inputs for linear in model.linears if linear.name.rpartition(".")[2] in ("o_proj", "o"))
    queries = sum(linear.outputs for linear in model.linears if linear.name.rpartition(".")[2] in QUERIES)
    return cached_values(model) + queries + sum(outputs)


def _cached_values(attention: Mapping[str, LinearInfo]) -> int:
    for key, value in (("k_proj", "v_proj"), ("k", "v")):
        if key in attention and value in attention:
            return attention[key].outputs + attention[value].outputs
    query = attention.get("q_b_proj") or attention.get("q_proj")
    if "kv_b_proj" in attention and "o_proj" in attention and query is not None:
        return query.outputs + attention["o_proj"].inputs
    return 2 * max(linear.inputs for linear in attention.values())


def _layer_widths(model: ModelInfo, plan: AdapterPlan) -> tuple[int, ...]:
    """Returns the values per token of one layer's largest tensors; a pass holds about two of each kind.

    They are the active experts' inputs or outputs, their intermediate values, a linear layer's output, and the
    residual.
    """
    sizes = [(active_experts(moe, plan), moe.hidden, moe.width * (len(moe.projections) - 1)) for moe in model.moe]
    sizes += [(active, model.hidden, 2 * width) for active, width in _undescribed_sizes(model)]
    experts, hidden, inner = (max(column) for column in zip((0, 0, 0), *sizes, strict=True))
    linear = max((linear.outputs for linear in model.linears), default=0)
    return experts * hidden, experts * inner, linear, 2 * model.hidden


def _scoring_heads(model: ModelInfo) -> int:
    """Returns the heads of one layer whose scores are whole matrices."""
    return model.eager_heads // max(model.layers, 1)


def _undescribed_sizes(model: ModelInfo) -> list[tuple[int, int]]:
    """Returns the active experts and an expert's inner width of every mixture of a family without a description.

    Its experts count as gated ones of three matrices.
    """
    return [
        (active, moe.active_parameters // (3 * model.hidden * active))
        for moe in model.undescribed
        for active in [moe.top_k or moe.num_experts or 1]
    ]


def _kept_activations(model: ModelInfo, plan: AdapterPlan) -> int:
    """Returns the approximate values per token that the forward pass keeps for the backward pass.

    Every linear layer keeps its input, and the operation after it keeps its output. An active expert keeps the outputs
    of its input projections, and its input if it has an adapter. A layer keeps two residuals and two normalised inputs.
    """
    linears = sum(linear.inputs + linear.outputs for linear in model.linears)
    adapter = sorted(adapter_shapes(model, plan))
    experts = 0
    for moe in model.moe:
        inputs = bool(_below(adapter, moe.experts))
        experts += active_experts(moe, plan) * ((len(moe.projections) - 1) * moe.width + inputs * moe.hidden)
    experts += sum(active * (3 * width + model.hidden) for active, width in _undescribed_sizes(model))
    return linears + experts + 4 * model.layers * model.hidden


def _working_activations(model: ModelInfo, plan: AdapterPlan) -> int:
    """Returns the approximate values per token that the backward pass of one layer's experts holds.

    For each active expert: the input, the gradients of input and output, and the gradients and recomputed values
    between them.
    """
    described = [active_experts(moe, plan) * (3 * moe.hidden + 4 * moe.width) for moe in model.moe]
    others = [active * (3 * model.hidden + 4 * width) for active, width in _undescribed_sizes(model)]
    return max([*described, *others], default=0)
