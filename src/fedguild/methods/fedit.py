"""FedIT: federated averaging of LoRA, or of LoRA with a rank by budget.

J. Zhang et al., "Towards Building the FederatedGPT: Federated Instruction Tuning", ICASSP 2024.

The algorithm, in our words:
    1  server: start LoRA (A random, B = 0)
    2  each round, for the sampled clients:
    3      client: load the global A, B
    4      client: minimise the mean loss over its response tokens
    5      server: A = sum_i w_i A_i / sum_i w_i, and B alike            (FLAME Eq. 3-4)

Symbols: w_i `weights` (|D_i| or 1), r `rank`, alpha `alpha`, s = alpha / r.

Deviations and additions:
    - Averaging A and B separately is not averaging their products; this is part of the method.
    - `rank_by_budget` gives each client its budget's rank: the first r_i ranks of the global A, B
      go down, and each rank is averaged over the clients that hold it. The scale stays by default that of the full
      rank, alpha / rank (`scale`), so that a rank has the same meaning for every client. It is the rank-compressed
      contrast to FLAME (the budgets of FLAME Table 1), without HetLoRA's pruning and sparsity weights.
    - `active_experts: budget` trains with the budget's active experts, as UB-SMoE's homogeneous setting does, in which
      all clients have the same budget (its Table 4). The rank-budget baselines leave all experts active.
    - `personal` is FedIT-FT, as FedAMoLE compares with it: a client's own model is its adapter after
      line 4, before line 5. There is no training beyond that, and the payloads are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.core.payload import ADAPTER, Payload
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.server.aggregation import truncate_rank
from fedguild.server.limits import require_within_rank, require_within_top_k
from fedguild.server.method import GLOBAL, RUNNING_MEAN, Deployment, Facts, Method, Own, Roster
from fedguild.server.settings import Rank, Scale, UnequalRanksSettings, Weights
from fedguild.server.terms import Terms, Upload, mean, mean_by_rank


class FedITSettings(UnequalRanksSettings):
    """The options of FedIT; without `rank_by_budget` the scale is alpha / rank, or the number that `scale` is."""

    rank: Rank = 20
    scale: Scale = "common"

    weights: Weights = "size"
    rank_by_budget: bool = Field(False, description="whether each client trains at its budget's rank")
    active_experts: Literal["model", "budget"] = Field(
        "model", description="experts that a client activates per token: as many as the model, or as its budget"
    )
    personal: bool = Field(
        False, description="FedIT-FT: whether a client's own model is its adapter as trained, before the average"
    )


class FedIT(Method):
    """Federated LoRA; see the module's docstring."""

    Settings = FedITSettings
    settings: FedITSettings
    facts = Facts(
        costs=RUNNING_MEAN,
        not_private="",  # its uploads are the received adapters, after plain training
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at the method's rank, or at the budget's, with the model's active experts or the budget's."""
        settings = self.settings
        rank = require_within_rank(budget, settings.rank) if settings.rank_by_budget else settings.rank
        active = require_within_top_k(model, budget) if settings.active_experts == "budget" else None
        return AdapterPlan((settings.lora_of(replace(budget, rank=rank)),), active)

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        plans = [self.plan(model, budget) for budget in roster.budgets]
        whole = plans[0].with_lora(rank=self.settings.rank)
        return Payload.of({ADAPTER: initial_adapter(model, whole, rng)})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: the global A, B at the client's rank."""
        return Payload.of({ADAPTER: self.deploy(state, model, client.budget).tensors})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        load_received(cohort)
        return train(cohort, keep=self.settings.personal)

    def terms(self, sent: Upload) -> Terms:
        """Line 5; with `rank_by_budget` each rank is a mean over its holders."""
        if not self.settings.rank_by_budget:
            return mean(ADAPTER, sent, self.settings.weights)
        return mean_by_rank(ADAPTER, sent, self.settings.rank, self.settings.weights)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the global A, B, at the budget's rank if ranks differ."""
        plan = self.plan(model, budget)
        return Deployment(plan, own.model.tensors or truncate_rank(state.part(ADAPTER), plan.lora.rank))
