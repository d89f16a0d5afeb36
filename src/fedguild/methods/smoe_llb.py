"""SMoE-LLB: active experts by budget, load-balancing losses on every client.

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
    - f is a share, so that the minimum of the loss is 1 for every budget; padding does not count. The losses are means
      over the layers, of each forward pass.
    - Top-2 routing and capacities, which UB-SMoE's description mentions, are not used: every client
      runs its K_c, as the paper's counts of parameters do.
    - LoRA also adapts the routers, which UB-SMoE's own LoRA does not: otherwise the losses could only act on the layers
      below a router.
"""

from __future__ import annotations

from pydantic import Field

from fedguild.client.budget import Budget
from fedguild.client.cohort import Cohort
from fedguild.client.load_balancing import LoadBalancing
from fedguild.client.observing import observing
from fedguild.client.training import load_received, trained_adapters
from fedguild.core.payload import Payload
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.server.limits import require_within_top_k
from fedguild.server.method import RUNNING_MEAN, Facts, Method, NotPrivate
from fedguild.server.settings import Alpha, LoraSettings, Targets


class SmoeLlbSettings(LoraSettings):
    """The options of SMoE-LLB; the LoRA rank is the same for every budget."""

    alpha: Alpha = 20.0
    targets: Targets = ("attention", "router", "experts")
    balance_weight: float = Field(0.01, ge=0, description="c_B, the weight of the load-balancing loss")
    z_weight: float = Field(0.001, ge=0, description="c_z, the weight of the router z-loss")


class SmoeLlb(Method):
    """Active experts by budget with local load balancing; see the module's docstring."""

    Settings = SmoeLlbSettings
    settings: SmoeLlbSettings
    facts = Facts(
        needs_experts=True,
        costs=RUNNING_MEAN,
        not_private=NotPrivate(example="balances routers over a batch's tokens, which couples its examples"),
        not_preferences="balances the routers in a loop of its own",
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's K_c active experts."""
        model.require_experts("SMoE-LLB")
        return AdapterPlan((self.settings.lora,), require_within_top_k(model, budget))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        load_received(cohort)
        balancing = LoadBalancing(len(cohort.work))
        with observing(cohort.model.backbone.moe, balancing.observe):
            for step in cohort.steps():
                nll = step.forward()
                balance, z = balancing.losses()
                auxiliary = self.settings.balance_weight * balance + self.settings.z_weight * z
                step.backward(nll + auxiliary * step.shares())  # ST-MoE, Eq. 6
                step.apply()
        return trained_adapters(cohort)
