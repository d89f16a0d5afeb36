"""FFA-LoRA: federated LoRA with one random A that never trains.

Y. Sun, Z. Li, Y. Li, B. Ding, "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.

The algorithm, in our words:
    1  server: draw one A for all; B = 0
    2  each round, for the sampled clients:
    3      client: load the global B; A is the shared one
    4      client: minimise the mean loss over its response tokens in B alone
    5      server: B = sum_c w_c B_c / sum_c w_c

With A the same everywhere, sum_c w_c (B_c A) = (sum_c w_c B_c) A: the average of the factors is the average of the
updates, which is not the case if A trains too.

Symbols: w_c `weights` (|D_c| or 1), r `rank`, alpha `alpha`, s = alpha / r, A `lora_A`, B `lora_B`.

Readings and deviations (docs/methods/ffa-lora.md):
    - A is never sent. The download has its seed, and a client draws the same A as the server from torch's CPU
      generator, one for each module.
    - A is Kaiming-uniform and B zero, as LoRA starts anywhere else, so the model starts as it was published.
    - Clients run with their budget's active experts; the rank is the same for all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.core.payload import ADAPTER, Payload
from fedguild.core.seeding import new_seed, torch_rng
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, adapter_shapes, trainable_shapes
from fedguild.server.limits import active_experts_of
from fedguild.server.method import GLOBAL, RUNNING_MEAN, Deployment, Facts, Method, Own, Roster
from fedguild.server.settings import DropoutLoraSettings, Weights
from fedguild.server.terms import Terms, Upload, mean

SEED = "seed"
"""The seed of A, a scalar in the state and in every download."""


class FFALoRASettings(DropoutLoraSettings):
    """The options of FFA-LoRA; the LoRA rank is the same for every client."""

    weights: Weights = "size"


class FFALoRA(Method):
    """Federated LoRA with a shared, frozen A; see the module's docstring."""

    Settings = FFALoRASettings
    settings: FFALoRASettings
    facts = Facts(
        costs=RUNNING_MEAN,
        not_private="",  # its uploads are the received adapters, after plain training
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA whose A is frozen, with the budget's active experts."""
        return AdapterPlan((replace(self.settings.lora, frozen=("lora_A",)),), active_experts_of(model, budget))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        shapes = trainable_shapes(model, self.plan(model, roster.budgets[0]))
        zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
        return Payload.of({ADAPTER: zeros}, {SEED: new_seed(rng)})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: the global B, and the seed of A."""
        return state

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        seed = int(cohort.work[0].download.scalars[SEED])
        shared = shared_factors(cohort.model.backbone.info, cohort.model.plans[0], seed)
        for slot in range(len(cohort.work)):
            cohort.load(slot, shared)
        load_received(cohort)
        return train(cohort)

    def terms(self, sent: Upload) -> Terms:
        """Line 5."""
        return mean(ADAPTER, sent, self.settings.weights)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the shared A and the global B."""
        plan = self.plan(model, budget)
        shared = shared_factors(model, plan, int(state.scalars[SEED]))
        return Deployment(plan, {**shared, **state.part(ADAPTER)})


def shared_factors(model: ModelInfo, plan: AdapterPlan, seed: int) -> dict[str, Tensor]:
    """Returns every A of the plan as LoRA draws it, the same bits for the same seed.

    Each is drawn from its own generator, so none depends on the other adapted modules.
    """
    return {
        name: plan.lora.initial(name, shape, torch_rng(seed, "shared A", name))
        for name, shape in adapter_shapes(model, plan).items()
        if name.endswith("lora_A")
    }
