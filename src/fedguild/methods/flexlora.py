"""FlexLoRA: LoRA with a rank by budget, averaged as products and cut by their SVD.

J. Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", NeurIPS 2024.

The algorithm, in our words:
    1  server: start LoRA of the highest rank r (A random, B = 0)
    2  each round, for the sampled clients c:
    3      server: send A_c = A[:r_c], B_c = B[:, :r_c]; after the first round these are
               B_c = U[:, :r_c] S[:r_c] / s_c,  A_c = V^T[:r_c]
    4      client: minimise the mean loss with s_c B_c A_c on every adapted layer
    5      server: Delta W = sum_c p_c s_c B_c A_c
    6      server: U S V^T = Delta W, the singular value decomposition, up to rank r

Symbols: r_c `budget.rank`, r `rank`, s_c `scale_of` (alpha / r_c unless `scale` says otherwise),
p_c = n_c / sum n over the round's clients, Delta W `weighted_product`, U S V^T `decompose`.

Readings and deviations (docs/methods/flexlora.md):
    - Delta W is never formed. Its rank is at most sum r_c, so QR of the clients' stacked factors and
      the decomposition of a small matrix give the same U, S, V. Each expert is decomposed separately.
    - The state holds U S and V^T up to rank r: truncations of a singular value decomposition are
      nested, so that every budget's is a slice of it. The sign of a pair of singular vectors is fixed.
    - Every client's scale, by default alpha / r_c of its own rank, is folded into Delta W and undone for
      the next client. (The released code never calls the helper that changes the ranks.)
    - If the clients' ranks add up to less than r, the remaining rows are the previous A made
      orthogonal to the others, with B = 0; a null-space vector of the whole Delta W would do as well.
    - If no client of the round has an example, the global model stays.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.payload import ADAPTER, Payload
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.server.aggregation import truncate_rank
from fedguild.server.limits import require_within_rank
from fedguild.server.low_rank import Factors, by_module, decompose, named, stack, truncate, weighted_product
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, Own, Roster, ServerCosts
from fedguild.server.settings import UnequalRanksSettings
from fedguild.server.terms import Upload
from fedguild.server.uploads import collected, scaled_products


class FlexLoRASettings(UnequalRanksSettings):
    """The options of FlexLoRA; `rank` is also the highest that the server keeps."""


class FlexLoRA(Method):
    """LoRA of unequal ranks, averaged as products; see the module's docstring.

    The state is A and B of rank r with Delta W = B A, the scale in B.
    """

    Settings = FlexLoRASettings
    facts = Facts(
        costs=ServerCosts(
            "O(C n): all factors are stacked",
            "O((in + out) R² + R³) a module, R the sum of the clients' ranks",
            holds="all",
        ),
        not_private="",  # its uploads are the received adapters, after plain training
        not_linear="it decomposes the mean of the clients' products B A, a sum as large as the layers",
    )
    settings: FlexLoRASettings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at the budget's rank with its scale; all of the model's experts stay active."""
        require_within_rank(budget, self.settings.rank)
        return AdapterPlan((self.settings.lora_of(budget),))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1; Delta W is 0."""
        plans = [self.plan(model, budget) for budget in roster.budgets]
        return Payload.of({ADAPTER: initial_adapter(model, plans[0].with_lora(rank=self.settings.rank), rng)})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3."""
        return Payload.of({ADAPTER: self.deploy(state, model, client.budget).tensors})

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 5 and 6, the clients in their order; holds all uploads, but one module's sum at a time."""
        parts = scaled_products(collected(uploads), self.settings.scale_of)
        if not parts:
            return state
        before = by_module(state.part(ADAPTER))
        products = weighted_product(parts)
        return Payload.of(
            {ADAPTER: named({module: self._leading(product, before[module]) for module, product in products})}
        )

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the best approximation of Delta W at the budget's rank, in LoRA's scale."""
        lora = self.plan(model, budget).lora
        truncated = by_module(truncate_rank(state.part(ADAPTER), lora.rank))
        scaled = {module: Factors(factors.down, factors.up / lora.scale) for module, factors in truncated.items()}
        return Deployment(AdapterPlan((lora,)), named(scaled))

    def _leading(self, product: Factors, before: Factors) -> Factors:
        """Returns the first r singular triplets of a product as U S and V^T (line 6)."""
        if product.rank < self.settings.rank:
            product = stack([(product, 1.0), (Factors(before.down, torch.zeros_like(before.up)), 1.0)])
        leading = truncate(decompose(product), self.settings.rank)
        beyond = self.settings.rank - leading.rank  # a layer narrower than r
        return Factors(pad(leading.down, (0, 0, 0, beyond)), pad(leading.up, (0, beyond)))
