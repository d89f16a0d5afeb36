"""FedProx: federated averaging with a proximal term that keeps each client near the received model.

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
    - The paper samples clients by size and averages them with equal weights; here, as in the comparisons with FedProx,
      they are sampled uniformly and averaged by size.
    - mu = 0 is FedAvg, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.core.payload import Payload
from fedguild.model.adapters.storage import SlotTensor
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import RUNNING_MEAN, Facts, Method
from fedguild.server.settings import AveragingSettings, averaging_plan


class FedProxSettings(AveragingSettings):
    """The options of FedProx."""

    mu: float = Field(0.01, ge=0, description="mu of Eq. 2, the weight of the distance; 0 is FedAvg")


class FedProx(Method):
    """Federated averaging with a proximal term; see the module's docstring."""

    Settings = FedProxSettings
    settings: FedProxSettings
    facts = Facts(
        costs=RUNNING_MEAN,
        not_private="",  # its uploads are the received adapters, after plain training
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns the same plan for every budget."""
        return averaging_plan(model, self.settings)

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        load_received(cohort)
        received = {name: tensor.stored.detach().clone() for name, tensor in cohort.trainables.items()}

        def penalty() -> Tensor:
            return self.settings.mu / 2 * squared_distance(cohort.trainables, received)  # Eq. 2

        return train(cohort, penalty if self.settings.mu > 0 else None, keep=self.settings.personal)


def squared_distance(trainables: Mapping[str, SlotTensor], received: Mapping[str, Tensor]) -> Tensor:
    """Returns [S], each client's ||theta - theta^t||^2 over all its trainables, with gradients.

    Args:
        trainables: Name -> storage of all slots; entries beyond a slot's own rank are zero on both sides.
        received: Name -> the storage as it was when the round began.
    """
    moved = {name: tensor.stored - received[name] for name, tensor in trainables.items()}
    squares = [moved[name].square().movedim(tensor.axis, 0) for name, tensor in trainables.items()]
    return torch.stack([square.reshape(len(square), -1).sum(1) for square in squares]).sum(0)
