"""FLoRA: LoRA with a rank by budget, stacked and merged into the backbone.

Z. Wang, Z. Shen, Y. He, G. Sun, H. Wang, L. Lyu, A. Li, "FLoRA: Federated Fine-Tuning Large Language
Models with Heterogeneous Low-Rank Adaptations", NeurIPS 2024.

The algorithm, in our words:
    1  each round, for the sampled clients c:
    2      client: a fresh LoRA of its own rank r_c (A_c random, B_c = 0) on the backbone W_t
    3      client: minimise the mean loss with s_c B_c A_c on every adapted layer
    4      server: stack A = [p_1 A_1; ..; p_n A_n] and B = [B_1, .., B_n], so that
               Delta W = B A = sum_c p_c B_c A_c, without a cross term
    5      server: send A and B to the clients; everyone merges W_(t+1) = W_t + s Delta W

Symbols: r_c `budget.rank`, s_c `scale_of`, p_c = n_c / sum n over the round's clients, [..; ..] `stack`.

Readings and deviations (docs/methods/flora.md):
    - p_c multiplies A_c only, as in the released code; both factors would give p_c squared. A client's scale s_c is
      folded into A_c too, so that ranks with different scales add up exactly.
    - A client draws its fresh A_c from a seed in its download, different for every client and round.
    - Merging adds all rounds' stacks to the original weights in fp32, which are then rounded once to the
      backbone's dtype. The whole history is the server's state; a client that took part in the round
      before gets the newest stack alone (docs/decisions/0007).
    - The global model is the merged backbone: every budget runs all of it, with no adapter beneath.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.fresh_adapter import ADAPTER_SEED, fresh_adapter, fresh_seed
from fedguild.client.merge_ledger import VERSION
from fedguild.client.training import train
from fedguild.core.payload import Payload
from fedguild.core.seeding import new_seed
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes, zero_adapter
from fedguild.server.low_rank import weighted_product
from fedguild.server.merge_history import HISTORY_COST, appended, delivery, echoed, merges, no_merges, with_echo
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, NotPrivate, Own, Roster, ServerCosts
from fedguild.server.schema import Schema
from fedguild.server.settings import AnyRanksSettings
from fedguild.server.terms import Upload
from fedguild.server.uploads import collected, scaled_products


class FloraSettings(AnyRanksSettings):
    """The options of FLoRA; the released code's scale is 2, as its alpha is twice a client's rank."""


class Flora(Method):
    """Stacked LoRA of unequal ranks, merged every round; see the module's docstring.

    The state is the history of the stacks.
    """

    Settings = FloraSettings
    facts = Facts(
        costs=ServerCosts(
            f"O(C n): the stack of all factors, of rank R = sum of the clients' ranks; {HISTORY_COST}",
            "O(C n)",
            holds="all",
            note="The download is the whole stack of the round before.",
            rounds=3,
        ),
        not_private=NotPrivate(client="starts every round from an adapter that was not received"),
        not_linear="it stacks every client's own A and B side by side",
    )
    settings: FloraSettings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at the budget's rank with its scale; all of the model's experts stay active."""
        return AdapterPlan((self.settings.lora_of(budget),), merges=True)

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Returns the state of the published backbone; Delta W is 0."""
        for budget in roster.budgets:
            trainable_shapes(model, self.plan(model, budget))
        unchanged = no_merges()
        return Payload(unchanged.tensors, {**unchanged.scalars, ADAPTER_SEED: new_seed(rng)})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 5 of the earlier rounds that the client lacks, and the seed of line 2."""
        lacking = delivery(state, client)
        seed = fresh_seed(int(state.scalars[ADAPTER_SEED]), int(state.scalars[VERSION]), client)
        return Payload(lacking.tensors, {**lacking.scalars, ADAPTER_SEED: seed})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 2 and 3."""
        model = cohort.model
        for slot, (work, plan) in enumerate(zip(cohort.work, model.plans, strict=True)):
            cohort.load(slot, fresh_adapter(model.backbone.info, plan, int(work.download.scalars[ADAPTER_SEED])))
        return echoed(train(cohort), cohort.work)

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Line 4; holds all uploads, as the stack does."""
        received = collected(uploads)
        parts = scaled_products(received, self.settings.scale_of)
        if not parts:
            return state
        merged = appended(state, dict(weighted_product(parts)), received)
        return Payload(merged.tensors, {**state.scalars, **merged.scalars})

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the default, and the version that the client trained on."""
        return with_echo(super().schema(model, client, download, round_index), download)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the merged backbone, whole for every budget, under an adapter of zeros."""
        plan = self.plan(model, budget)
        return Deployment(plan, zero_adapter(model, plan), merges(state))
