"""FLEx: frozen experts, shared dense layers, and one expert of every client's own grafted onto each layer.

F. Liu, B. Pan, Z. Wang, X. Yao, X. Tang, J. Wang, Y. Shi, "FLEx: Personalized Federated Learning for
Mixture-of-Experts LLMs via Expert Grafting", arXiv 2506.00965, 2025. Its text was not available to us beyond the
abstract: the algorithm is put together from that, summaries and reviews (docs/methods/flex.md).

The algorithm, in our words (j is an expert of a layer, F the layer's routed output, E_j its expert):
     1  server: start LoRA (A random, B = 0) on the layers outside the experts
     2  a client c that takes part for the first time: in every layer graft a copy of
            j_c = argmin_j sum_x ||F(x) - E_j(x)||^2, over tokens of its own     -> grafted_expert.py
     3  each round, for the sampled clients c:
     4      client: the global LoRA, its own grafted experts E_c and gates w_c, b_c
     5      client: minimise the loss of the model whose layers give
                F(x) + sigma(<w_c, x> + b_c) E_c(x)                               -> grafted_expert.py
     6      client: keep E_c, w_c, b_c; send the LoRA
     7  server: LoRA = sum_c n_c LoRA_c / sum_c n_c
     8  a client's model: the global LoRA with its own E_c, w_c, b_c

Symbols: j_c `source`, E_c the frozen expert j_c with LoRA, w_c and b_c `gate.weight` and `gate.bias`, n_c `weights`
(the client's examples, or 1).

Readings and deviations (docs/methods/flex.md):
    - The grafted expert is the frozen j_c with LoRA of its own, for which the backbone's weights are not copied.
    - How the gate mixes is not in what we read: it adds (`combine: add`), or takes as much from F (`mix`). It starts at
      1 / (K + 1), the share of one expert beside the K that the model's router activates, whatever the budget.
    - The pruned layer of line 2 gives its one expert the weight 1. It is chosen on `selection_examples` examples, once.
    - Routers are frozen, as the experts are, unless `targets` names them.
    - The global model is the one without a graft, which is also that of a client that never took part.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import train
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.core.seeding import numpy_rng, torch_rng
from fedguild.methods.flex.grafted_expert import Combine, GraftedExpert, Grafts, source_name
from fedguild.model.adapters.lora import Lora
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes
from fedguild.server.limits import active_experts_of
from fedguild.server.method import GLOBAL, RUNNING_MEAN, Deployment, Facts, Method, NotPrivate, Own, Roster
from fedguild.server.schema import Schema, entries
from fedguild.server.settings import LoraSettings, Rank, Targets, Weights
from fedguild.server.terms import Terms, Upload, mean

GRAFT = "graft"
"""The part of a client's memory with its grafted experts and gates."""


class FlexSettings(LoraSettings):
    """The options of FLEx; the LoRA rank is the same for every client."""

    rank: Rank = 8
    targets: Targets = ("attention",)
    graft_rank: int = Field(8, ge=1, description="LoRA rank of the grafted experts; their alpha is `alpha` too")
    combine: Combine = Field(
        "add", description="what a layer gives: F + g E_c, or (1 - g) F + g E_c, where g is the gate"
    )
    selection_examples: int = Field(
        64, ge=1, description="largest number of examples on which a client chooses the experts that it grafts"
    )
    weights: Weights = "size"

    @field_validator("targets")
    @classmethod
    def _leaves_the_experts(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if "experts" in targets:
            raise ValueError("must not include experts, which FLEx freezes; graft_rank is that of the grafted ones")
        return targets


class Flex(Method):
    """Frozen experts and a grafted one; see the module's docstring.

    The state's adapter is the shared LoRA, a client's memory its grafts.
    """

    Settings = FlexSettings
    settings: FlexSettings
    facts = Facts(
        needs_experts=True,
        costs=replace(RUNNING_MEAN, note="The estimates leave out the passes of a client's choice of its grafts."),
        not_private=NotPrivate(example="chooses the experts that it grafts by their losses on the examples"),
        needs_float64="compares the experts' outputs",
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns the shared LoRA and a graft on every MoE layer, with the budget's active experts beside it."""
        model.require_experts("FLEx")
        settings = self.settings
        start = 1 / (model.top_k + 1)
        graft = GraftedExpert(settings.graft_rank, settings.alpha / settings.graft_rank, start, settings.combine)
        shared = settings.lora
        return AdapterPlan((shared, graft), active_experts_of(model, budget))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        return Payload.of({ADAPTER: initial_adapter(model, self._shared(model, roster.budgets[0]), rng)})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 2 and 4 to 6."""
        self._load(cohort)
        trained = [upload.part(ADAPTER) for upload in train(cohort)]
        uploads = []
        for slot, (tensors, work) in enumerate(zip(trained, cohort.work, strict=True)):
            shared = work.download.part(ADAPTER)
            whole = cohort.model.read(slot, frozen=True)
            cohort.keep(slot, with_part(GRAFT, {name: value for name, value in whole.items() if name not in shared}))
            uploads.append(Payload.of({ADAPTER: {name: tensors[name] for name in shared}}))
        return uploads

    def _load(self, cohort: Cohort) -> None:
        """Lines 2 and 4: the global LoRA, and the grafts that the clients kept or choose now."""
        info, settings = cohort.model.backbone.info, self.settings
        few: list[list[int]] = []
        for slot, (work, plan) in enumerate(zip(cohort.work, cohort.model.plans, strict=True)):
            kept = work.memory.part(GRAFT)
            fresh = initial_adapter(info, plan.without(Lora), torch_rng(cohort.seed, "graft", work.client.index))
            cohort.load(slot, {**work.download.part(ADAPTER), **(kept or fresh)})
            order = numpy_rng(cohort.seed, "selection", work.client.index).permutation(len(work.examples)).tolist()
            few.append([] if kept else order[: settings.selection_examples])
        if not any(few):
            return
        grafts: Grafts = cohort.model.attached[GraftedExpert]
        with grafts.measuring() as losses:
            chosen = [  # of a preference pair, the response that was preferred
                [replace(work.examples[index], rejected=None) for index in pick]
                for work, pick in zip(cohort.work, few, strict=True)
            ]
            for _ in cohort.passes(chosen):
                pass
        for slot, pick in enumerate(few):
            if pick:
                best = {layer: loss[slot].argmin() for layer, loss in losses.items()}
                cohort.load(slot, {source_name(layer): index.float().cpu() for layer, index in best.items()})

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the names and shapes of the shared LoRA alone."""
        return Schema(entries(ADAPTER, trainable_shapes(model, self._shared(model, client.budget))))

    def terms(self, sent: Upload) -> Terms:
        """Line 7."""
        return mean(ADAPTER, sent, self.settings.weights)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Line 8; without a graft as the global model, and for a client that kept none."""
        kept: dict[str, Tensor] = own.kept.part(GRAFT)
        plan = self.plan(model, budget) if kept else self._shared(model, budget)
        return Deployment(plan, {**state.part(ADAPTER), **kept})

    def _shared(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns the plan without the graft."""
        return self.plan(model, budget).without(GraftedExpert)
