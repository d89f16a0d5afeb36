"""Costs of a federated method for each tier of clients and for its server, from a model's config alone.

Parameters, FLOPs and bytes on the wire are counted. Memory is estimated (`memory`), and so is the server's time, from
the speed of a running sum on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.measuring.costs.tiers import TierProfile, Workload, tier_profile
from fedguild.measuring.costs.traffic import Exchanges, exchanges
from fedguild.model.info import ModelInfo
from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import Method, ServerCosts


@dataclass(frozen=True)
class ServerProfile:
    """The server's costs in a round.

    Attributes:
        entry: The order of its time and memory in C.
        participants: C, clients that take part in a round.
        state_bytes: Size of the state between rounds.
        memory_bytes: Approximate memory of the aggregation: the state before and after, and the uploads held at once.
        received_bytes: All uploads of a round, the mean over the rounds where these differ.
        running_sum_seconds: Time of a running mean over all uploads, at the speed measured on this machine; further
            computation of the method is not included.
    """

    entry: ServerCosts
    participants: int
    state_bytes: int
    memory_bytes: int
    received_bytes: int
    running_sum_seconds: float


@dataclass(frozen=True)
class Profile:
    """A federation's costs: tiers in the order of the budgets, and the server.

    Attributes:
        session: Bytes that a client receives and sends in a secure aggregation, in place of its upload; None in a plain
            one.
    """

    method: str
    model: ModelInfo
    workload: Workload
    tiers: Sequence[TierProfile]
    server: ServerProfile
    session: tuple[int, int] | None = None


def profile(
    method: Method,
    model: ModelInfo,
    clients: Sequence[ClientInfo],
    workload: Workload,
    *,
    participants: int,
    budgets: Sequence[Budget] = (),
) -> Profile:
    """Returns a federation's costs.

    Args:
        model: The backbone; its config suffices.
        participants: Clients that take part in a round.
        budgets: The federation's tiers, in the order of the profile; empty for those of the clients.

    Raises:
        ConfigError: the method's settings do not fit the model or the clients.
    """
    budgets = list(budgets) or list(dict.fromkeys(client.budget for client in clients))
    traffic = exchanges(
        method,
        model,
        clients,
        budgets=budgets,
        participants=participants,
        codec=workload.codec,
        wire_dtype=workload.wire_dtype,
    )
    tiers = []
    for budget in budgets:
        count = sum(client.budget == budget for client in clients)
        if not count:
            continue
        trained = budgets if method.facts.costs.trains == "every budget" else [budget]
        plans = [method.plan(model, each) for each in trained]
        tiers.append(tier_profile(model, budget, count, method.plan(model, budget), plans, traffic, workload))
    return Profile(method.name, model, workload, tiers, _server_profile(method.facts.costs, traffic, participants))


def _server_profile(entry: ServerCosts, traffic: Exchanges, participants: int) -> ServerProfile:
    """Returns the server's costs in a round of the counted exchanges."""
    received_bytes = round(fmean(sum(sum(one.upload.values()) for one in exchanged) for exchanged in traffic.later))
    held = [[exchange.held_bytes for exchange in exchanged] for exchanged in traffic.later]
    uploads_bytes = max(map(sum if entry.holds == "all" else max, held))
    return ServerProfile(
        entry,
        participants,
        state_bytes=traffic.state_bytes,
        memory_bytes=2 * traffic.state_bytes + uploads_bytes,
        received_bytes=received_bytes,
        running_sum_seconds=fmean(map(sum, held)) * _seconds_per_byte(),
    )


def _seconds_per_byte(values: int = 2**20) -> float:
    """Measures the seconds per byte of an upload that a running mean takes on this machine, on one tensor."""
    mean, tensors = WeightedMean(), {"x": torch.ones(values)}
    mean.add(tensors, 1.0)
    started = time.perf_counter()
    mean.add(tensors, 1.0)
    return (time.perf_counter() - started) / (4 * values)
