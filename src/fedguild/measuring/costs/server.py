"""Costs of a round on the server: memory, received bytes, and the time of a running mean on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean

import torch

from fedguild.measuring.costs.traffic import Exchanges
from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import ServerCosts


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


def server_profile(entry: ServerCosts, traffic: Exchanges, participants: int) -> ServerProfile:
    """Returns the server's costs in a round of the counted exchanges."""
    sizes = [[sum(exchange.upload.values()) for exchange in exchanged] for exchanged in traffic.later]
    received_bytes = round(fmean(map(sum, sizes)))
    uploads_bytes = max(map(sum if entry.holds == "all" else max, sizes))
    return ServerProfile(
        entry,
        participants,
        state_bytes=traffic.state_bytes,
        memory_bytes=2 * traffic.state_bytes + uploads_bytes,
        received_bytes=received_bytes,
        running_sum_seconds=received_bytes * seconds_per_byte(),
    )


def seconds_per_byte(values: int = 2**20) -> float:
    """Measures the seconds per byte of an upload that a running mean takes on this machine, on one tensor."""
    mean, tensors = WeightedMean(), {"x": torch.ones(values)}
    mean.add(tensors, 1.0)
    started = time.perf_counter()
    mean.add(tensors, 1.0)
    return (time.perf_counter() - started) / (4 * values)
