"""FLoRIST: LoRA with a rank by budget, stacked and cut by singular value thresholding.

H. Ramesh, J. Dass, "FLoRIST: Singular Value Thresholding for Efficient and Accurate Federated
Fine-Tuning of Large Language Models", arXiv:2506.09199, 2025.

The algorithm, in our words:
    1  each round, for the sampled clients c:
    2      client: LoRA of its own rank r_c: fresh, or cut from the global pair (`next_round`)
    3      client: minimise the mean loss with s_c B_c A_c on every adapted layer
    4      server: stack B A = sum_c p_c s_c B_c A_c, as FLoRA does
    5      server: B = U_B S_B V_B, A = U_A S_A V_A, P = S_B V_B U_A S_A = U_P S_P V_P   (R x R)
    6      server: p = min{k: sum_(j<=k) sigma_j^2 / sum_j sigma_j^2 >= tau}, sigma = diag S_P
    7      server: B_g = U_B U_P S_P[:, :p],  A_g = (V_P V_A)[:p]
    8      server: send one pair B_g, A_g to all; everyone merges W_(t+1) = W_t + B_g A_g

Symbols: r_c `budget.rank`, s_c `scale_of`, p_c = n_c / sum n, tau `threshold`, p `counts`; line 5 is
`decompose`, lines 6 and 7 `thresholded`.

Readings and deviations (docs/methods/florist.md):
    - Line 5 takes QR of each factor in place of its singular value decomposition: U_B U_P, S_P and
      V_P V_A are the same, and half of the work is saved.
    - p is chosen for every module. Experts that share a tensor each have their own p, and the tensor has
      the largest of them: the other experts' pairs end in zeros.
    - `next_round: truncate` keeps no history: the global pair is the model, a client starts from its
      first r_c ranks (scale undone), and ranks that the pair does not have start fresh, B = 0 there.
    - A stack of nothing but zeros has no p (0 / 0); it gets p = 1 and stays zero.
    - Every budget runs the whole pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.fresh_adapter import ADAPTER_SEED, fresh_adapter, fresh_seed
from fedguild.client.training import train
from fedguild.core.payload import Payload, with_part
from fedguild.core.seeding import new_seed
from fedguild.model.adapters.lora import Lora
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes, zero_adapter
from fedguild.server.aggregation import pad_rank
from fedguild.server.low_rank import Factors, Svd, by_module, decompose, named, weighted_product
from fedguild.server.merge_history import HISTORY_COST, appended, delivery, echoed, merges, no_merges, with_echo
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, NotPrivate, Own, Roster, ServerCosts
from fedguild.server.schema import Schema
from fedguild.server.settings import AnyRanksSettings
from fedguild.server.terms import Upload
from fedguild.server.uploads import collected, scaled_products

PAIR = "pair"
"""The part of the state and of downloads with B_g and A_g, where they are not merged."""
COUNT = "rounds_aggregated"
"""The state's scalar that makes every round's fresh adapters differ."""


class FloristSettings(AnyRanksSettings):
    """The options of FLoRIST; the released code's scale is 2."""

    threshold: float = Field(0.9, gt=0, le=1, description="tau, the share of the squared singular values that is kept")
    next_round: Literal["merge", "truncate"] = Field(
        "merge",
        description="use of the pair in the next round: merged into the backbone under a fresh LoRA, or as the LoRA "
        "that clients start from at their rank",
    )


class Florist(Method):
    """Stacked LoRA of unequal ranks, cut by singular value thresholding; see the module's docstring.

    The state is the history of the pairs, or with `next_round: truncate` the newest pair alone.
    """

    Settings = FloristSettings
    facts = Facts(
        costs=ServerCosts(
            f"O(C n): all uploads, and one module's stack of rank R = sum of the clients' ranks; {HISTORY_COST}",
            "O((in + out) R² + R³) a module",
            holds="all",
            varies="at most",
            bound={"threshold": 1.0},
            note="The threshold keeps as many ranks as the uploads need; all of them are counted.",
            rounds=3,
        ),
        not_private=NotPrivate(client="starts a round from an adapter that was not received"),
        not_linear="it stacks every client's own A and B side by side",
    )
    settings: FloristSettings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at the budget's rank with its scale; all of the model's experts stay active."""
        return AdapterPlan((self.settings.lora_of(budget),), merges=self.settings.next_round != "truncate")

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Returns the state of the published backbone, without a pair."""
        for budget in roster.budgets:
            trainable_shapes(model, self.plan(model, budget))
        unchanged = no_merges()
        return Payload(unchanged.tensors, {**unchanged.scalars, ADAPTER_SEED: new_seed(rng), COUNT: 0})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 8: the pairs to merge that the client lacks, or the one that it trains on; and a seed for line 2."""
        lacking = delivery(state, client)
        seed = fresh_seed(int(state.scalars[ADAPTER_SEED]), int(state.scalars[COUNT]), client)
        pair = with_part(PAIR, state.part(PAIR))
        return Payload({**lacking.tensors, **pair}, {**lacking.scalars, ADAPTER_SEED: seed})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 2 and 3."""
        model = cohort.model
        for slot, (work, plan) in enumerate(zip(cohort.work, model.plans, strict=True)):
            fresh = fresh_adapter(model.backbone.info, plan, int(work.download.scalars[ADAPTER_SEED]))
            pair = work.download.part(PAIR)
            cohort.load(slot, at_rank(pair, fresh, plan.lora.scale) if pair else fresh)
        return echoed(train(cohort), cohort.work)

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 4 to 7; holds all uploads, but one module's stack at a time."""
        received = collected(uploads)
        parts = scaled_products(received, self.settings.scale_of)
        if not parts:
            return state
        pair = {
            module: thresholded(decompose(stacked), self.settings.threshold)
            for module, stacked in weighted_product(parts)
        }
        counted = {**state.scalars, COUNT: int(state.scalars[COUNT]) + 1}
        if self.settings.next_round == "truncate":
            return Payload({**state.tensors, **with_part(PAIR, named(pair))}, counted)
        merged = appended(state, pair, received)
        return Payload(merged.tensors, {**counted, **merged.scalars})

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the default, and the version that the client trained on."""
        return with_echo(super().schema(model, client, download, round_index), download)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the backbone with all pairs merged, or the whole newest pair on it; the same for every budget."""
        pair = state.part(PAIR)
        if not pair:
            plan = self.plan(model, budget)
            return Deployment(plan, zero_adapter(model, plan), merges(state))
        rank = max(factors.rank for factors in by_module(pair).values())
        return Deployment(AdapterPlan((Lora(rank, 1.0, self.settings.targets),)), pad_rank(pair, rank))


def thresholded(svd: Svd, threshold: float) -> Factors:
    """Returns the first p singular triplets, whose squares sum up to the threshold's share (lines 6 and 7).

    Args:
        svd: Of a product [.., out, in]; every leading index has its own p.
        threshold: tau, above 0 and up to 1.

    Returns:
        A_g [.., p, in] and B_g [.., out, p], p the largest of all; beyond its own p a product has zeros.
    """
    energy = svd.s.double().square().cumsum(-1)
    share = energy / energy[..., -1:]
    counts = torch.where(energy[..., -1] > 0, (share < threshold).sum(-1) + 1, 1)
    rank = int(counts.max())
    kept = (torch.arange(rank, device=counts.device) < counts[..., None]).to(svd.s.dtype)
    return Factors(
        svd.vh[..., :rank, :] * kept[..., None], svd.u[..., :rank] * (svd.s[..., :rank] * kept)[..., None, :]
    )


def at_rank(pair: Mapping[str, Tensor], fresh: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Returns a client's initial LoRA at its own rank; `scale` times its product is the truncated global pair's.

    Args:
        pair: The global A_g [.., p, in] and B_g [.., out, p] of every module.
        fresh: An A [.., r, in] and B = 0 [.., out, r] of every module; A fills the ranks that the pair lacks.
        scale: The client's s_c.
    """
    start = dict(fresh)
    for name, drawn in fresh.items():
        axis = -2 if name.endswith("lora_A") else -1
        rank = min(drawn.shape[axis], pair[name].shape[axis])
        given = pair[name].narrow(axis, 0, rank).to(drawn)
        if axis == -2:
            is_given = given.abs().sum(-1, keepdim=True) > 0
            given = torch.where(is_given, given, drawn.narrow(axis, 0, rank))
        else:
            given = given / scale
        start[name] = torch.cat([given, drawn.narrow(axis, rank, drawn.shape[axis] - rank)], dim=axis)
    return start
