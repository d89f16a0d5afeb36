"""Figures of a round of FedAMoLE: the preferences of the experts, and the clients that hold and keep them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedguild.methods.fedamole.pool import Pool
from fedguild.server.method import Observation


def observations(pool: Pool, probability: Tensor, modules: Sequence[str]) -> Sequence[Observation]:
    """Returns P of the last module (Figure 8), experts per client, the share kept, client 0's (Table 6), and the drift.

    Args:
        pool: After the round.
        probability: P [modules, C, E], the modules in the pool's order.
        modules: The modules in the model's order.
    """
    last = modules[-1]
    clients = [f"client {index}" for index in range(pool.clients)]
    experts = [f"expert {index}" for index in range(pool.size)]
    chosen = probability[pool.modules.index(last)].T
    counts = torch.stack([pool.assigned[module].sum(dim=1) for module in modules])
    kept = torch.stack([pool.assigned[module] & pool.before[module] for module in modules])
    traced = pool.before[last][:1].float()
    drift = [pool.drift[module] for module in modules if module in pool.drift]
    return (
        Observation(f"selection probability, {last}", chosen, experts, clients),
        Observation("experts held in the next round", counts, modules, clients, unit="experts"),
        Observation("assignment kept", kept.sum(dim=(1, 2)) / counts.sum(dim=1), modules),
        Observation(f"experts of client 0, {last}", traced, clients[:1], experts),
        *([Observation("router drift", torch.stack(drift), modules)] if drift else []),
    )
