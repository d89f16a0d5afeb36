"""A3SMoE: active experts by budget, experts averaged by how often they were active.

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
    - An expert that no client activated keeps its global value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import activation_frequency, load_received, train
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes
from fedguild.payload import ADAPTER, ROUTING, Payload, with_part
from fedguild.secure.form import Contribution, Form
from fedguild.server.aggregation import WeightedMean, activation_weights, weights_by_name
from fedguild.server.limits import require_within_top_k
from fedguild.server.linear import (
    EXAMPLES,
    SecureMeans,
    changes_of,
    means_by_expert,
    one,
    used_by_expert,
    weights_by_expert,
)
from fedguild.server.method import RUNNING_MEAN, Method, Upload, in_part
from fedguild.server.settings import Alpha, LoraSettings
from fedguild.server.uploads import moved_adapter
from fedguild.server.validation import Bound


class A3SmoeSettings(LoraSettings):
    """The options of A3SMoE; the LoRA rank is the same for every budget."""

    alpha: Alpha = 20.0


class A3Smoe(Method):
    """Active experts by budget with activation-aware averaging; see the module's docstring."""

    Settings = A3SmoeSettings
    settings: A3SmoeSettings
    needs_experts = True
    costs = RUNNING_MEAN
    is_stepped = True
    not_private = "sends how often a client's tokens activated each expert"

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's K_c active experts."""
        model.require_experts("A3SMoE")
        return AdapterPlan((self.settings.lora,), require_within_top_k(model, budget))

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1."""
        plans = [self.plan(model, budget) for budget in budgets]
        return Payload.of({ADAPTER: initial_adapter(model, plans[0], rng)})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 5."""
        load_received(cohort)
        return [
            Payload({**upload.tensors, **with_part(ROUTING, activation_frequency(cohort, slot))})
            for slot, upload in enumerate(train(cohort))
        ]

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 6 and 7, as running means over the uploads."""
        mean = WeightedMean()
        for upload in uploads:
            trained, examples = upload.payload.part(ADAPTER), float(upload.client.examples)
            activations = activation_weights(upload.payload.part(ROUTING), examples, temperature=1.0)
            mean.add(trained, weights_by_name(trained, activations, examples))
        return Payload.of({ADAPTER: mean.result(state.part(ADAPTER))})

    def linear_form(self, model: ModelInfo, budgets: Sequence[Budget]) -> Form:
        """Lines 6 and 7."""
        shapes = trainable_shapes(model, self.plan(model, budgets[0]))
        means = means_by_expert(ADAPTER, shapes, {layer.experts: layer.num_experts for layer in model.moe})
        return Form(means, {EXAMPLES: 1, **weights_by_expert(means)})

    def linear_terms(self, model: ModelInfo, client: ClientInfo, download: Payload, upload: Payload) -> Contribution:
        """Returns theta_c and its weights; f_c stays with the client."""
        changes = changes_of(ADAPTER, upload.part(ADAPTER), download.part(ADAPTER))
        activations = activation_weights(upload.part(ROUTING), float(client.examples), temperature=1.0)
        return Contribution(changes, {EXAMPLES: one(client.examples), **used_by_expert(changes, activations)})

    def aggregate_means(self, state: Payload, means: SecureMeans) -> Payload:
        """Lines 6 and 7; an expert that too few clients activated keeps its global value."""
        return Payload.of({ADAPTER: moved_adapter(state, means)})

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of theta_c and f_c."""
        frequency = {layer.experts: (layer.num_experts,) for layer in model.moe}
        return {**super().expected_upload(model, client, download), **in_part(ROUTING, frequency)}

    def bounds(self, model: ModelInfo, client: ClientInfo) -> Mapping[str, Bound]:
        """Returns that a layer's f_c sum to K_c at most."""
        return {ROUTING: Bound(largest=1.0, total=client.budget.active_experts)}
