"""FedAvg: federated averaging of gates, experts and LoRA, each by its index.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-Efficient Learning
of Deep Networks from Decentralized Data", AISTATS 2017. With gates and experts among what trains it
is the baseline of Fang et al., "Aggregation Alignment for Federated Learning with
Mixture-of-Experts under Data Heterogeneity" (FedAlign-MoE).

The algorithm, in our words (Algorithm 1):
    1  server: start the trainables theta (A random, B = 0; no change of gates and experts)
    2  each round, for the sampled clients i:
    3      client: theta_i = theta
    4      client: minimise the mean loss over its response tokens, E epochs in batches of B
    5      server: theta = sum_i n_i theta_i / sum_i n_i, tensor by tensor, expert by expert

Symbols: theta `trainables`, n_i `client.examples`; E, B and the learning rate are the run's `training`.

Readings and deviations (docs/methods/fedavg.md):
    - Expert j of one client is averaged with expert j of the others, whatever each has made of it; an
      expert that a client did not activate counts as the copy that it received. That is the method.
    - The pretrained model is frozen beneath: what trains in full is a change that starts at zero, and
      its mean is the mean of the weights.
    - The mean is over this round's clients (the paper's erratum reads Algorithm 1 so).
    - `personal` makes a client's own model the one that it trained in line 4, before line 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import BaseModel

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.methods.common import (
    ADAPTER,
    AveragingSettings,
    averaging_plan,
    in_part,
    initial_adapter,
    kept_or_global,
    mean_by_size,
)
from fedguild.model.plan import AdapterPlan, ModelInfo, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.method import Deployment, State, Upload


class FedAvgSettings(AveragingSettings):
    """The options of FedAvg."""


class FedAvg:
    """Federated averaging; see the module's docstring."""

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg: federated averaging of gates, experts and LoRA"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FedAvgSettings

    def __init__(self, settings: FedAvgSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns the same plan for every budget."""
        return averaging_plan(model, self.settings)

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> State:
        """Line 1."""
        return State(initial_adapter(model, self.plan(model, budgets[0]), rng))

    def download(self, state: State, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: theta."""
        return Payload(with_part(ADAPTER, state.tensors))

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
            for slot, own in enumerate(trained):
                cohort.keep(slot, own)
        return [Payload(with_part(ADAPTER, own)) for own in trained]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of theta_i."""
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def aggregate(self, state: State, uploads: Iterable[Upload]) -> State:
        """Line 5."""
        return mean_by_size(state, uploads)

    def deploy(self, state: State, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the global model."""
        return Deployment(self.plan(model, budget), state.tensors)

    def personalize(self, state: State, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the model that the client trained, where it keeps it, and the global one otherwise."""
        return kept_or_global(memory, self.deploy(state, model, client.budget))
