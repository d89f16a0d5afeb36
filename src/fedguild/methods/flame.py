"""FLAME: full-rank LoRA, active experts by budget, activation-aware averaging.

K. Le, T. Tran, T. Hua, N. V. Chawla, "FLAME: Towards Federated Fine-Tuning Large Language Models
Through Adaptive SMoE".

The algorithm, in our words (Sections 2.1-2.2):
    1  server: start LoRA of rank r (A random, B = 0) on attention, routers and experts
    2  each round, for the sampled clients i:
    3      client: A_i = A, B_i = B                                              (Eq. 1)
    4      client: minimise the mean loss with k_i active experts, where a layer gives
               h = s_i sum_j R_i(x, k_i)^j (W^j x + A_i^j B_i^j x)              (Eq. 5)
           and s_i, the rescaler, is learned too and stays with the client
    5      client: count a_i^j, how often expert j was activated, out of S_i
    6      server: gamma_i^j = (a_i^j / S_i)^t |D_i|                             (Eq. 6)
    7      server: A^j = sum_i gamma_i^j A_i^j / sum_i gamma_i^j, B^j alike      (Eq. 7)
    8      server: attention and router LoRA by |D_i| alone                      (Eq. 3-4)

Symbols: k_i `budget.active_experts`, s_i `output_scale`, a_i^j / S_i `frequency`, t `temperature`,
|D_i| `client.examples`. The paper's A is LoRA's B here, and the other way round.

Readings and deviations (docs/methods/flame.md):
    - R is the model's own routing, cut to k_i experts: OLMoE does not renormalise the weights, which
      is the mismatch that s_i repairs.
    - s_i is one number per layer (the paper omits the layer index); `shared` has one for all layers.
    - a_i^j / S_i is the fraction of the client's training tokens, padding excluded, for which expert
      j was active; `step` counts optimizer steps instead, which saturates at 1.
    - a_i^j / S_i sums to k_i over the experts, so that Eq. 6 favours clients with many active experts, and the more
      so the larger t is. `frequency_by_active` divides it by k_i.
    - The clients' s_i are not averaged into any client's training. They are uploaded (one number per
      layer) so that the global model can be evaluated at a budget with the mean s of its clients.
    - An expert that no client activated keeps its global value; 0^0 = 1, so t = 0 is Eq. 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import activation_frequency, load_received, train
from fedguild.core.payload import ADAPTER, ROUTING, Payload
from fedguild.model.adapters.output_scale import SHARED, OutputScale
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes
from fedguild.server.aggregation import activation_weights
from fedguild.server.limits import require_within_top_k
from fedguild.server.method import GLOBAL, RUNNING_MEAN, Deployment, Facts, Method, Observation, Own, Roster
from fedguild.server.schema import Bound, Schema, entries
from fedguild.server.settings import LoraSettings, Targets
from fedguild.server.terms import Terms, Upload, mean_by_expert, mean_of_budget

RESCALER = "rescaler"
"""The part with s: in the state, `budget/{name}/rescaler/…` with the mean of every budget's clients."""
Value = TypeVar("Value")


class FlameSettings(LoraSettings):
    """The options of FLAME; the LoRA rank is the same for every budget."""

    targets: Targets = ("attention", "router", "experts")
    rescaler: Literal["per_layer", "shared", "static", "none"] = Field(
        "per_layer",
        description="s_i: learned per layer, one learned number, the static ratio k / k_i, or none (FLAME, Table 5)",
    )
    temperature: float = Field(2.0, ge=0, description="t of Eq. 6; 0 averages by size, and the paper advises 2 to 4")
    frequency: Literal["token", "step"] = Field(
        "token", description="what a_i^j / S_i counts: tokens, or optimizer steps with at least one activation"
    )
    frequency_by_active: bool = Field(
        False,
        description="whether a_i^j / S_i is divided by k_i, so that Eq. 6 weighs experts and not budgets: the mean of "
        "a_i^j / S_i over the experts is k_i / M",
    )


class Flame(Method):
    """Adaptive active experts with activation-aware averaging; see the module's docstring."""

    Settings = FlameSettings
    settings: FlameSettings
    facts = Facts(
        needs_experts=True,
        costs=RUNNING_MEAN,
        not_private="sends how often a client's tokens activated each expert",
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's k_i active experts and the rescaler s_i."""
        model.require_experts("FLAME")
        settings, active = self.settings, require_within_top_k(model, budget)
        return AdapterPlan((settings.lora, *self._rescaler(model.top_k / active)), active)

    def _rescaler(self, ratio: float) -> tuple[AdapterPart, ...]:
        """Returns the part of a plan with s_i, whose static value is k / k_i; nothing for `none`."""
        if self.settings.rescaler == "none":
            return ()
        return (
            OutputScale("fixed", ratio) if self.settings.rescaler == "static" else OutputScale(self.settings.rescaler),
        )

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1; every budget's mean s starts at 1."""
        plans = [self.plan(model, budget) for budget in roster.budgets]
        lora, scales = split_scales(initial_adapter(model, plans[0], rng))
        means = {
            f"{budget.name}/{RESCALER}/{name}": scale for budget in roster.budgets for name, scale in scales.items()
        }
        return Payload.of({ADAPTER: lora, "budget": means})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 5."""
        load_received(cohort)
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, work.memory.tensors)  # its own s_i
        uploads = []
        for slot, trained in enumerate(train(cohort)):
            lora, scales = split_scales(trained.part(ADAPTER))
            cohort.keep(slot, scales)
            frequency = activation_frequency(cohort, slot, self.settings.frequency)
            uploads.append(Payload.of({ADAPTER: lora, RESCALER: scales, ROUTING: frequency}))
        return uploads

    def terms(self, sent: Upload) -> Terms:
        """Lines 6 to 8; gamma_i and s_i stay with the client of a secure round."""
        return mean_by_expert(ADAPTER, sent, self.gamma(sent)) | mean_of_budget(RESCALER, sent)

    def gamma(self, upload: Upload) -> dict[str, Tensor]:
        """Returns each layer's gamma_i [M] = (a_i^j / S_i)^t |D_i|, by the path of its experts (Eq. 6)."""
        active = upload.client.budget.active_experts if self.settings.frequency_by_active else 1
        frequency = {experts: share / active for experts, share in upload.payload.part(ROUTING).items()}
        return activation_weights(frequency, upload.client.examples, self.settings.temperature)

    def observe(self, state: Payload, model: ModelInfo) -> list[Observation]:
        """Returns the mean s of every budget's clients, by layer; nothing where none is learned."""
        by_budget: dict[str, list[Tensor]] = {}
        for name, scale in state.part("budget").items():
            by_budget.setdefault(name.partition("/")[0], []).append(scale.reshape(()))
        if not by_budget:
            return []
        values = torch.stack([torch.stack(scales) for scales in by_budget.values()])
        layers = [f"layer {index}" for index in range(values.shape[1])] if values.shape[1] > 1 else ["all layers"]
        return [Observation("rescaler s, mean of a budget's clients", values, list(by_budget), layers)]

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns A_i, B_i, s_i and a_i / S_i, each at most 1; of tokens, a layer's sum to k_i at most."""
        lora, scales = split_scales(trainable_shapes(model, self.plan(model, client.budget)))
        frequency = {layer.experts: (layer.num_experts,) for layer in model.moe}
        shares = Bound(1.0, client.budget.active_experts if self.settings.frequency == "token" else None)
        return Schema(entries(ADAPTER, lora) | entries(RESCALER, scales) | entries(ROUTING, frequency, shares))

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the global LoRA with the budget's k_i, and the client's own s_i or the mean of its budget's."""
        mean_scales = state.part(f"budget/{budget.name}/{RESCALER}")
        return Deployment(self.plan(model, budget), {**state.part(ADAPTER), **mean_scales, **own.kept.tensors})


def split_scales(tensors: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Returns an adapter without its output scales, and these."""
    scales = {name: value for name, value in tensors.items() if name.endswith(SHARED)}
    return {name: value for name, value in tensors.items() if name not in scales}, scales
