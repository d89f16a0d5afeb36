"""Trivial: for every budget a federation of its own, in which all clients train that budget's LoRA rank.

The baseline "trivial" of K. Le, T. Tran, T. Hua, N. V. Chawla, "FLAME: Towards Federated Fine-Tuning
Large Language Models Through Adaptive SMoE", Section 3.2, which "simply employs a globally small
LoRA rank for all experts"; each federation is FedIT (J. Zhang et al., ICASSP 2024).

The algorithm, in our words, for the budgets b with the ranks r_b:
    1  server: for each b: start LoRA of rank r_b (A^b random, B^b = 0)
    2  each round, for the sampled clients i, whatever their own budget:
    3      client: for each b, as if the others did not exist:
    4          A, B = A^b, B^b; minimise the mean loss over its response tokens, all experts active
    5          server: A^b = sum_i n_i A_i / sum_i n_i, and B^b alike            (FLAME Eq. 3-4)

Symbols: b `budget.name`, r_b `budget.rank`, alpha `alpha`, s = alpha / r_b, n_i `client.examples`.

Readings and deviations (docs/methods/trivial.md):
    - The federations of all budgets are one run: a table has one score per budget, and the run's costs
      are those of all of them together. A test holds each equal to a FedIT run of its rank.
    - They share the clients sampled in a round and the order of their examples, as runs with one seed do.
    - A client's FLOPs are counted at its own budget's rank for all its federations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.methods.common import ADAPTER, in_part, initial_adapter, mean_by_size
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.payload import Payload, with_part
from fedguild.server.aggregation import rank_axis
from fedguild.server.method import Deployment, Upload


class TrivialSettings(BaseModel):
    """The options of trivial."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; a budget's scale is alpha / its rank")
    targets: tuple[str, ...] = Field(
        ("attention", "router", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of LoRA on linear layers")


class Trivial:
    """One FedIT per budget; see the module's docstring."""

    name: ClassVar[str] = "trivial"
    title: ClassVar[str] = "Trivial: for every budget a federation of its own, all clients at its LoRA rank"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = TrivialSettings

    def __init__(self, settings: TrivialSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at the budget's rank; all of the model's experts stay active."""
        return self._plan(budget.rank)

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1: every trainable under its budget's name, `{budget}/{name}`."""
        tensors: dict[str, Tensor] = {}
        for name, budget in {budget.name: budget for budget in budgets}.items():
            tensors |= with_part(name, initial_adapter(model, self.plan(model, budget), rng))
        return Payload(tensors)

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 4: every budget's A^b, B^b."""
        return Payload(with_part(ADAPTER, state.tensors))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4, one budget after the other."""
        trained: list[dict[str, Tensor]] = [{} for _ in cohort.work]
        for budget, rank in ranks(cohort.work[0].download.part(ADAPTER)).items():
            with cohort.afresh([self._plan(rank)] * len(cohort.work)) as clients:
                for slot, work in enumerate(clients.work):
                    clients.load(slot, work.download.part(f"{ADAPTER}/{budget}"))
                for step in clients.steps():
                    nll = step.forward()
                    step.backward(nll)
                    step.apply()
                for slot, tensors in enumerate(trained):
                    tensors |= with_part(budget, clients.read(slot))
        return [Payload(with_part(ADAPTER, tensors)) for tensors in trained]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of what the client received."""
        return in_part(ADAPTER, {name: tuple(value.shape) for name, value in download.part(ADAPTER).items()})

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Line 5, of all budgets at once."""
        return mean_by_size(state, uploads)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the model of the budget's own federation."""
        return Deployment(self.plan(model, budget), state.part(budget.name))

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the model of the client's budget: a client keeps nothing of its own."""
        return self.deploy(state, model, client.budget)

    def _plan(self, rank: int) -> AdapterPlan:
        settings = self.settings
        return AdapterPlan(rank, settings.alpha / rank, settings.targets, dropout=settings.dropout)


def ranks(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns budget -> rank of the adapters `{budget}/{name}` of all budgets."""
    found = {}
    for name, value in tensors.items():
        axis = rank_axis(name)
        if axis is not None:
            found[name.partition("/")[0]] = value.shape[axis]
    return found
