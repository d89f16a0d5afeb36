"""FedAvg: federated averaging of gates, experts and LoRA.

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
    - Expert j of one client is averaged with expert j of the others, however they specialised; an expert that a client
      did not activate counts as the copy that it received. This is part of the method.
    - The pretrained model is frozen beneath: what trains in full is a change that starts at zero, and
      its mean is the mean of the weights.
    - The mean is over this round's clients (the paper's erratum reads Algorithm 1 so).
    - `personal` makes a client's own model the one that it trained in line 4, before line 5.
"""

from __future__ import annotations

from fedguild.client.budget import Budget
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.core.payload import Payload
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import RUNNING_MEAN, Facts, Method
from fedguild.server.settings import AveragingSettings, averaging_plan


class FedAvgSettings(AveragingSettings):
    """The options of FedAvg."""


class FedAvg(Method):
    """Federated averaging; see the module's docstring."""

    Settings = FedAvgSettings
    settings: FedAvgSettings
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
        return train(cohort, keep=self.settings.personal)
