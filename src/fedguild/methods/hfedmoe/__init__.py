"""HFedMoE: each client trains the experts that matter most in a batch, as many as its budget allows.

Z. Fang, Z. Lin, S. Hu, Y. Ma, Y. Tao, Y. Deng, X. Chen, Y. Fang, "HFedMoE: Resource-aware Heterogeneous
Federated Learning with Mixture-of-Experts", arXiv 2601.00583, 2026. Its text was not available to us beyond the
abstract: equations and their numbers are those of a published reading note (docs/methods/hfedmoe.md).

The algorithm, in our words (e is an expert of any layer, b a batch of B tokens, G_e(x) its router probability):
     1  server: start LoRA (A random, B = 0) on attention, routers and experts
     2  each round, for the sampled clients c, in each step:
     3      client: route every token as the model does                                     (Eq. 1, 2)
     4      client: s_b(e) = lambda mean_i G_e(x_i) + (1 - lambda) max_i G_e(x_i)           (Eq. 3-5)
     5      client: I_b(e) = s_b(e) - beta mean_i G_e(x_i) log(G_e(x_i) / mean_j G_e(x_j))  (Eq. 14)
     6      client: of the experts with a token, the C_c with the largest positive I_b,
                    whose sum is then largest                                               (Eq. 15)
     7      client: minimise the loss in these experts and in everything outside the experts
     8      client: u_c(e) = mean of G_e over its tokens, S_c = {e: u_c(e) >= tau},         (Eq. 16)
                    p_c(e) = u_c(e) s_c(e) in S_c, s_c the mean of s_b over the batches     (Eq. 19)
                                                                              -> importance.py
     9  server: expert e: mean by size over the clients with e in S_c                       (Eq. 17)
    10  server: routers: mean by alpha_c = sum_e p_c(e)                                     (Eq. 20, 21)
    11  server: the rest: mean by size

Symbols: lambda `cumulative`, beta `redundancy`, C_c `experts` (or the budget's active experts), tau `threshold` / M,
|D_c| `client.examples`, u_c `usage`, p_c `preference`.

Readings and deviations (docs/methods/hfedmoe.md):
    - Eq. 21 as printed sums alpha_c G_c with weights that do not add up to 1, which would shrink the routers; they are
      normalised here. |S_global| of Eq. 20 then cancels, as does the consistency r(c) of Eq. 18, which nothing uses.
    - G is the softmax over all experts, of tokens. lambda, beta and tau are not in the note: ours.
    - C_c counts over all layers together (`scope`); without `experts` it is the share k_c / k of all experts.
    - A masked expert keeps its weights and its optimizer's moments; the gradient of the layers below is whole. Its
      products are computed all the same, so that the budget saves no FLOPs here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.observing import observing
from fedguild.client.training import load_received
from fedguild.core.payload import ADAPTER, Payload
from fedguild.methods.hfedmoe.importance import Importance
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.model.targets import layer_of
from fedguild.server.limits import require_budgets, require_within_top_k
from fedguild.server.method import Facts, Method, Roster, ServerCosts
from fedguild.server.schema import Bound, Schema, entries
from fedguild.server.settings import LoraSettings, Rank, Targets
from fedguild.server.terms import Terms, Upload, mean_by_expert

USAGE = "usage"
"""The part of an upload with u_c: path of each layer's experts -> [M]."""
PREFERENCE = "preference"
"""The part of an upload with p_c, 0 outside S_c: path of each layer's router -> [M]."""
ALPHA = "alpha"
"""The name of alpha_c, the weight of the routers' tensors."""


class HFedMoeSettings(LoraSettings):
    """The options of HFedMoE; the LoRA rank is the same for every budget."""

    rank: Rank = 8
    targets: Targets = ("attention", "router", "experts")
    experts: Mapping[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        {},
        description="budget's name -> C_c, the share of all experts that its clients train in a step; if left out, its "
        "active experts over the model's",
    )
    scope: Literal["model", "layer"] = Field(
        "model", description="whether C_c is shared out over all layers (Eq. 15), or the same in every layer"
    )
    rank_by: Literal["information", "importance"] = Field(
        "information", description="what experts are chosen by: I_b (Eq. 14), or s_b alone (Eq. 5)"
    )
    cumulative: float = Field(0.5, ge=0, le=1, description="lambda: share of the mean in s_b; the rest is the maximum")
    redundancy: float = Field(0.1, ge=0, description="beta: weight of what a choice says about its input")
    threshold: float = Field(0.5, ge=0, description="tau, the smallest u_c of an expert that counts, times M")
    active_experts: Literal["model", "budget"] = Field(
        "model", description="experts that a client activates per token: as many as the model, or as its budget"
    )


class HFedMoe(Method):
    """Importance under a budget, sparsity-aware averaging; see the module's docstring."""

    Settings = HFedMoeSettings
    settings: HFedMoeSettings
    facts = Facts(
        needs_experts=True,
        costs=ServerCosts(
            "O(n), whatever C is: a running mean",
            "O(C n)",
            note="A client's FLOPs are those of training all experts: the gradients of those not chosen are discarded.",
        ),
        not_private="sends how important each expert is to a client's examples",
        not_preferences="measures the experts' importance in a loop of its own",
        needs_float64="measures the experts' importance",
        not_linear="the sum of the sizes of an expert's users would tell who they are",
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA of the same rank for every budget; which experts train is chosen in every step."""
        model.require_experts("HFedMoE")
        settings, within = self.settings, require_within_top_k(model, budget)
        lora = settings.lora
        return AdapterPlan((lora,), within if settings.active_experts == "budget" else None)

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1.

        Raises:
            ConfigError: `experts` names an unknown budget.
        """
        require_budgets("method.experts", self.settings.experts, roster.budgets)
        return Payload.of({ADAPTER: initial_adapter(model, self.plan(model, roster.budgets[0]), rng)})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 8."""
        settings, layers = self.settings, cohort.model.backbone.info.moe
        load_received(cohort)
        shares = [self.share(cohort.model.backbone.info, work.client.budget) for work in cohort.work]
        importance = Importance(layers, len(cohort.work), settings.cumulative, settings.redundancy, settings.rank_by)
        with observing(cohort.model.backbone.moe, importance.observe):
            for step in cohort.steps():
                step.backward(step.forward())  # line 3
                if step.is_update:
                    chosen = importance.close_step(shares, settings.scope)  # lines 4 to 6
                    step.apply(only(cohort, dict(zip((layer.experts for layer in layers), chosen, strict=True))))
        uploads = []
        for slot in range(len(cohort.work)):  # line 8
            usage, preference = {}, {}
            for layer, used, score in zip(layers, importance.usage(slot), importance.mean_score(slot), strict=True):
                usage[layer.experts] = used
                preference[layer.router] = used * score * self.counts(used)
            uploads.append(
                Payload.of({ADAPTER: cohort.read(slot), USAGE: usage, PREFERENCE: preference}),
            )
        return uploads

    def terms(self, sent: Upload) -> Terms:
        """Lines 9 to 11."""
        size = float(sent.client.examples)
        usage, preference = sent.payload.part(USAGE), sent.payload.part(PREFERENCE)
        experts = {path: size * self.counts(used).double() for path, used in usage.items()}  # Eq. 17
        alpha = float(sum(p.double().clamp(0, 1).sum() for p in preference.values())) if size else 0.0  # Eq. 20
        terms = mean_by_expert(ADAPTER, sent, experts)
        routers = {
            name: replace(term, weight=alpha, key=ALPHA)
            for name, term in terms.means.items()
            if name.removeprefix(f"{ADAPTER}/").rpartition(".")[0] in preference
        }
        return terms | Terms(routers, secure=False, why=self.facts.not_linear)

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the LoRA, u_c and p_c = u_c s_c, s_c <= 1, each of which sums to 1 at most in a layer (Eq. 20)."""
        usage = {layer.experts: (layer.num_experts,) for layer in model.moe}
        preference = {layer.router: (layer.num_experts,) for layer in model.moe}
        adapter, share = super().schema(model, client, download, round_index).tensors, Bound(total=1.0)
        return Schema({**adapter, **entries(USAGE, usage, share), **entries(PREFERENCE, preference, share)})

    def share(self, model: ModelInfo, budget: Budget) -> float:
        """Returns C_c as a share of all experts."""
        return self.settings.experts.get(budget.name, budget.active_experts / model.top_k)

    def counts(self, usage: Tensor) -> Tensor:
        """Returns [M] bool of a layer's u_c [M]: whether the expert is in S_c."""
        return usage * len(usage) >= self.settings.threshold


def only(cohort: Cohort, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Discards the gradients of the experts that are not chosen, so that they do not count when gradients are clipped.

    Args:
        cohort: The clients, after the last backward pass of a step.
        chosen: Path of each layer's experts -> [S, M] bool.

    Returns:
        Name -> [M, S] bool of every tensor of experts, as `Step.apply` takes it.
    """
    updated = {}
    for name, trainable in cohort.trainables.items():
        path = layer_of(name)
        if path in chosen:
            updated[name] = chosen[path].T
            if trainable.stored.grad is not None:
                trainable.stored.grad.mul_(updated[name][:, :, None, None])
    return updated
