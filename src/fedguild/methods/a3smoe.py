"""A3SMoE: fewer active experts for small budgets, experts averaged by how often they were active.

V.-T. Tran, H. K. Le, V.-Q. Pham, "Revisiting Sparse Mixture of Experts for Resource-adaptive
Federated Fine-tuning Foundation Models", ICLR 2025 Workshop on Modularity for Collaborative,
Decentralized, and Continual Deep Learning. Its text was not available to us: this is the method as
UB-SMoE's paper (V.-T. Tran et al., 2026, Appendix C.1 and E) describes and compares with it.

The algorithm, in our words:
    1  server: start LoRA theta (A random, B = 0) on attention and experts
    2  each round, for the sampled clients c:
    3      client: theta_c = theta
    4      client: minimise the mean loss with K_c active experts and the model's own gating
    5      client: f_c^j = a_c^j / n_c, the share of its training tokens that activated expert j
    6      server: theta^j = sum_c p_c f_c^j theta_c^j / sum_c p_c f_c^j, for the LoRA of expert j
    7      server: theta = sum_c p_c theta_c, for the rest

Symbols: K_c `budget.active_experts`, f_c^j `routing/{experts}`, p_c `client.examples` over their sum.

Readings and deviations (docs/methods/a3smoe.md):
    - The description gives the ingredients, not the formula: "an activation-aware aggregation strategy
      that weights global updates based on client-specific expert utilization frequencies". Line 6 is
      the plainest reading. It is FLAME without a rescaler at temperature 1, bit by bit.
    - Where no client activated an expert, it keeps its global value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.methods.common import (
    ADAPTER,
    ROUTING,
    activation_frequency,
    in_part,
    initial_adapter,
    require_within_top_k,
)
from fedguild.model.plan import AdapterPlan, ModelInfo, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.aggregation import WeightedMean, activation_weights, weights_by_name
from fedguild.server.method import Deployment, State, Upload


class A3SmoeSettings(BaseModel):
    """The options of A3SMoE."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(20, ge=1, description="LoRA rank r, the same for every budget")
    alpha: float = Field(20.0, gt=0, description="LoRA's alpha; the scale is alpha / rank")
    targets: tuple[str, ...] = Field(
        ("attention", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )


class A3Smoe:
    """Active experts by budget with activation-aware averaging; see the module's docstring."""

    name: ClassVar[str] = "a3smoe"
    title: ClassVar[str] = "A3SMoE: active experts by budget, experts averaged by how often they were active"
    needs_experts: ClassVar[bool] = True
    Settings: ClassVar[type[BaseModel]] = A3SmoeSettings

    def __init__(self, settings: A3SmoeSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's K_c active experts."""
        model.require_experts("A3SMoE")
        return AdapterPlan(
            rank=self.settings.rank,
            scale=self.settings.alpha / self.settings.rank,
            targets=self.settings.targets,
            active_experts=require_within_top_k(model, budget),
        )

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> State:
        """Line 1."""
        plans = [self.plan(model, budget) for budget in budgets]
        return State(initial_adapter(model, plans[0], rng))

    def download(self, state: State, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: theta, whatever the budget."""
        return Payload(with_part(ADAPTER, state.tensors))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 5."""
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, work.download.part(ADAPTER))
        for step in cohort.steps():
            nll = step.forward()
            step.backward(nll)
            step.apply()
        return [
            Payload({**with_part(ADAPTER, cohort.read(slot)), **with_part(ROUTING, activation_frequency(cohort, slot))})
            for slot in range(len(cohort.work))
        ]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of theta_c and f_c."""
        return {
            **in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget))),
            **in_part(ROUTING, {layer.experts: (layer.num_experts,) for layer in model.moe}),
        }

    def aggregate(self, state: State, uploads: Iterable[Upload]) -> State:
        """Lines 6 and 7, as running means over the uploads."""
        mean = WeightedMean()
        for upload in uploads:
            trained, examples = upload.payload.part(ADAPTER), float(upload.client.examples)
            used = activation_weights(upload.payload.part(ROUTING), examples, temperature=1.0)
            mean.add(trained, weights_by_name(trained, used, examples))
        return State(mean.result(state.tensors))

    def deploy(self, state: State, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the global LoRA with the budget's K."""
        return Deployment(self.plan(model, budget), state.tensors)

    def personalize(self, state: State, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the global model at the client's budget: nothing is private."""
        return self.deploy(state, model, client.budget)
