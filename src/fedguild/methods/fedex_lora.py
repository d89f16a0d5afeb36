"""FedEx-LoRA: averaged LoRA factors, and what the average of the products has beyond them in the backbone.

R. Singhal, K. Ponkshe, P. Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient
Fine-Tuning of Foundation Models", ACL 2025.

The algorithm, in our words:
    1  server: start LoRA of rank r (A random, B = 0)
    2  each round, for the sampled clients c:
    3      client: load the global A, B on the backbone W_t
    4      client: minimise the mean loss over its response tokens
    5      server: A = sum_c w_c A_c,  B = sum_c w_c B_c,  sum_c w_c = 1              (as FedIT)
    6      server: Delta W_res = sum_c w_c B_c A_c - B A
    7      everybody: W_(t+1) = W_t + s Delta W_res, so that W_(t+1) + s B A is the exact average

Symbols: r `rank`, s `scale`, w_c `weights` (1 / n, or |D_i| / sum |D|), Delta W_res `residual`.

Readings and deviations (docs/methods/fedex-lora.md):
    - The residual travels as factors. As sum_c w_c (A_c - A) = 0, line 6 equals
      sum_(c<n) w_c (B_c - B_n)(A_c - A) over all clients but the last, n: its rank is (n - 1) r, where
      the paper's form has (n + 1) r, and it is exactly 0 where all clients agree.
    - One client alone leaves no residual, and nothing is merged.
    - A part of the backbone that no client changed (an expert that was never active) stays, bit by bit.
    - The released code transposes the residual, for GPT-2's Conv1D; on a square linear layer that adds
      another matrix. Not followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.methods.common import (
    ADAPTER,
    active_experts_of,
    collected,
    in_part,
    initial_adapter,
    size_shares,
    without,
)
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.aggregation import WeightedMean
from fedguild.server.low_rank import Factors, by_module, stack
from fedguild.server.merges import HOLDERS, appended, delivery, echo, merges, no_merges
from fedguild.server.method import Deployment, Upload


class FedExLoRASettings(BaseModel):
    """The options of FedEx-LoRA."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(20, ge=1, description="LoRA rank r, the same for every client")
    alpha: float = Field(16.0, gt=0, description="LoRA's alpha")
    scaling: Literal["rank", "root"] = Field(
        "rank", description="the scale s: alpha / rank, or alpha / sqrt(rank) (rsLoRA)"
    )
    targets: tuple[str, ...] = Field(
        ("attention", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of LoRA on linear layers")
    weights: Literal["uniform", "size"] = Field(
        "uniform", description="a client's weight in the average: the same for all, or its number of examples"
    )


class FedExLoRA:
    """Averaged LoRA with an exact residual; see the module's docstring.

    The state is the global A, B and the history of the residuals.
    """

    name: ClassVar[str] = "fedex-lora"
    title: ClassVar[str] = "FedEx-LoRA: averaged LoRA, its error merged into the backbone"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FedExLoRASettings

    def __init__(self, settings: FedExLoRASettings) -> None:
        self.settings = settings

    @property
    def scale(self) -> float:
        """The factor s on the product B A."""
        settings = self.settings
        return settings.alpha / (settings.rank if settings.scaling == "rank" else math.sqrt(settings.rank))

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA of the same rank for every budget, with the budget's active experts."""
        settings, active = self.settings, active_experts_of(model, budget)
        return AdapterPlan(settings.rank, self.scale, settings.targets, active, dropout=settings.dropout)

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1."""
        plans, unchanged = [self.plan(model, budget) for budget in budgets], no_merges()
        adapter = initial_adapter(model, plans[0], rng)
        return Payload({**unchanged.tensors, **with_part(ADAPTER, adapter)}, unchanged.scalars)

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: the global A and B, and the residuals that the client lacks."""
        sent = delivery(state, client)
        return Payload({**sent.tensors, **with_part(ADAPTER, state.part(ADAPTER))}, sent.scalars)

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, work.download.part(ADAPTER))
        for step in cohort.steps():
            nll = step.forward()
            step.backward(nll)
            step.apply()
        return [
            Payload(with_part(ADAPTER, cohort.read(slot)), echo(work.download)) for slot, work in enumerate(cohort.work)
        ]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of A_c and B_c."""
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 5 and 6; holds all uploads, as the residual needs the average first."""
        held = collected(uploads)
        shares = size_shares(held) if self.settings.weights == "size" else [1 / len(held) for _ in held]
        if not shares:
            return state
        average = WeightedMean()
        parts = [(upload.payload.part(ADAPTER), share) for upload, share in zip(held, shares, strict=True)]
        for tensors, share in parts:
            average.add(tensors, share)
        adapter = average.result(state.part(ADAPTER))
        merged = appended(state, residual(parts, adapter, self.scale), held)
        return Payload({**merged.tensors, **with_part(ADAPTER, adapter)}, merged.scalars)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the global A, B on the backbone with all residuals."""
        return Deployment(self.plan(model, budget), state.part(ADAPTER), merges(state))

    def excerpt(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns the state without who took part."""
        return without(state, HOLDERS)

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the global model: nothing is private."""
        return self.deploy(state, model, client.budget)


def residual(
    parts: Sequence[tuple[Mapping[str, Tensor], float]], average: Mapping[str, Tensor], scale: float
) -> dict[str, Factors]:
    """Returns module -> factors of s (sum_c w_c B_c A_c - B A) (line 6), of rank (n - 1) r; empty for one client.

    Args:
        parts: (A_c and B_c of every module, w_c) of n clients; the weights sum up to 1.
        average: A = sum_c w_c A_c and B of every module.
        scale: s, folded into the A side.
    """
    *others, (last, _) = [(by_module(tensors), weight) for tensors, weight in parts]
    if not others:
        return {}
    return {
        module: stack(
            (Factors(own[module].down - mean.down, own[module].up - last[module].up), scale * weight)
            for own, weight in others
        )
        for module, mean in by_module(average).items()
    }
