"""Guild: FedGuild's own, unpublished: active experts by budget, trained in a singular basis, and models in between.

For clients that differ in compute and in data. Its parts are known ones: active experts by budget as in FLAME (K. Le et
al.), the basis of a singular value decomposition as in FedSVD (S. Lee et al., arXiv 2505.12805, 2025), a client's model
between the shared one and its own.

The algorithm:
    1  server: start LoRA theta = (A, B): random orthogonal rows of A of norm c, B = 0
    2  each round, the sampled clients i receive theta
    3      client: (A_i, B_i) = (R A, B R^-1): orthogonal rows of norm c, orthogonal columns  (server/singular_basis.py)
    4      client: minimise the mean loss over A_i and B_i with k_i active experts
    5      client: theta_i = (R^-1 A_i, B_i R); keep theta_i, send theta_i
    6  server: theta = sum_i n_i theta_i / sum_i n_i
    7  a client's own model: theta + lambda (theta_i - theta)

Symbols: c `basis_norm`, k_i `budget.active_experts`, lambda `mix`, n_i `client.examples`.

All that the server takes is a mean, so it may be a secure sum; what leaves a client is a change of what it received, so
that one clipping and one noise cover it. Readings (docs/methods/guild.md):
    - R is of the theta that the client received, and found on its own machine; all find the same unless they are late.
    - In line 7 theta is the new one, and theta_i what the client kept when it last took part.
    - With the basis as received and lambda = 0 it is FLAME at t = 0 without a rescaler, bit for bit from one start.
"""

from __future__ import annotations

import torch

from fedguild.client.budget import Budget
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.core.payload import ADAPTER, Payload
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.server.limits import require_within_top_k
from fedguild.server.method import GLOBAL, RUNNING_MEAN, Deployment, Facts, Method, Own, Roster
from fedguild.server.settings import InBasisSettings
from fedguild.server.singular_basis import change_basis, out_of_basis, started


class Guild(Method):
    """Active experts by budget, LoRA trained in a singular basis, models in between; see the module's docstring.

    The state's adapter is theta, a client's memory its theta_i.
    """

    Settings = InBasisSettings
    settings: InBasisSettings
    facts = Facts(
        needs_experts=True,
        costs=RUNNING_MEAN,
        not_private="",  # its uploads are the received adapters, after plain training
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's k_i active experts."""
        model.require_experts("Guild")
        return AdapterPlan((self.settings.lora,), require_within_top_k(model, budget))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        return Payload.of({ADAPTER: started(model, self.settings.lora, self.settings.norm, rng)})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 2 to 5."""
        load_received(cohort)
        bases = change_basis(cohort, self.settings.norm)
        uploads = []
        for slot, (trained, basis) in enumerate(zip(train(cohort), bases, strict=True)):
            uploads.append(Payload.of({ADAPTER: out_of_basis(trained.part(ADAPTER), basis)}))
            if self.settings.mix:
                cohort.keep(slot, uploads[slot].tensors)
        return uploads

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Line 7; the global model for a client that never took part."""
        theta, kept = state.part(ADAPTER), own.model.part(ADAPTER)
        mixed = {name: torch.lerp(theta[name].to(value), value, self.settings.mix) for name, value in kept.items()}
        return Deployment(self.plan(model, budget), {**theta, **mixed})
