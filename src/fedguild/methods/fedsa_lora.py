"""FedSA-LoRA: federated LoRA that shares A, while every client keeps its own B.

P. Guo, S. Zeng, Y. Wang, H. Fan, F. Wang, L. Qu, "Selective Aggregation for Low-Rank Adaptation in
Federated Learning", ICLR 2025, arXiv 2410.01463.

The algorithm, in our words:
    1  server: draw one A for all; every client c: B_c = 0
    2  each round, for the sampled clients c:
    3      client: load the global A and its own B_c
    4      client: minimise the mean loss over its response tokens in A_c and B_c
    5      client: keep B_c, send A_c
    6      server: A = sum_c w_c A_c / sum_c w_c
    7  a client's model: the global A and its own B_c

Symbols: w_c `weights` (|D_c| or 1), r `rank`, alpha `alpha`, s = alpha / r, A `lora_A`, B `lora_B`.

Readings and deviations (docs/methods/fedsa-lora.md):
    - There is no global model: A with B = 0 changes nothing, and each B belongs to a single client. A client that never
      took part has B = 0, the model as it was published.
    - The optimizer starts anew in every round, for B too, as everywhere else.
    - Clients run with their budget's active experts; the rank is the same for all.
    - The variants FedSA-rsLoRA and FedSA-VeRA are not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import train
from fedguild.core.payload import ADAPTER, Payload
from fedguild.model.adapters.lora import DOWN, UP
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes, zero_adapter
from fedguild.model.targets import leaf
from fedguild.server.limits import active_experts_of
from fedguild.server.method import GLOBAL, RUNNING_MEAN, Deployment, Facts, Method, Own, Roster
from fedguild.server.schema import Schema, entries
from fedguild.server.settings import DropoutLoraSettings, Rank, Weights
from fedguild.server.terms import Terms, Upload, mean


class FedSALoRASettings(DropoutLoraSettings):
    """The options of FedSA-LoRA; the LoRA rank is the same for every client."""

    rank: Rank = 8
    weights: Weights = "size"


class FedSALoRA(Method):
    """Federated LoRA with a shared A and personal B; see the module's docstring.

    The state's adapter is A, a client's memory its B.
    """

    Settings = FedSALoRASettings
    settings: FedSALoRASettings
    facts = Facts(
        costs=RUNNING_MEAN,
        not_private="",  # its uploads are the received adapters, after plain training
        has_global_model=False,
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA of the same rank for every budget, with the budget's active experts."""
        return AdapterPlan((self.settings.lora,), active_experts_of(model, budget))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        return Payload.of({ADAPTER: factors(initial_adapter(model, self.plan(model, roster.budgets[0]), rng), DOWN)})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 5."""
        for slot, (work, plan) in enumerate(zip(cohort.work, cohort.model.plans, strict=True)):
            cohort.load(slot, own_adapter(cohort.model.backbone.info, plan, work.download, work.memory))
        trained = [upload.part(ADAPTER) for upload in train(cohort)]
        for slot, tensors in enumerate(trained):
            cohort.keep(slot, factors(tensors, UP))
        return [Payload.of({ADAPTER: factors(tensors, DOWN)}) for tensors in trained]

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the A factors that are sent."""
        return Schema(entries(ADAPTER, self._sent(model, client.budget)))

    def terms(self, sent: Upload) -> Terms:
        """Line 6."""
        return mean(ADAPTER, sent, self.settings.weights)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment | None:
        """Line 7; B = 0 for a client that never took part. There is no global model."""
        if own is GLOBAL:
            return None
        plan = self.plan(model, budget)
        return Deployment(plan, own_adapter(model, plan, state, own.kept))

    def _sent(self, model: ModelInfo, budget: Budget) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes of A."""
        return trainable_shapes(model, self.plan(model, budget).with_lora(frozen=(UP,)))


def own_adapter(model: ModelInfo, plan: AdapterPlan, shared: Payload, memory: Payload) -> dict[str, Tensor]:
    """Returns a client's adapter: the shared A, and the B that it kept or, if it kept none, 0."""
    return {**zero_adapter(model, plan), **memory.tensors, **shared.part(ADAPTER)}


def factors(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Returns the tensors of one kind of factor, `lora_A` or `lora_B`."""
    return {name: value for name, value in tensors.items() if leaf(name) == kind}
