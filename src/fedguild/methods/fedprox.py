"""FedProx: federated averaging in which every client is held near what it received.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in
Heterogeneous Networks", MLSys 2020.

The algorithm, in our words (Algorithm 2):
    1  server: start the trainables theta (A random, B = 0; no change of gates and experts)
    2  each round t, for the sampled clients i:
    3      client: theta = theta^t
    4      client: minimise nll(theta) + mu / 2 ||theta - theta^t||^2              (Eq. 2)
    5      server: theta^(t+1) = sum_i n_i theta_i / sum_i n_i

Symbols: mu `mu`, theta^t `received`, n_i `client.examples`.

Readings and deviations (docs/methods/fedprox.md):
    - The norm is squared, over all trainables of a client together, and over nothing that is frozen.
      With LoRA it is the distance of A and B, not of their product.
    - It counts once for an optimizer step, however many passes accumulate, before clipping.
    - Every client runs the same `training.epochs` or `steps`; the paper also lets slow ones do less.
    - The paper samples clients by size and averages them alike; here, as in the comparisons with
      FedProx, they are sampled alike and averaged by size.
    - mu = 0 is FedAvg, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor

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
from fedguild.model.adapters.storage import SlotTensor
from fedguild.model.plan import AdapterPlan, ModelInfo, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.method import Deployment, State, Upload


class FedProxSettings(AveragingSettings):
    """The options of FedProx."""

    mu: float = Field(0.01, ge=0, description="mu of Eq. 2, the weight of the distance; 0 is FedAvg")


class FedProx:
    """Federated averaging with a proximal term; see the module's docstring."""

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx: federated averaging, each client held near what it received"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FedProxSettings

    def __init__(self, settings: FedProxSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns the same plan for every budget."""
        return averaging_plan(model, self.settings)

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> State:
        """Line 1."""
        return State(initial_adapter(model, self.plan(model, budgets[0]), rng))

    def download(self, state: State, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: theta^t."""
        return Payload(with_part(ADAPTER, state.tensors))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, work.download.part(ADAPTER))
        received = {name: tensor.stored.detach().clone() for name, tensor in cohort.trainables.items()}
        for step in cohort.steps():
            loss = step.forward()
            if step.is_update and self.settings.mu > 0:
                loss = loss + self.settings.mu / 2 * squared_distance(cohort.trainables, received)  # Eq. 2
            step.backward(loss)
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


def squared_distance(trainables: Mapping[str, SlotTensor], received: Mapping[str, Tensor]) -> Tensor:
    """Returns [S], each client's ||theta - theta^t||^2 over all its trainables, with gradients.

    Args:
        trainables: Name -> storage of all slots; what lies beyond a slot's own rank is zero on both sides.
        received: Name -> the storage as it was when the round began.
    """
    moved = {name: tensor.stored - received[name] for name, tensor in trainables.items()}
    squares = [moved[name].square().movedim(tensor.axis, 0) for name, tensor in trainables.items()]
    return torch.stack([square.reshape(len(square), -1).sum(1) for square in squares]).sum(0)
