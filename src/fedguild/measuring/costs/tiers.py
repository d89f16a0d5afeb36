"""Costs of one tier of clients in a round: parameters, FLOPs, bytes on the wire, and the estimated peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean

import torch

from fedguild.client.budget import Budget
from fedguild.client.schedule import examples_in_round, steps_in_round
from fedguild.config.training import TrainingSettings
from fedguild.core.codec import Codec
from fedguild.measuring.costs.flops import Cost, cost
from fedguild.measuring.costs.memory import Memory, StepForm, memory
from fedguild.measuring.costs.traffic import Exchange, Exchanges
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan

Parts = dict[str, int]


@dataclass(frozen=True)
class Workload:
    """A client's work in a round.

    Attributes:
        examples: Training examples of a client.
        tokens: Tokens of one forward pass, padding included.
        context_tokens: Length of one sequence.
        any_dtype: Whether the dtype depends on the machine: fp32 on a CPU, bf16 on a GPU.
        checkpointing: Whether activations are recomputed in the backward pass.
        four_bit: Whether linear layers and experts are in 4 bit.
        sample_rate: With DP-SGD, the probability with which an example enters a step; None without DP-SGD.
        codec: The encoding of large tensors on the wire.
        wire_dtype: The dtype as which every number on the wire is counted instead; None for the bytes sent.
    """

    examples: int
    tokens: int
    context_tokens: int
    training: TrainingSettings
    dtype: torch.dtype = torch.bfloat16
    any_dtype: bool = False
    checkpointing: bool = False
    four_bit: bool = False
    sample_rate: float | None = None
    codec: Codec = "fp32"
    wire_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Direction:
    """Bytes in one direction: the mean over a tier's clients, and over the rounds if these differ.

    Attributes:
        bytes: Total, with the header.
        parts: By payload part.
        least_bytes: Total without what an upload may leave out.
    """

    bytes: int
    parts: Parts = field(hash=False)
    least_bytes: int


@dataclass(frozen=True)
class MemoryRow:
    """An estimate of a client's peak memory under other settings than the run's, in bytes."""

    weights: str
    checkpointing: bool
    estimate: Memory


@dataclass(frozen=True)
class TierProfile:
    """Costs of each client of a tier in one round.

    Attributes:
        clients: Number of clients in the tier.
        cost: Parameter counts, from which the FLOPs follow.
        steps: Optimizer steps in a round.
        flops_forward: FLOPs of one forward pass.
        flops_training_step: FLOPs of one optimizer step of full batches, or of as many examples as DP-SGD is expected
            to draw, forward and backward, all its passes, with the reference's of dpo.
        flops_round: FLOPs of a round's training, forward and backward, with the examples of partial batches alone, and
            the reference of dpo once for each pair; `flops_round_forward` is the forward part.
        upload: Upload in a later round, as are the downloads.
        download: Download of a client that took part in the round before.
        absent_download: Download of one that did not; None if all clients take part in every round.
        first_upload: Upload in the first round, as is `first_download`.
        peak_memory: Estimate under the run's settings; `memory` has it under others too.
    """

    budget: Budget
    clients: int
    plan: AdapterPlan
    cost: Cost
    steps: int
    flops_forward: int
    flops_training_step: int
    flops_round_forward: int
    flops_round: int
    upload: Direction
    download: Direction
    absent_download: Direction | None
    first_upload: Direction
    first_download: Direction
    peak_memory: Memory
    memory: Sequence[MemoryRow]


def tier_profile(
    model: ModelInfo,
    budget: Budget,
    clients: int,
    plan: AdapterPlan,
    trained: Sequence[AdapterPlan],
    traffic: Exchanges,
    workload: Workload,
) -> TierProfile:
    """Returns a tier's profile; `trained` are the plans that one of its clients trains in a round."""
    counted, training = cost(model, plan), workload.training
    tokens, context, again = workload.tokens, workload.context_tokens, workload.checkpointing
    steps = steps_in_round(workload.examples, training)
    step_passes, passes, pairs = (count / training.batch_size for count in _examples(workload, steps))
    costs = [cost(model, each) for each in trained]
    references = [
        cost(model, AdapterPlan((), each.active_experts)).forward_flops(tokens, context)
        for each in trained
        if training.objective == "dpo"
    ]
    later = _of(budget, list(chain(*traffic.later, *traffic.later_of_others)))
    first, absent = _of(budget, traffic.first), _of(budget, traffic.absent)
    plan = replace(plan, beside=_largest_beside(trained))
    rows = [
        MemoryRow(name, checkpointing, _memory(model, plan, replace(workload, dtype=dtype), checkpointing, four_bit))
        for name, dtype, four_bit in _weights(workload)
        for checkpointing in (False, True)
    ]
    return TierProfile(
        budget=budget,
        clients=clients,
        plan=plan,
        cost=counted,
        steps=steps,
        flops_forward=counted.forward_flops(tokens, context),
        flops_training_step=round(
            step_passes * (counted.training_flops(tokens, context, checkpointing=again) + sum(references[:1]))
        ),
        flops_round_forward=round(
            passes * sum(each.forward_flops(tokens, context) for each in costs) + pairs * sum(references)
        ),
        flops_round=round(
            passes * sum(each.training_flops(tokens, context, checkpointing=again) for each in costs)
            + pairs * sum(references)
        ),
        upload=_upload(later),
        download=_download(later),
        absent_download=_download(absent) if absent else None,
        first_upload=_upload(first),
        first_download=_download(first),
        peak_memory=_memory(model, plan, workload, workload.checkpointing, workload.four_bit),
        memory=rows,
    )


def _examples(workload: Workload, steps: int) -> tuple[float, float, float]:
    """Returns the examples of a step, those of a round, and the different ones among these; expected ones with DP-SGD.

    The reference of dpo scores the different ones.
    """
    examples, training, rate = workload.examples, workload.training, workload.sample_rate
    if rate is None:
        drawn = examples_in_round(examples, training)
        return training.batch_size * training.gradient_accumulation_steps, drawn, min(drawn, examples)
    return rate * examples, steps * rate * examples, (1 - (1 - rate) ** steps) * examples


def _largest_beside(trained: Sequence[AdapterPlan]) -> AdapterPlan | None:
    """Returns the largest plan of the further slots that a client holds; None if it holds none."""
    further = [plan.beside for plan in trained if plan.beside is not None]
    return max(further, key=lambda plan: plan.rank, default=None)


def _memory(model: ModelInfo, plan: AdapterPlan, workload: Workload, checkpointing: bool, four_bit: bool) -> Memory:
    return memory(
        model,
        plan,
        workload.tokens,
        dtype=workload.dtype,
        moments=workload.training.moments,
        checkpointing=checkpointing,
        four_bit=four_bit,
        beside=plan.beside,
        form=StepForm(
            workload.training.gradient_accumulation_steps,
            examples=0 if workload.sample_rate is None else workload.training.batch_size,
            row_tokens=workload.context_tokens,
        ),
    )


def _weights(workload: Workload) -> list[tuple[str, torch.dtype, bool]]:
    """Returns the variants of the backbone's weights to count: name, dtype, and whether they are in 4 bits."""
    dtypes = [torch.float32, torch.bfloat16] if workload.any_dtype else [workload.dtype]
    whole = [(f"{8 * dtype.itemsize} bit", dtype, False) for dtype in dtypes]
    return [*whole, ("4 bit", workload.dtype, True)]


def _of(budget: Budget, exchanges: Sequence[Exchange]) -> list[Exchange]:
    return [exchange for exchange in exchanges if exchange.client.budget == budget]


def _upload(exchanges: Sequence[Exchange]) -> Direction:
    parts, least = (
        _mean([exchange.upload for exchange in exchanges]),
        _mean([exchange.least_upload for exchange in exchanges]),
    )
    return Direction(sum(parts.values()), parts, sum(least.values()))


def _download(exchanges: Sequence[Exchange]) -> Direction:
    parts = _mean([exchange.download for exchange in exchanges])
    return Direction(sum(parts.values()), parts, sum(parts.values()))


def _mean(counted: Sequence[Mapping[str, int]]) -> Parts:
    names = sorted({name for parts in counted for name in parts})
    return {name: round(fmean(parts.get(name, 0) for parts in counted)) for name in names}
