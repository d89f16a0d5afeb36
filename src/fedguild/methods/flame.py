"""FLAME: full-rank LoRA for everybody, fewer active experts for those with less compute.

K. Le, T. Tran, T. Hua, N. V. Chawla, "FLAME: Towards Federated Fine-Tuning Large Language Models
Through Adaptive SMoE".

The algorithm, in our words (Sections 2.1-2.2):
    1  server: start LoRA of rank r (A random, B = 0) on attention, routers and experts
    2  each round, for the sampled clients i:
    3      client: A_i = A, B_i = B                                              (Eq. 1)
    4      client: minimise the mean loss with k_i active experts, where a layer gives
               h = s_i sum_j R_i(x, k_i)^j (W^j x + A_i^j B_i^j x)              (Eq. 5)
           and s_i, the rescaler, is learned along and stays with the client
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
    - The clients' s_i are not averaged into anybody's training. They are uploaded (one number per
      layer) so that the global model can be evaluated at a budget with the mean s of its clients.
    - Where no client activated an expert, it keeps its global value; 0^0 = 1, so t = 0 is Eq. 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

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
from fedguild.model.plan import AdapterPlan, ModelInfo, OutputScaleKind, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.aggregation import WeightedMean, activation_weights, weights_by_name
from fedguild.server.method import Deployment, State, Upload

RESCALER = "rescaler"
OUTPUT_SCALE: Mapping[str, OutputScaleKind] = {
    "per_layer": "per_layer",
    "shared": "shared",
    "static": "fixed",
    "none": "none",
}


class FlameSettings(BaseModel):
    """The options of FLAME."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(20, ge=1, description="LoRA rank r, the same for every budget")
    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; the scale is alpha / rank")
    targets: tuple[str, ...] = Field(
        ("attention", "router", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
    rescaler: Literal["per_layer", "shared", "static", "none"] = Field(
        "per_layer",
        description="s_i: learned per layer, one learned number, the static ratio k / k_i, or none (Table 5)",
    )
    temperature: float = Field(2.0, ge=0, description="t of Eq. 6; 0 is averaging by size, 2 to 4 the paper's advice")
    frequency: Literal["token", "step"] = Field(
        "token", description="what a_i^j / S_i counts: tokens, or optimizer steps with at least one activation"
    )


class Flame:
    """Adaptive active experts with activation-aware averaging; see the module's docstring."""

    name: ClassVar[str] = "flame"
    title: ClassVar[str] = "FLAME: full-rank LoRA, active experts by budget, activation-aware averaging"
    needs_experts: ClassVar[bool] = True
    Settings: ClassVar[type[BaseModel]] = FlameSettings

    def __init__(self, settings: FlameSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's k_i active experts and the rescaler s_i."""
        model.require_experts("FLAME")
        active = require_within_top_k(model, budget)
        return AdapterPlan(
            rank=self.settings.rank,
            scale=self.settings.alpha / self.settings.rank,
            targets=self.settings.targets,
            active_experts=active,
            output_scale=OUTPUT_SCALE[self.settings.rescaler],
            output_scale_start=model.top_k / active if self.settings.rescaler == "static" else 1.0,
        )

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> State:
        """Line 1; every budget's mean s starts at 1."""
        tensors = initial_adapter(model, self.plan(model, budgets[0]), rng)
        scales = {name: tensors.pop(name) for name in list(tensors) if _is_scale(name)}
        for budget in budgets:
            self.plan(model, budget)
        means = {f"{budget.name}/{name}": scale for budget in budgets for name, scale in scales.items()}
        return State({**with_part(ADAPTER, tensors), **with_part(RESCALER, means)})

    def download(self, state: State, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: the full global LoRA, whatever the budget; never a rescaler."""
        return Payload(with_part(ADAPTER, Payload(state.tensors).part(ADAPTER)))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 5."""
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, work.download.part(ADAPTER))
            cohort.load(slot, work.memory.tensors)
        for step in cohort.steps():
            nll = step.forward()
            step.backward(nll)
            step.apply()
        return [self._upload(cohort, slot) for slot in range(len(cohort.work))]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of A_i, B_i, s_i and a_i."""
        shapes = trainable_shapes(model, self.plan(model, client.budget))
        scales = {name: shapes.pop(name) for name in list(shapes) if _is_scale(name)}
        return {
            **in_part(ADAPTER, shapes),
            **in_part(RESCALER, scales),
            **in_part(ROUTING, {layer.experts: (layer.num_experts,) for layer in model.moe}),
        }

    def aggregate(self, state: State, uploads: Iterable[Upload]) -> State:
        """Lines 6 to 8, as running means over the uploads."""
        adapter, rescaler = WeightedMean(), WeightedMean()
        for upload in uploads:
            tensors = upload.payload.part(ADAPTER)
            adapter.add(tensors, weights_by_name(tensors, self.gamma(upload), float(upload.client.examples)))
            own = upload.payload.part(RESCALER)
            rescaler.add({f"{upload.client.budget.name}/{name}": value for name, value in own.items()}, 1.0)
        before = Payload(state.tensors)
        return State(
            {
                **with_part(ADAPTER, adapter.result(before.part(ADAPTER))),
                **with_part(RESCALER, rescaler.result(before.part(RESCALER))),
            }
        )

    def gamma(self, upload: Upload) -> dict[str, Tensor]:
        """Returns each layer's gamma_i [M] = (a_i^j / S_i)^t |D_i|, by the path of its experts (Eq. 6)."""
        frequency = upload.payload.part(ROUTING)
        return activation_weights(frequency, upload.client.examples, self.settings.temperature)

    def deploy(self, state: State, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the global LoRA with the budget's k and the mean s of its clients."""
        tensors = Payload(state.tensors)
        own = {
            name.removeprefix(f"{budget.name}/"): value
            for name, value in tensors.part(RESCALER).items()
            if name.startswith(f"{budget.name}/")
        }
        return Deployment(self.plan(model, budget), {**tensors.part(ADAPTER), **own})

    def excerpt(self, state: State, model: ModelInfo, client: ClientInfo) -> State:
        """Returns the global LoRA and the mean s of the client's own budget, which may have few clients."""
        own = f"{RESCALER}/{client.budget.name}/"
        return State({name: value for name, value in state.tensors.items() if name.startswith((f"{ADAPTER}/", own))})

    def personalize(self, state: State, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the global LoRA with the client's own k_i and s_i."""
        deployment = self.deploy(state, model, client.budget)
        return Deployment(deployment.plan, {**deployment.tensors, **memory.tensors})

    def _upload(self, cohort: Cohort, slot: int) -> Payload:
        tensors = cohort.read(slot)
        scales = {name: tensors.pop(name) for name in list(tensors) if _is_scale(name)}
        cohort.keep(slot, scales)
        return Payload(
            {
                **with_part(ADAPTER, tensors),
                **with_part(RESCALER, scales),
                **with_part(ROUTING, activation_frequency(cohort, slot, self.settings.frequency)),
            }
        )


def _is_scale(name: str) -> bool:
    return name.endswith("output_scale")
