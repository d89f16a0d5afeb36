"""FedIT: federated averaging of LoRA, with one rank for all clients or a rank by budget.

J. Zhang et al., "Towards Building the FederatedGPT: Federated Instruction Tuning", ICASSP 2024.

The algorithm, in our words:
    1  server: start LoRA (A random, B = 0)
    2  each round, for the sampled clients:
    3      client: load the global A, B
    4      client: minimise the mean loss over its response tokens
    5      server: A = sum_i w_i A_i / sum_i w_i, and B alike            (FLAME Eq. 3-4)

Symbols: w_i `weights` (|D_i| or 1), r `rank`, alpha `alpha`, s = alpha / r.

Deviations and additions:
    - Averaging A and B apart is not averaging their products; that is the method, not a slip.
    - `rank_by_budget` gives each client its budget's rank: the first r_i ranks of the global A, B
      go down, and each rank is averaged over the clients that hold it. The scale alpha / rank stays
      that of the full rank, so that a rank means the same for every client. It is the
      rank-compressed contrast to FLAME (the budgets of FLAME Table 1), without HetLoRA's pruning
      and sparsity weights.
    - `active_experts: budget` trains with the budget's active experts, as UB-SMoE's homogeneous setting does, in which
      all clients have the same budget (its Table 4). The rank-budget baselines leave all experts active.
    - `personal` is FedIT-FT, as FedAMoLE compares with it: a client's own model is its adapter after
      line 4, before line 5. There is no training beyond that; what travels is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.methods.common import ADAPTER, in_part, initial_adapter, require_within_rank, require_within_top_k
from fedguild.model.plan import AdapterPlan, ModelInfo, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.aggregation import WeightedMean, pad_rank, truncate_rank
from fedguild.server.method import Deployment, State, Upload


class FedITSettings(BaseModel):
    """The options of FedIT."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(20, ge=1, description="LoRA rank r of the global adapter")
    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; the scale is alpha / rank")
    targets: tuple[str, ...] = Field(
        ("attention", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of LoRA on linear layers")
    weights: Literal["size", "uniform"] = Field(
        "size", description="a client's weight in the average: its number of examples, or the same for all"
    )
    rank_by_budget: bool = Field(False, description="whether each client trains at its budget's rank")
    active_experts: Literal["model", "budget"] = Field(
        "model", description="experts that a client activates per token: as many as the model, or as its budget"
    )
    personal: bool = Field(
        False, description="FedIT-FT: whether a client's own model is its adapter as it trained it, before the average"
    )


class FedIT:
    """Federated LoRA; see the module's docstring."""

    name: ClassVar[str] = "fedit"
    title: ClassVar[str] = "FedIT: federated averaging of LoRA, or of LoRA with a rank by budget"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FedITSettings

    def __init__(self, settings: FedITSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at the method's rank, or at the budget's, with the model's active experts or the budget's."""
        settings = self.settings
        return AdapterPlan(
            rank=require_within_rank(budget, settings.rank) if settings.rank_by_budget else settings.rank,
            scale=settings.alpha / settings.rank,
            targets=settings.targets,
            active_experts=require_within_top_k(model, budget) if settings.active_experts == "budget" else None,
            dropout=settings.dropout,
        )

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> State:
        """Line 1."""
        for budget in budgets:
            self.plan(model, budget)
        return State(initial_adapter(model, self._full_plan(), rng))

    def download(self, state: State, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: the global A, B at the client's rank."""
        return Payload(with_part(ADAPTER, self.deploy(state, model, client.budget).tensors))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, work.download.part(ADAPTER))
        for step in cohort.steps():
            nll = step.forward()
            step.backward(nll)
            step.apply()
        trained = [cohort.read(slot) for slot in range(len(cohort.work))]
        if self.settings.personal:
            for slot, adapter in enumerate(trained):
                cohort.keep(slot, adapter)
        return [Payload(with_part(ADAPTER, adapter)) for adapter in trained]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of the client's A and B."""
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def aggregate(self, state: State, uploads: Iterable[Upload]) -> State:
        """Line 5; a rank that nobody trained keeps its global value."""
        mean = WeightedMean()
        for upload in uploads:
            weight = float(upload.client.examples) if self.settings.weights == "size" else 1.0
            padded, held = pad_rank(upload.payload.part(ADAPTER), self.settings.rank)
            mean.add(padded, {name: weight * held[name] for name in padded})
        return State(mean.result(state.tensors))

    def deploy(self, state: State, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the global A, B, at the budget's rank where ranks differ."""
        plan = self.plan(model, budget)
        return Deployment(plan, truncate_rank(state.tensors, plan.rank))

    def personalize(self, state: State, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the adapter that the client kept, and the global one where it kept none."""
        if memory.tensors:
            return Deployment(self.plan(model, client.budget), memory.tensors)
        return self.deploy(state, model, client.budget)

    def _full_plan(self) -> AdapterPlan:
        settings = self.settings
        return AdapterPlan(rank=settings.rank, scale=settings.alpha / settings.rank, targets=settings.targets)
