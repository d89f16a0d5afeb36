"""SMoE-LLB: fewer active experts for small budgets, and load balancing on every client by itself.

The baseline of V.-T. Tran, H.-H. Nguyen-Le, M. Ruffini, M. Dzaferagic, "UB-SMoE: Universally Balanced
Sparse Mixture-of-Experts for Resource-adaptive Federated Fine-tuning of Foundation Models", 2026,
with the losses of B. Zoph, I. Bello, S. Kumar, N. Du, Y. Huang, J. Dean, N. Shazeer, W. Fedus,
"ST-MoE: Designing Stable and Transferable Sparse Expert Models", 2022.

The algorithm, in our words:
    1  server: start LoRA Theta (A random, B = 0) on attention, routers and experts
    2  each round, for the sampled clients c:
    3      client: Theta_c = Theta
    4      client: minimise, with K_c active experts,
               nll + c_B mean_l M sum_i f_i P_i + c_z mean_l mean_x (log sum_i exp s_i(x))^2
               (ST-MoE, Eq. 6; Eq. 5 is the last term), where in a layer l of the client
               f_i is expert i's share of what its tokens activated, P_i its mean probability
    5      server: Theta = sum_c n_c Theta_c / sum_c n_c

Symbols: K_c `budget.active_experts`, c_B `balance_weight`, c_z `z_weight`, s the router's logits,
n_c `client.examples`; f, P and the two losses are in client/load_balancing.py.

Readings and deviations (docs/methods/smoe-llb.md):
    - UB-SMoE names the losses, not their coefficients: c_B = 0.01 and c_z = 0.001 are ST-MoE's.
    - f is a share, so that the loss has its least value at 1 under every budget; padding does not
      count. The losses are means over the layers, of each forward pass.
    - Top-2 routing and capacities, which UB-SMoE's description mentions, have no part: every client
      runs its K_c, as the paper's counts of parameters do.
    - LoRA also adapts the routers, which UB-SMoE's own LoRA leaves alone: else the losses could only
      act on what lies below a router.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.load_balancing import LoadBalancing
from fedguild.client.routing_alignment import observing
from fedguild.methods.common import ADAPTER, in_part, initial_adapter, mean_by_size, require_within_top_k
from fedguild.model.plan import AdapterPlan, ModelInfo, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.method import Deployment, State, Upload


class SmoeLlbSettings(BaseModel):
    """The options of SMoE-LLB."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(20, ge=1, description="LoRA rank r, the same for every budget")
    alpha: float = Field(20.0, gt=0, description="LoRA's alpha; the scale is alpha / rank")
    targets: tuple[str, ...] = Field(
        ("attention", "router", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
    balance_weight: float = Field(0.01, ge=0, description="c_B, the weight of the load-balancing loss")
    z_weight: float = Field(0.001, ge=0, description="c_z, the weight of the router z-loss")


class SmoeLlb:
    """Active experts by budget with local load balancing; see the module's docstring."""

    name: ClassVar[str] = "smoe-llb"
    title: ClassVar[str] = "SMoE-LLB: active experts by budget, load-balancing losses on every client"
    needs_experts: ClassVar[bool] = True
    Settings: ClassVar[type[BaseModel]] = SmoeLlbSettings

    def __init__(self, settings: SmoeLlbSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's K_c active experts."""
        model.require_experts("SMoE-LLB")
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
        """Line 3: Theta."""
        return Payload(with_part(ADAPTER, state.tensors))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, work.download.part(ADAPTER))
        balancing = LoadBalancing(len(cohort.work))
        with observing(cohort.model.backbone.moe, balancing.observe):
            for step in cohort.steps():
                nll = step.forward()
                balance, z = balancing.losses()
                auxiliary = self.settings.balance_weight * balance + self.settings.z_weight * z
                step.backward(nll + auxiliary * step.shares())  # ST-MoE, Eq. 6
                step.apply()
        return [Payload(with_part(ADAPTER, cohort.read(slot))) for slot in range(len(cohort.work))]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of Theta_c."""
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def aggregate(self, state: State, uploads: Iterable[Upload]) -> State:
        """Line 5."""
        return mean_by_size(state, uploads)

    def deploy(self, state: State, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the global LoRA with the budget's K."""
        return Deployment(self.plan(model, budget), state.tensors)

    def personalize(self, state: State, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the global model at the client's budget: nothing is private."""
        return self.deploy(state, model, client.budget)
