"""FFA-LoRA: LoRA whose A is drawn once, shared and never trained, so that averaging B is exact.

Y. Sun, Z. Li, Y. Li, B. Ding, "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.

The algorithm, in our words:
    1  server: draw one A for all; B = 0
    2  each round, for the sampled clients:
    3      client: load the global B; A is the shared one
    4      client: minimise the mean loss over its response tokens in B alone
    5      server: B = sum_c w_c B_c / sum_c w_c

With A the same everywhere, sum_c w_c (B_c A) = (sum_c w_c B_c) A: the average of the factors is the
average of the updates, which it is not where A trains too.

Symbols: w_c `weights` (|D_c| or 1), r `rank`, alpha `alpha`, s = alpha / r, A `lora_A`, B `lora_B`.

Readings and deviations (docs/methods/ffa-lora.md):
    - A never travels. The download has the number that seeds it, and a client draws from torch's CPU
      generator, one for each module, what the server draws.
    - A is Kaiming-uniform and B zero, as LoRA starts anywhere else, so the model starts as it was published.
    - Clients run with their budget's active experts; the rank is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.methods.common import ADAPTER, active_experts_of, in_part, new_seed
from fedguild.model.adapters.lora import kaiming_uniform
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, adapter_shapes, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.seeding import torch_rng
from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import Deployment, Upload

SEED = "seed"
"""The scalar that A is drawn from, in the state and in every download."""


class FFALoRASettings(BaseModel):
    """The options of FFA-LoRA."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(20, ge=1, description="LoRA rank r, the same for every client")
    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; the scale is alpha / rank")
    targets: tuple[str, ...] = Field(
        ("attention", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of LoRA on linear layers")
    weights: Literal["size", "uniform"] = Field(
        "size", description="a client's weight in the average: its number of examples, or the same for all"
    )


class FFALoRA:
    """Federated LoRA with a shared, frozen A; see the module's docstring."""

    name: ClassVar[str] = "ffa-lora"
    title: ClassVar[str] = "FFA-LoRA: federated LoRA with one random A that never trains"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FFALoRASettings

    def __init__(self, settings: FFALoRASettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA whose A is frozen, with the budget's active experts."""
        return AdapterPlan(
            rank=self.settings.rank,
            scale=self.settings.alpha / self.settings.rank,
            targets=self.settings.targets,
            active_experts=active_experts_of(model, budget),
            dropout=self.settings.dropout,
            frozen=("lora_A",),
        )

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1."""
        plans = [self.plan(model, budget) for budget in budgets]
        zeros = {name: torch.zeros(shape) for name, shape in trainable_shapes(model, plans[0]).items()}
        return Payload(zeros, {SEED: new_seed(rng)})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: the global B, and what A is drawn from."""
        return Payload(with_part(ADAPTER, state.tensors), {SEED: state.scalars[SEED]})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        first = cohort.work[0].download
        shared = shared_factors(cohort.model.backbone.info, cohort.model.plans[0], int(first.scalars[SEED]))
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, {**shared, **work.download.part(ADAPTER)})
        for step in cohort.steps():
            nll = step.forward()
            step.backward(nll)
            step.apply()
        return [Payload(with_part(ADAPTER, cohort.read(slot))) for slot in range(len(cohort.work))]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of every B."""
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Line 5."""
        mean = WeightedMean()
        for upload in uploads:
            weight = float(upload.client.examples) if self.settings.weights == "size" else 1.0
            mean.add(upload.payload.part(ADAPTER), weight)
        return Payload(mean.result(state.tensors), state.scalars)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the shared A and the global B."""
        plan = self.plan(model, budget)
        return Deployment(plan, {**shared_factors(model, plan, int(state.scalars[SEED])), **state.tensors})

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the global model: a client keeps nothing of its own."""
        return self.deploy(state, model, client.budget)


def shared_factors(model: ModelInfo, plan: AdapterPlan, seed: int) -> dict[str, Tensor]:
    """Returns every A of the plan, the same bits for the same seed: uniform in ±1/√in.

    Each is drawn from a generator of its own, so none depends on what else is adapted.
    """
    return {
        name: kaiming_uniform(shape, torch_rng(seed, "shared A", name))
        for name, shape in adapter_shapes(model, plan).items()
        if name.endswith("lora_A")
    }
