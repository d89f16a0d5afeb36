"""What a federated method costs each tier of clients and its server, from a model's config alone.

Everything is counted: parameters, FLOPs, bytes on the wire. Memory is estimated (`profile.memory`), and so is
the server's time, from the speed of a running sum on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.schedule import steps_in_round
from fedguild.config.training import TrainingSettings
from fedguild.evaluation.profile import Cost, Memory, cost, memory
from fedguild.evaluation.servers import SERVERS, Server
from fedguild.evaluation.traffic import Exchange, Exchanges, exchanges
from fedguild.model.plan import AdapterPlan, ModelInfo
from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import Method

Parts = dict[str, int]


@dataclass(frozen=True)
class Workload:
    """What a client works on in a round.

    Attributes:
        examples: Training examples of a client.
        tokens: Tokens of one forward pass, padding included.
        context_tokens: Length of one sequence.
        training: How it trains.
        dtype: Of the backbone.
        checkpointing: Whether activations are recomputed in the backward pass.
        four_bit: Whether linear layers and experts are in 4 bit.
        wire_dtype: What a floating-point number on the wire is counted as.
    """

    examples: int
    tokens: int
    context_tokens: int
    training: TrainingSettings
    dtype: torch.dtype = torch.bfloat16
    checkpointing: bool = False
    four_bit: bool = False
    wire_dtype: torch.dtype = torch.float32

    @property
    def moments(self) -> int:
        """Moments that the optimizer keeps of each trainable."""
        return int(self.training.momentum > 0) if self.training.optimizer == "sgd" else 2


@dataclass(frozen=True)
class Direction:
    """What crosses the wire one way for a client of a tier, the mean over the tier's clients.

    Attributes:
        bytes: In all, with the header.
        parts: By payload part.
        least_bytes: Without what an upload may leave out.
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
    """What one tier's clients cost, each in one round.

    Attributes:
        budget: The tier.
        clients: How many clients it has.
        plan: What they train.
        cost: Parameters, of which FLOPs follow.
        steps: Optimizer steps in a round.
        flops_forward: Of one forward pass.
        flops_training_step: Of one optimizer step, forward and backward, all its passes.
        flops_round: Of a round's training, forward and backward; `flops_round_forward` of that.
        upload: In a later round, as are the downloads.
        download: To a client that took part in the round before.
        absent_download: To one that did not; None where everybody always does.
        first_upload: In the first round, as is `first_download`.
        peak_memory: Under the run's settings; `memory` under others too.
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


@dataclass(frozen=True)
class ServerProfile:
    """What a round costs the server.

    Attributes:
        entry: The order of its time and memory in C.
        participants: C, clients that take part in a round.
        state_bytes: What it keeps between rounds.
        memory_bytes: About what it holds while it aggregates: the state before and after, and the uploads that
            it holds at once.
        received_bytes: All uploads of a round.
        running_sum_seconds: A running mean over all uploads at the speed that this machine has just shown; what
            the method computes beyond that comes on top.
    """

    entry: Server
    participants: int
    state_bytes: int
    memory_bytes: int
    received_bytes: int
    running_sum_seconds: float


@dataclass(frozen=True)
class Profile:
    """A federation's costs: tiers in the order of the budgets, and the server."""

    method: str
    model: ModelInfo
    workload: Workload
    tiers: Sequence[TierProfile]
    server: ServerProfile


def profile(
    method: Method,
    model: ModelInfo,
    clients: Sequence[ClientInfo],
    workload: Workload,
    *,
    participants: int,
    budgets: Sequence[Budget] = (),
) -> Profile:
    """Returns what a federation costs.

    Args:
        method: The method, its settings in it.
        model: The backbone, of its config alone.
        clients: All clients.
        workload: What each of them works on in a round.
        participants: Clients that take part in a round.
        budgets: The federation's tiers, in the order of the profile; empty for those of the clients.

    Raises:
        ConfigError: the method's settings do not fit the model or the clients.
    """
    budgets = list(budgets) or list(dict.fromkeys(client.budget for client in clients))
    traffic = exchanges(
        method, model, clients, budgets=budgets, participants=participants, wire_dtype=workload.wire_dtype
    )
    tiers = []
    for budget in budgets:
        count = sum(client.budget == budget for client in clients)
        if not count:
            continue
        trained = budgets if SERVERS[method.name].trains == "every budget" else [budget]
        plans = [method.plan(model, each) for each in trained]
        tiers.append(_tier(model, budget, count, method.plan(model, budget), plans, traffic, workload))
    return Profile(method.name, model, workload, tiers, _server(SERVERS[method.name], traffic, participants))


def _tier(
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
    passes = steps * training.accumulation
    costs = [cost(model, each) for each in trained]
    later, first = _of(budget, traffic.rounds[-1]), _of(budget, traffic.rounds[0])
    absent = _of(budget, traffic.absent)
    rows = [
        MemoryRow(name, checkpointing, _memory(model, plan, workload, checkpointing, four_bit))
        for name, four_bit in ((_bits(workload.dtype), False), ("4 bit", True))
        for checkpointing in (False, True)
    ]
    return TierProfile(
        budget=budget,
        clients=clients,
        plan=plan,
        cost=counted,
        steps=steps,
        flops_forward=counted.forward_flops(tokens, context),
        flops_training_step=training.accumulation * counted.training_flops(tokens, context, checkpointing=again),
        flops_round_forward=passes * sum(each.forward_flops(tokens, context) for each in costs),
        flops_round=passes * sum(each.training_flops(tokens, context, checkpointing=again) for each in costs),
        upload=_upload(later or absent),
        download=_download(later or absent),
        absent_download=_download(absent) if absent else None,
        first_upload=_upload(first or later or absent),
        first_download=_download(first or later or absent),
        peak_memory=_memory(model, plan, workload, workload.checkpointing, workload.four_bit),
        memory=rows,
    )


def _memory(model: ModelInfo, plan: AdapterPlan, workload: Workload, checkpointing: bool, four_bit: bool) -> Memory:
    return memory(
        model,
        plan,
        workload.tokens,
        dtype=workload.dtype,
        moments=workload.moments,
        checkpointing=checkpointing,
        four_bit=four_bit,
    )


def _bits(dtype: torch.dtype) -> str:
    return f"{8 * dtype.itemsize} bit"


def _of(budget: Budget, exchanges: Sequence[Exchange]) -> list[Exchange]:
    return [exchange for exchange in exchanges if exchange.client.budget == budget]


def _upload(found: Sequence[Exchange]) -> Direction:
    parts, least = _mean([exchange.upload for exchange in found]), _mean([exchange.least_upload for exchange in found])
    return Direction(sum(parts.values()), parts, sum(least.values()))


def _download(found: Sequence[Exchange]) -> Direction:
    parts = _mean([exchange.download for exchange in found])
    return Direction(sum(parts.values()), parts, sum(parts.values()))


def _mean(counted: Sequence[Mapping[str, int]]) -> Parts:
    names = sorted({name for parts in counted for name in parts})
    return {name: round(fmean(parts.get(name, 0) for parts in counted)) for name in names}


def _server(entry: Server, traffic: Exchanges, participants: int) -> ServerProfile:
    sizes = [sum(exchange.upload.values()) for exchange in traffic.rounds[-1]]
    held = sum(sizes) if entry.holds == "all" else max(sizes)
    return ServerProfile(
        entry,
        participants,
        state_bytes=traffic.state_bytes,
        memory_bytes=2 * traffic.state_bytes + held,
        received_bytes=sum(sizes),
        running_sum_seconds=sum(sizes) * seconds_per_byte(),
    )


def seconds_per_byte(values: int = 2**20) -> float:
    """Returns how long a running mean takes on this machine per byte of an upload, measured on one tensor."""
    mean, tensors = WeightedMean(), {"x": torch.ones(values)}
    mean.add(tensors, 1.0)
    started = time.perf_counter()
    mean.add(tensors, 1.0)
    return (time.perf_counter() - started) / (4 * values)


def as_records(found: Profile) -> list[dict[str, Any]]:
    """Returns one flat object for each tier, as `fedguild profile --json` prints them; sizes in bytes."""
    return [_record(found, tier) for tier in found.tiers]


def _record(found: Profile, tier: TierProfile) -> dict[str, Any]:
    workload, entry = found.workload, found.server.entry
    return {
        "tier": tier.budget.name,
        "method": found.method,
        "model": found.model.name,
        "clients": tier.clients,
        "active_experts": tier.plan.active_experts or found.model.top_k,
        "rank": tier.plan.rank,
        "parameters_total": tier.cost.parameters,
        "parameters_active": tier.cost.active_parameters,
        "trainable_total": tier.cost.trainable,
        "trainable_active": tier.cost.active_trainable,
        "examples": workload.examples,
        "steps_per_round": tier.steps,
        "tokens_per_pass": workload.tokens,
        "context_tokens": workload.context_tokens,
        "flops_forward": tier.flops_forward,
        "flops_training_step": tier.flops_training_step,
        "flops_round_forward": tier.flops_round_forward,
        "flops_round_backward": tier.flops_round - tier.flops_round_forward,
        "flops_round": tier.flops_round,
        "wire_dtype": str(workload.wire_dtype).removeprefix("torch."),
        "bytes_are": {"no": "exact", "at most": "at most", "mean": "mean over the clients"}[entry.varies],
        "upload_bytes": tier.upload.bytes,
        "upload_least_bytes": tier.upload.least_bytes,
        "upload_parts": tier.upload.parts,
        "download_bytes": tier.download.bytes,
        "download_parts": tier.download.parts,
        "absent_download_bytes": tier.absent_download.bytes if tier.absent_download else None,
        "absent_download_parts": tier.absent_download.parts if tier.absent_download else None,
        "first_round": {
            "upload_bytes": tier.first_upload.bytes,
            "upload_parts": tier.first_upload.parts,
            "download_bytes": tier.first_download.bytes,
            "download_parts": tier.first_download.parts,
        },
        "counted_in_round": entry.rounds,
        "peak_memory_bytes": tier.peak_memory.total_bytes,
        "memory": [
            {
                "weights": row.weights,
                "checkpointing": row.checkpointing,
                **asdict(row.estimate),
                "total_bytes": row.estimate.total_bytes,
            }
            for row in tier.memory
        ],
        "server": {
            "participants": found.server.participants,
            "memory_order": entry.memory,
            "time_order": entry.time,
            "state_bytes": found.server.state_bytes,
            "memory_bytes": found.server.memory_bytes,
            "received_bytes": found.server.received_bytes,
            "running_sum_seconds": found.server.running_sum_seconds,
        },
        "note": entry.note,
    }
