"""Costs of a federated method for each tier of clients and for its server, from a model's config alone.

Parameters, FLOPs and bytes on the wire are counted. Memory is estimated (`memory`), and so is the server's time, from
the speed of a running sum on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedguild.client.budget import Budget, ClientInfo
from fedguild.measuring.costs.server import ServerProfile, server_profile
from fedguild.measuring.costs.tiers import TierProfile, Workload, tier_profile
from fedguild.measuring.costs.traffic import exchanges
from fedguild.model.info import ModelInfo
from fedguild.server.method import Method


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
        method, model, clients, budgets=budgets, participants=participants, wire_dtype=workload.wire_dtype
    )
    tiers = []
    for budget in budgets:
        count = sum(client.budget == budget for client in clients)
        if not count:
            continue
        trained = budgets if method.costs.trains == "every budget" else [budget]
        plans = [method.plan(model, each) for each in trained]
        tiers.append(tier_profile(model, budget, count, method.plan(model, budget), plans, traffic, workload))
    return Profile(method.name, model, workload, tiers, server_profile(method.costs, traffic, participants))
