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

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import activation_frequency, load_received, train
from fedguild.core.payload import ADAPTER, ROUTING, Payload, with_part
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.server.aggregation import activation_weights
from fedguild.server.limits import require_within_top_k
from fedguild.server.method import RUNNING_MEAN, Facts, Method
from fedguild.server.schema import Bound, Schema, entries
from fedguild.server.settings import Alpha, LoraSettings
from fedguild.server.terms import Terms, Upload, mean_by_expert


class A3SmoeSettings(LoraSettings):
    """The options of A3SMoE; the LoRA rank is the same for every budget."""

    alpha: Alpha = 20.0


class A3Smoe(Method):
    """Active experts by budget with activation-aware averaging; see the module's docstring."""

    Settings = A3SmoeSettings
    settings: A3SmoeSettings
    facts = Facts(
        needs_experts=True,
        costs=RUNNING_MEAN,
        not_private="sends how often a client's tokens activated each expert",
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's K_c active experts."""
        model.require_experts("A3SMoE")
        return AdapterPlan((self.settings.lora,), require_within_top_k(model, budget))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 5."""
        load_received(cohort)
        return [
            Payload({**upload.tensors, **with_part(ROUTING, activation_frequency(cohort, slot))})
            for slot, upload in enumerate(train(cohort))
        ]

    def terms(self, sent: Upload) -> Terms:
        """Lines 6 and 7; an expert that no client activated keeps its global value."""
        weights = activation_weights(sent.payload.part(ROUTING), float(sent.client.examples), temperature=1.0)
        return mean_by_expert(ADAPTER, sent, weights)

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the default, and each expert's share of the tokens."""
        frequency = {layer.experts: (layer.num_experts,) for layer in model.moe}
        adapter = super().schema(model, client, download, round_index).tensors
        return Schema({**adapter, **entries(ROUTING, frequency, Bound(1.0, client.budget.active_experts))})
