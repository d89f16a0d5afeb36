"""Fresh adapters: a new LoRA every round, drawn by the client from a seed in its download (FLoRA, FLoRIST)."""

from __future__ import annotations

from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.core.seeding import derive, torch_rng
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter

ADAPTER_SEED = "adapter_seed"
"""The scalar from which clients draw fresh adapters: the run's own in the state, a client's in its download."""


def fresh_seed(seed: int, count: int, client: ClientInfo) -> int:
    """Returns the seed of a client's fresh adapter; `count` distinguishes the rounds."""
    return derive(seed, "fresh adapter", count, client.index)


def fresh_adapter(model: ModelInfo, plan: AdapterPlan, seed: int) -> dict[str, Tensor]:
    return initial_adapter(model, plan, torch_rng(seed, "adapter"))
