"""FLoRA: the clients' LoRA modules are stacked, not averaged, and the stack is merged into the backbone.

Z. Wang, Z. Shen, Y. He, G. Sun, H. Wang, L. Lyu, A. Li, "FLoRA: Federated Fine-Tuning Large Language
Models with Heterogeneous Low-Rank Adaptations", NeurIPS 2024.

The algorithm, in our words:
    1  each round, for the sampled clients c:
    2      client: a fresh LoRA of its own rank r_c (A_c random, B_c = 0) on the backbone W_t
    3      client: minimise the mean loss with s_c B_c A_c on every adapted layer
    4      server: stack A = [p_1 A_1; ..; p_n A_n] and B = [B_1, .., B_n], so that
               Delta W = B A = sum_c p_c B_c A_c, without a cross term
    5      server: send A and B to the clients; everybody merges W_(t+1) = W_t + s Delta W

Symbols: r_c `budget.rank`, s_c `scale_of`, p_c = n_c / sum n over the round's clients, [..; ..] `stack`.

Readings and deviations (docs/methods/flora.md):
    - p_c multiplies A_c only, as in the released code; both factors would give p_c squared. A client's
      scale s_c is folded into A_c too, so that ranks with scales of their own add up exactly.
    - A client draws its fresh A_c from a seed in its download, other for every client and round.
    - Merging adds all rounds' stacks to the original weights in fp32, which are then rounded once to the
      backbone's dtype. The whole history is the server's state; a client that took part in the round
      before gets the newest stack alone (docs/decisions/0007).
    - The global model is the merged backbone: every budget runs all of it, with no adapter beneath.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.merges import VERSION
from fedguild.methods.common import (
    ADAPTER,
    ADAPTER_SEED,
    collected,
    fresh_adapter,
    fresh_seed,
    in_part,
    new_seed,
    scaled_products,
    without,
    zero_adapter,
)
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.low_rank import weighted_product
from fedguild.server.merges import HOLDERS, appended, delivery, echo, merges, no_merges
from fedguild.server.method import Deployment, Upload


class FloraSettings(BaseModel):
    """The options of FLoRA."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; a client's scale is alpha / its budget's rank")
    scale: float | None = Field(
        None, gt=0, description="one scale for all ranks in place of alpha / rank; 2 is the paper's alpha = 2 rank"
    )
    targets: tuple[str, ...] = Field(
        ("attention", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of LoRA on linear layers")


class Flora:
    """Stacked LoRA of unequal ranks, merged every round; see the module's docstring.

    The state is the history of the stacks.
    """

    name: ClassVar[str] = "flora"
    title: ClassVar[str] = "FLoRA: LoRA with a rank by budget, stacked and merged into the backbone"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FloraSettings

    def __init__(self, settings: FloraSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at the budget's rank with its scale; all of the model's experts stay active."""
        settings = self.settings
        return AdapterPlan(budget.rank, self.scale_of(budget), settings.targets, dropout=settings.dropout)

    def scale_of(self, budget: Budget) -> float:
        """Returns s_c."""
        return self.settings.scale or self.settings.alpha / budget.rank

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """The backbone as published; Delta W is 0."""
        for budget in budgets:
            trainable_shapes(model, self.plan(model, budget))
        unchanged = no_merges()
        return Payload(unchanged.tensors, {**unchanged.scalars, ADAPTER_SEED: new_seed(rng)})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 5 of the rounds before, as far as the client lacks them, and the seed of line 2."""
        sent = delivery(state, client)
        seed = fresh_seed(int(state.scalars[ADAPTER_SEED]), int(state.scalars[VERSION]), client)
        return Payload(sent.tensors, {**sent.scalars, ADAPTER_SEED: seed})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 2 and 3."""
        model = cohort.model
        for slot, (work, plan) in enumerate(zip(cohort.work, model.plans, strict=True)):
            cohort.load(slot, fresh_adapter(model.backbone.info, plan, int(work.download.scalars[ADAPTER_SEED])))
        for step in cohort.steps():
            nll = step.forward()
            step.backward(nll)
            step.apply()
        return [
            Payload(with_part(ADAPTER, cohort.read(slot)), echo(work.download)) for slot, work in enumerate(cohort.work)
        ]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of A_c and B_c."""
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Line 4; holds all uploads, as the stack does."""
        held = collected(uploads)
        parts = scaled_products(held, self.scale_of)
        if not parts:
            return state
        merged = appended(state, dict(weighted_product(parts)), held)
        return Payload(merged.tensors, {**state.scalars, **merged.scalars})

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the merged backbone, whole for every budget, under an adapter of zeros."""
        plan = self.plan(model, budget)
        return Deployment(plan, zero_adapter(model, plan), merges(state))

    def excerpt(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns the state without who took part."""
        return without(state, HOLDERS)

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the global model: nothing is private."""
        return self.deploy(state, model, client.budget)
