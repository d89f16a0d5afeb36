"""RoLoRA: federated LoRA that trains and averages B and A in turn.

S. Chen, Y. Guo, Y. Ju, H. Dalal, Z. Zhu, A. Khisti, "Robust Federated Finetuning of LLMs via Alternating
Optimization of LoRA", NeurIPS 2025, arXiv 2502.01755.

The algorithm, in our words (Algorithm 1):
    1  server: start LoRA (A random, B = 0)
    2  each odd round t, for the sampled clients c:
    3      client: load the global A, B; minimise the mean loss over its response tokens in B_c alone
    4      server: B = sum_c w_c B_c / sum_c w_c
    5  each even round t, for the sampled clients c:
    6      client: load the global A, B; minimise the mean loss over its response tokens in A_c alone
    7      server: A = sum_c w_c A_c / sum_c w_c

The frozen factor is the same everywhere, so the average of the trained factor is the average of the updates: sum_c w_c
(B_c A) = (sum_c w_c B_c) A, and sum_c w_c (B A_c) = B (sum_c w_c A_c). B comes first, as the gradient of A is zero at B
= 0.

Symbols: t `round`, w_c `weights` (|D_c| or 1), r `rank`, alpha `alpha`, s = alpha / r, A `lora_A`, B `lora_B`.

Readings and deviations (docs/methods/rolora.md):
    - Only the factor that trained goes up; both go down in every round, so that a client that was absent
      needs nothing else.
    - The factor that does not train has neither gradient nor optimizer state. The plan has both, as it does
      not depend on the round; a client trains in separate slots for the round (`Cohort.afresh`).
    - t counts the rounds of the state and is sent in the download. An upload that arrives a round late has the other
      factor, trained against one that has changed since, and is ignored.
    - The paper averages uniformly (`weights=uniform`); by default clients weigh by size, as elsewhere.
    - Clients run with their budget's active experts; the rank is the same for all.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.model.adapters.lora import DOWN, UP
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes
from fedguild.model.targets import leaf
from fedguild.server.limits import active_experts_of
from fedguild.server.method import RUNNING_MEAN, Facts, Method, Roster
from fedguild.server.schema import Schema, entries
from fedguild.server.settings import DropoutLoraSettings, Weights
from fedguild.server.terms import Means, Terms, Upload, mean

ROUND = "round"
"""The scalar t of a state and of every download: the number of the next round, from 1."""


class RoLoRASettings(DropoutLoraSettings):
    """The options of RoLoRA; the LoRA rank is the same for every client."""

    weights: Weights = "size"


class RoLoRA(Method):
    """Federated LoRA by alternating optimization; see the module's docstring."""

    Settings = RoLoRASettings
    settings: RoLoRASettings
    facts = Facts(
        costs=replace(
            RUNNING_MEAN,
            period=2,
            note="Parameters, FLOPs and memory are those of training A and B together: an upper bound.",
        ),
        not_private="",  # its uploads are the received adapters, after plain training
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA of the same rank for every budget, with the budget's active experts and both factors.

        The slots beside it train, one of the factors frozen; the plan is that of the larger factor.
        """
        plan = AdapterPlan((self.settings.lora,), active_experts_of(model, budget))

        def size(training: AdapterPlan) -> int:
            return sum(map(prod, trainable_shapes(model, training).values()))

        return replace(plan, beside=max((plan_of(1, plan), plan_of(2, plan)), key=size))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        return Payload.of({ADAPTER: initial_adapter(model, self.plan(model, roster.budgets[0]), rng)}, {ROUND: 1})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Lines 3 and 6: the global A and B, and t."""
        return state

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Line 3 or line 6."""
        pairs = zip(cohort.model.plans, cohort.work, strict=True)
        with cohort.afresh([plan_of(int(work.download.scalars[ROUND]), plan) for plan, work in pairs]) as clients:
            load_received(clients)
            return train(clients)

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the names and shapes of the factor that trains in the round."""
        plan, round_index = self.plan(model, client.budget), round_index or int(download.scalars[ROUND])
        return Schema(entries(ADAPTER, trainable_shapes(model, plan_of(round_index, plan))))

    def terms(self, sent: Upload) -> Terms:
        """Line 4 or line 7."""
        return mean(ADAPTER, sent, self.settings.weights)

    def update(self, state: Payload, means: Means) -> Payload:
        """Line 4 or line 7; the other factor stays, and late uploads, which have it, are ignored."""
        trained = trained_factor(int(state.scalars[ROUND]))
        before = {name: value for name, value in state.part(ADAPTER).items() if leaf(name) == trained}
        moved = with_part(ADAPTER, means.moved(ADAPTER, before))
        return Payload({**state.tensors, **moved}, {ROUND: int(state.scalars[ROUND]) + 1})


def trained_factor(round_index: int) -> str:
    """Returns the factor that trains in a round: `lora_B` in odd rounds, else `lora_A`."""
    return UP if round_index % 2 else DOWN


def plan_of(round_index: int, plan: AdapterPlan) -> AdapterPlan:
    """Returns the plan with the factor frozen that does not train in a round."""
    return plan.with_lora(frozen=(DOWN if trained_factor(round_index) == UP else UP,))
