"""FedEx-LoRA: averaged LoRA, its error merged into the backbone.

R. Singhal, K. Ponkshe, P. Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient
Fine-Tuning of Foundation Models", ACL 2025.

The algorithm, in our words:
    1  server: start LoRA of rank r (A random, B = 0)
    2  each round, for the sampled clients c:
    3      client: load the global A, B on the backbone W_t
    4      client: minimise the mean loss over its response tokens
    5      server: A = sum_c w_c A_c,  B = sum_c w_c B_c,  sum_c w_c = 1              (as FedIT)
    6      server: Delta W_res = sum_c w_c B_c A_c - B A
    7      everyone: W_(t+1) = W_t + s Delta W_res, so that W_(t+1) + s B A is the exact average

Symbols: r `rank`, s `scale`, w_c `weights` (1 / n, or |D_i| / sum |D|), Delta W_res `residual`.

Readings and deviations (docs/methods/fedex-lora.md):
    - The residual is sent as factors. As sum_c w_c (A_c - A) = 0, line 6 equals
      sum_(c<n) w_c (B_c - B_n)(A_c - A) over all clients but the last, n: its rank is (n - 1) r, where
      the paper's form has (n + 1) r, and it is exactly 0 where all clients agree.
    - One client alone leaves no residual, and nothing is merged.
    - A part of the backbone that no client changed (an expert that was never active) stays, bit by bit.
    - The released code transposes the residual, for GPT-2's Conv1D; on a square linear layer this adds the wrong
      matrix, so it is not followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.server.aggregation import WeightedMean
from fedguild.server.limits import active_experts_of
from fedguild.server.low_rank import Factors, by_module, stack
from fedguild.server.merge_history import HISTORY_COST, appended, delivery, echoed, merges, no_merges, with_echo
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, Own, Roster, ServerCosts
from fedguild.server.schema import Schema
from fedguild.server.settings import DropoutLoraSettings, Weights
from fedguild.server.terms import Upload
from fedguild.server.uploads import collected, shares_of


class FedExLoRASettings(DropoutLoraSettings):
    """The options of FedEx-LoRA; the LoRA rank is the same for every client."""

    scaling: Literal["rank", "root"] = Field(
        "rank", description="the scale s: alpha / rank, or alpha / sqrt(rank) (rsLoRA)"
    )
    weights: Weights = "uniform"

    @property
    def scale(self) -> float:
        """The factor s on the product B A."""
        return self.alpha / (self.rank if self.scaling == "rank" else math.sqrt(self.rank))


class FedExLoRA(Method):
    """Averaged LoRA with an exact residual; see the module's docstring.

    The state is the global A, B and the history of the residuals.
    """

    Settings = FedExLoRASettings
    facts = Facts(
        costs=ServerCosts(
            f"O(C n): the residual needs all uploads, as factors of rank (C - 1) r; {HISTORY_COST}",
            "O(C n)",
            holds="all",
            rounds=3,
        ),
        not_private="",  # its uploads are the received adapters, after plain training
        not_linear="it merges the products of every client's own A and B",
    )
    settings: FedExLoRASettings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA of the same rank for every budget, with the budget's active experts."""
        settings = self.settings
        lora = settings.lora
        return AdapterPlan((lora,), active_experts_of(model, budget), merges=True)

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        unchanged, adapter = no_merges(), initial_adapter(model, self.plan(model, roster.budgets[0]), rng)
        return Payload({**unchanged.tensors, **with_part(ADAPTER, adapter)}, unchanged.scalars)

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: the global A and B, and the residuals that the client lacks."""
        lacking = delivery(state, client)
        return Payload({**lacking.tensors, **with_part(ADAPTER, state.part(ADAPTER))}, lacking.scalars)

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        load_received(cohort)
        return echoed(train(cohort), cohort.work)

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 5 and 6; holds all uploads, as the residual needs the average first."""
        received = collected(uploads)
        shares = shares_of(received, self.settings.weights)
        if not shares:
            return state
        average = WeightedMean()
        parts = [(upload.payload.part(ADAPTER), share) for upload, share in zip(received, shares, strict=True)]
        for tensors, share in parts:
            average.add(tensors, share)
        adapter = average.result(state.part(ADAPTER))
        merged = appended(state, residual(parts, adapter, self.settings.scale), received)
        return Payload({**merged.tensors, **with_part(ADAPTER, adapter)}, merged.scalars)

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the default, and the version that the client trained on."""
        return with_echo(super().schema(model, client, download, round_index), download)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the global A, B on the backbone with all residuals."""
        return Deployment(self.plan(model, budget), state.part(ADAPTER), merges(state))


def residual(
    parts: Sequence[tuple[Mapping[str, Tensor], float]], average: Mapping[str, Tensor], scale: float
) -> dict[str, Factors]:
    """Returns module -> factors of s (sum_c w_c B_c A_c - B A) (line 6), of rank (n - 1) r; empty for one client.

    Args:
        parts: (A_c and B_c of every module, w_c) of n clients; the weights sum up to 1.
        average: A = sum_c w_c A_c and B of every module.
        scale: s, folded into the A side.
    """
    *others, (last, _) = [(by_module(tensors), weight) for tensors, weight in parts]
    if not others:
        return {}
    return {
        module: stack(
            (Factors(factors[module].down - mean.down, factors[module].up - last[module].up), scale * weight)
            for factors, weight in others
        )
        for module, mean in by_module(average).items()
    }
