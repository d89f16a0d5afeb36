"""Trivial: a separate federation for every budget, all clients at its LoRA rank.

The baseline "trivial" of K. Le, T. Tran, T. Hua, N. V. Chawla, "FLAME: Towards Federated Fine-Tuning
Large Language Models Through Adaptive SMoE", Section 3.2, which "simply employs a globally small
LoRA rank for all experts"; each federation is FedIT (J. Zhang et al., ICASSP 2024).

The algorithm, in our words, for the budgets b with the ranks r_b:
    1  server: for each b: start LoRA of rank r_b (A^b random, B^b = 0)
    2  each round, for the sampled clients i, whatever their own budget:
    3      client: for each b, as if the others did not exist:
    4          A, B = A^b, B^b; minimise the mean loss over its response tokens, all experts active
    5          server: A^b = sum_i n_i A_i / sum_i n_i, and B^b alike            (FLAME Eq. 3-4)

Symbols: b `budget.name`, r_b `budget.rank`, alpha `alpha`, s = alpha / r_b unless `scale` says otherwise,
n_i `client.examples`.

Readings and deviations (docs/methods/trivial.md):
    - The federations of all budgets are one run: a table has one score per budget, and the run's costs
      are those of all of them together. A test checks that each equals a FedIT run of its rank.
    - They share the clients sampled in a round and the order of their examples, as runs with one seed do.
    - A client's FLOPs are counted at its own budget's rank for all its federations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import train
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.server.aggregation import rank_axis
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, NotPrivate, Own, Roster, ServerCosts
from fedguild.server.schema import Schema, entries
from fedguild.server.settings import AnyRanksSettings, Targets


class TrivialSettings(AnyRanksSettings):
    """The options of trivial."""

    targets: Targets = ("attention", "router", "experts")


class Trivial(Method):
    """One FedIT per budget; see the module's docstring.

    The state's adapter holds every trainable under its budget's name, `{budget}/{name}`.
    """

    Settings = TrivialSettings
    settings: TrivialSettings
    facts = Facts(
        costs=ServerCosts(
            "O(n), whatever C is: a running mean for every budget",
            "O(C n)",
            trains="every budget",
            note="Every client takes part in the federation of every budget: FLOPs and bytes of a round are their sum.",
        ),
        not_private=NotPrivate(example="trains once for every budget in a round"),
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at the budget's rank; all of the model's experts stay active."""
        plan = AdapterPlan((self.settings.lora_of(budget),))
        return replace(plan, beside=plan)  # the slots that train, for one budget at a time

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        tensors: dict[str, Tensor] = {}
        for name, budget in {budget.name: budget for budget in roster.budgets}.items():
            tensors |= with_part(name, initial_adapter(model, self.plan(model, budget), rng))
        return Payload.of({ADAPTER: tensors})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4, one budget after the other."""
        trained: list[dict[str, Tensor]] = [{} for _ in cohort.work]
        for budget, rank in ranks(cohort.work[0].download.part(ADAPTER)).items():
            plan = self.plan(cohort.model.backbone.info, Budget(budget, 0, rank))
            with cohort.afresh([plan] * len(cohort.work)) as clients:
                for slot, work in enumerate(clients.work):
                    clients.load(slot, work.download.part(f"{ADAPTER}/{budget}"))
                for tensors, upload in zip(trained, train(clients), strict=True):
                    tensors |= with_part(budget, upload.part(ADAPTER))
        for slot, (work, tensors) in enumerate(zip(cohort.work, trained, strict=True)):
            cohort.leave(slot, Payload(tensors).part(work.client.budget.name))
        return [Payload.of({ADAPTER: tensors}) for tensors in trained]

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the names and shapes of the tensors that the client received."""
        return Schema(entries(ADAPTER, {name: tuple(value.shape) for name, value in download.part(ADAPTER).items()}))

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the model of the budget's own federation."""
        return Deployment(self.plan(model, budget), state.part(f"{ADAPTER}/{budget.name}"))


def ranks(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns budget -> rank of the adapters `{budget}/{name}` of all budgets."""
    by_budget = {}
    for name, value in tensors.items():
        axis = rank_axis(name)
        if axis is not None:
            by_budget[name.partition("/")[0]] = value.shape[axis]
    return by_budget
