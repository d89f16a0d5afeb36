"""FlexLoRA: the clients' products are averaged, and every client gets its rank of their singular value decomposition.

J. Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", NeurIPS 2024.

The algorithm, in our words:
    1  server: start LoRA of the highest rank r (A random, B = 0)
    2  each round, for the sampled clients c:
    3      server: send A_c = A[:r_c], B_c = B[:, :r_c]; after the first round these are
               B_c = U[:, :r_c] S[:r_c] r_c / alpha,  A_c = V^T[:r_c]
    4      client: minimise the mean loss with (alpha / r_c) B_c A_c on every adapted layer
    5      server: Delta W = sum_c p_c (alpha / r_c) B_c A_c
    6      server: U S V^T = Delta W, the singular value decomposition, up to rank r

Symbols: r_c `budget.rank`, r `rank`, alpha `alpha`, p_c = n_c / sum n over the round's clients,
Delta W `weighted_product`, U S V^T `decompose`.

Readings and deviations (docs/methods/flexlora.md):
    - Delta W is never formed. Its rank is at most sum r_c, so QR of the clients' stacked factors and
      the decomposition of a small matrix give the same U, S, V. Each expert is decomposed apart.
    - The state holds U S and V^T up to rank r: truncations of a singular value decomposition are
      nested, so that every budget's is a slice of it. The sign of a pair of singular vectors is fixed.
    - Every client's scale is alpha / r_c of its own rank; it is folded into Delta W and undone for
      the next client. (The released code never calls the helper that changes the ranks.)
    - Where the clients' ranks together are below r, the rows that are left are A from before made
      orthogonal to the others, with B = 0; a null-space vector of the whole Delta W would do as well.
    - If no client of the round has an example, the global model stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch.nn.functional import pad

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.methods.common import ADAPTER, collected, in_part, initial_adapter, require_within_rank, scaled_products
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.aggregation import truncate_rank
from fedguild.server.low_rank import Factors, by_module, decompose, named, stack, truncate, weighted_product
from fedguild.server.method import Deployment, Upload


class FlexLoRASettings(BaseModel):
    """The options of FlexLoRA."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(20, ge=1, description="highest LoRA rank r that the server keeps; a client trains its budget's")
    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; a client's scale is alpha / its rank")
    targets: tuple[str, ...] = Field(
        ("attention", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of LoRA on linear layers")


class FlexLoRA:
    """LoRA of unequal ranks, averaged as products; see the module's docstring.

    The state is A and B of rank r with Delta W = B A, the scale in B.
    """

    name: ClassVar[str] = "flexlora"
    title: ClassVar[str] = "FlexLoRA: LoRA with a rank by budget, averaged as products and cut by their SVD"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FlexLoRASettings

    def __init__(self, settings: FlexLoRASettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at the budget's rank with the scale alpha / r_c; all of the model's experts stay active."""
        rank, settings = require_within_rank(budget, self.settings.rank), self.settings
        return AdapterPlan(rank, self.scale_of(budget), settings.targets, dropout=settings.dropout)

    def scale_of(self, budget: Budget) -> float:
        """Returns alpha / r_c."""
        return self.settings.alpha / budget.rank

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1; Delta W is 0."""
        for budget in budgets:
            self.plan(model, budget)
        settings = self.settings
        return Payload(initial_adapter(model, AdapterPlan(settings.rank, 1.0, settings.targets), rng))

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3."""
        return Payload(with_part(ADAPTER, self.deploy(state, model, client.budget).tensors))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Line 4."""
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, work.download.part(ADAPTER))
        for step in cohort.steps():
            nll = step.forward()
            step.backward(nll)
            step.apply()
        return [Payload(with_part(ADAPTER, cohort.read(slot))) for slot in range(len(cohort.work))]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of A_c and B_c."""
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 5 and 6, the clients in their order; holds all uploads, but one module's sum at a time."""
        parts = scaled_products(collected(uploads), self.scale_of)
        if not parts:
            return state
        before = by_module(state.tensors)
        return Payload(named({module: self._leading(own, before[module]) for module, own in weighted_product(parts)}))

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the best approximation of Delta W at the budget's rank, in LoRA's scale."""
        plan = self.plan(model, budget)
        truncated = by_module(truncate_rank(state.tensors, plan.rank))
        return Deployment(
            plan, named({name: Factors(own.down, own.up / plan.scale) for name, own in truncated.items()})
        )

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the global model at the client's rank: nothing is private."""
        return self.deploy(state, model, client.budget)

    def _leading(self, product: Factors, before: Factors) -> Factors:
        """Returns the first r singular triplets of a product as U S and V^T (line 6)."""
        if product.rank < self.settings.rank:
            product = stack([(product, 1.0), (Factors(before.down, torch.zeros_like(before.up)), 1.0)])
        leading = truncate(decompose(product), self.settings.rank)
        beyond = self.settings.rank - leading.rank  # a layer narrower than r
        return Factors(pad(leading.down, (0, 0, 0, beyond)), pad(leading.up, (0, beyond)))
