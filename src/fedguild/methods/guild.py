"""Guild: FedGuild's own, unpublished: active experts by budget, LoRA from a large orthogonal A, and models in between.

For clients that differ in compute and in data. Its parts are known ones: active experts by budget as in FLAME (K. Le et
al.); a start at which B moves the product far more than A does, as with the rates of LoRA+ (S. Hayou et al., arXiv
2402.12354, 2024); a client's model between the shared one and its own.

The algorithm:
    1  server: start LoRA theta = (A, B): random orthogonal rows of A of norm c, B = 0
    2  each round, the sampled clients i receive theta
    3      client: theta_i = theta after minimising the mean loss with k_i active experts; keep theta_i, send theta_i
    4  server: theta = sum_i n_i theta_i / sum_i n_i
    5  a client's own model: theta + lambda (theta_i - theta)

Symbols: c `start_norm`, k_i `budget.active_experts`, lambda `mix`, n_i `client.examples`.

All that the server takes is a mean, so it may be a secure sum; what leaves a client is a change of what it received, so
that one clipping and one noise cover it. Readings (docs/methods/guild.md):
    - In line 5 theta is the new one, and theta_i what the client kept when it last took part.
    - With A as LoRA draws it (`start_norm: null`) and lambda = 0 it is FLAME at t = 0 without a rescaler, bit for bit
      from one start.

Parts that its ablation took out are in the method `guild-parts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes
from fedguild.payload import ADAPTER, Payload
from fedguild.secure.form import Contribution, Form
from fedguild.server.limits import require_within_top_k
from fedguild.server.linear import EXAMPLES, SecureMeans, changes_of, means_of, one
from fedguild.server.method import RUNNING_MEAN, Deployment, Method, Upload
from fedguild.server.settings import MixedLoraSettings
from fedguild.server.uploads import mean_adapter


class Guild(Method):
    """Active experts by budget, LoRA from a large A, models in between; see the module's docstring.

    The state's adapter is theta, a client's memory its theta_i.
    """

    Settings = MixedLoraSettings
    settings: MixedLoraSettings
    needs_experts = True
    costs = RUNNING_MEAN
    is_mean = True
    not_private = ""  # its uploads are the received adapters, after plain training

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's k_i active experts."""
        model.require_experts("Guild")
        return AdapterPlan((self.settings.lora,), require_within_top_k(model, budget))

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1."""
        return Payload.of({ADAPTER: initial_adapter(model, self.plan(model, budgets[0]), rng)})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 2 and 3."""
        load_received(cohort)
        uploads = train(cohort)
        if self.settings.mix:
            for slot, upload in enumerate(uploads):
                cohort.keep(slot, upload.tensors)
        return uploads

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Line 4."""
        return Payload.of({ADAPTER: mean_adapter(state, uploads)})

    def linear_form(self, model: ModelInfo, budgets: Sequence[Budget]) -> Form:
        """Line 4."""
        return Form(means_of(ADAPTER, trainable_shapes(model, self.plan(model, budgets[0]))), {EXAMPLES: 1})

    def linear_terms(self, model: ModelInfo, client: ClientInfo, download: Payload, upload: Payload) -> Contribution:
        """Returns theta_i and n_i."""
        changes = changes_of(ADAPTER, upload.part(ADAPTER), download.part(ADAPTER))
        return Contribution(changes, {EXAMPLES: one(client.examples)})

    def aggregate_means(self, state: Payload, means: SecureMeans) -> Payload:
        """Line 4."""
        return Payload.of({ADAPTER: means.moved(ADAPTER, state.part(ADAPTER))})

    def personalize(self, excerpt: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Line 5; the global model for a client that never took part."""
        plan, theta, own = self.plan(model, client.budget), excerpt.part(ADAPTER), memory.part(ADAPTER)
        mixed = {name: torch.lerp(theta[name].to(trained), trained, self.settings.mix) for name, trained in own.items()}
        return Deployment(plan, {**theta, **mixed})
