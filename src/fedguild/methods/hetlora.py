"""HetLoRA: LoRA with a rank by budget, self-pruning, weights by norm.

Y. J. Cho, L. Liu, Z. Xu, A. Fahrezi, G. Joshi, "Heterogeneous LoRA for Federated Fine-tuning of
On-Device Foundation Models", EMNLP 2024.

The algorithm, in our words:
    1  server: start LoRA of the highest rank r (A random, B = 0); r_k = the rank of client k's budget
    2  each round, for the sampled clients k:
    3      server: truncate, A_k = A[:r_k], B_k = B[:, :r_k]
    4      client: minimise nll + lambda sum ||B_k[:, t:]|| ||A_k[t:]||,  t = floor(gamma r_k)
    5      client: if sum ||B_k[:, t:]|| ||A_k[t:]|| is below its value at line 3, prune:
               r_k = max(r_min, t), A_k = A_k[:r_k], B_k = B_k[:, :r_k]
    6      server: w_k = ||B_k A_k|| / sum_k ||B_k A_k||
    7      server: A = sum_k w_k pad(A_k), B = sum_k w_k pad(B_k), padded to r with zeros

All norms are Frobenius norms; the sums of lines 4 and 5 are over all adapted matrices, each expert's
its own. Symbols: lambda `penalty_weight`, gamma `gamma`, r_min `minimum_rank`, t `tail_start`,
r_k `client/INDEX/rank` in the state, w_k `weights`.

Readings and deviations (docs/methods/hetlora.md):
    - The penalty has gradients; the only released code of it (FlexLoRA's authors) takes it on
      detached tensors, where it changes nothing.
    - A client prunes where the product fell strictly below the received one. In its first round B = 0 and so is the
      product, so no client prunes.
    - The norm of line 6 is that of the whole client, the root of the sum of squares over its
      matrices; `norm_scope: module` weighs every matrix by its own. If all norms are 0, nobody has
      trained, and the global values stay. `weights: size` weighs by the number of examples, as FlexLoRA's authors do.
    - By default one scale alpha / r for all ranks, so that a rank has the same meaning for every client. With
      `scale: own` the factors are averaged as they are, as in the released code, and each client runs them at
      alpha / r_k of its budget's rank, which pruning does not change.
    - Ranks that no client of the round holds keep their global value, and so do those whose holders have
      no weight; zeros in A and B alike would never train again.
    - A pruned rank stays pruned. The server learns of it from the upload, which then lacks the part
      `tail`. Training keeps the budget's storage: ranks beyond r_k are zero in A and in B, so that
      neither has a gradient and they stay zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import train
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.model.adapters.storage import SlotTensor
from fedguild.model.info import ModelInfo
from fedguild.model.on_device import kept_on_device
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes
from fedguild.server.aggregation import Weight, pad_rank, rank_axis, truncate_rank
from fedguild.server.limits import require_within_rank
from fedguild.server.low_rank import DOWN, UP, Factors, accurate, by_module
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, Observation, Own, Roster, ServerCosts
from fedguild.server.schema import Schema, entries
from fedguild.server.settings import Scale, UnequalRanksSettings
from fedguild.server.terms import RANK, Means, Terms, Upload, mean_of_padded

TAIL = "tail"
"""The payload part with the ranks of a client's adapter that it loses if it is pruned; left out if it was."""


class HetLoRASettings(UnequalRanksSettings):
    """The options of HetLoRA; the released code's scale is `own`, 16 / a client's rank."""

    scale: Scale = "common"

    penalty_weight: float = Field(1e-3, ge=0, description="lambda, weight of the penalty on a client's last ranks")
    gamma: float = Field(0.99, gt=0, le=1, description="share of a client's ranks that penalty and pruning spare")
    minimum_rank: int = Field(1, ge=1, description="r_min, the rank below which no client is pruned")
    pruning: bool = Field(True, description="whether a client gives up its last ranks if training shrank them")
    weights: Literal["norm", "size"] = Field(
        "norm", description="a client's weight in the average: the norm of its product BA, or its number of examples"
    )
    norm_scope: Literal["client", "module"] = Field(
        "client", description="norm for the weights: the whole client's, or that of every adapted matrix separately"
    )


class HetLoRA(Method):
    """LoRA of unequal ranks with self-pruning and sparsity weights; see the module's docstring."""

    Settings = HetLoRASettings
    settings: HetLoRASettings
    facts = Facts(
        costs=ServerCosts(
            "O(n): a running mean at the highest rank",
            "O(C n r) for the norms of the products",
            varies="at most",
            note="Pruning takes ranks from a client for good; none is counted.",
        ),
        not_private="tells by the form of an upload whether training shrank the client's last ranks",
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at the budget's rank, the highest that its clients ever have; all experts stay active."""
        require_within_rank(budget, self.settings.rank)
        return AdapterPlan((self.settings.lora_of(budget),))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1: every client's rank is its budget's."""
        plans = [self.plan(model, budget) for budget in roster.budgets]
        adapter = initial_adapter(model, plans[0].with_lora(rank=self.settings.rank), rng)
        ranks = {rank_name(client): torch.tensor(client.budget.rank) for client in roster.clients}
        return Payload({**with_part(ADAPTER, adapter), **ranks})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3."""
        return self._parted(self._truncated(state, client))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 4 and 5."""
        adapters = [whole_adapter(work.download) for work in cohort.work]
        for slot, adapter in enumerate(adapters):
            cohort.load(slot, pad_rank(adapter, cohort.model.plans[slot].lora.rank))
        ranks = [rank_of(adapter) for adapter in adapters]
        starts = [tail_start(self.settings.gamma, rank) for rank in ranks]
        received = tail_products(cohort.trainables, starts).detach()

        def penalty() -> Tensor:
            return self.settings.penalty_weight * tail_products(cohort.trainables, starts)

        train(cohort, penalty if self.settings.penalty_weight else None)
        shrunk = (tail_products(cohort.trainables, starts).detach() < received).tolist()
        trained = [truncate_rank(cohort.read(slot), rank) for slot, rank in enumerate(ranks)]
        return [self._parted(adapter, prune=shrunk[slot]) for slot, adapter in enumerate(trained)]

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns A_k, B_k at the pruned rank, and the tail that pruning leaves out."""
        plan, rank = self.plan(model, client.budget), rank_of(whole_adapter(download))
        kept = self.pruned(rank)
        head = entries(ADAPTER, trainable_shapes(model, plan.with_lora(rank=kept)))
        if kept == rank:
            return Schema(head)
        tail = trainable_shapes(model, plan.with_lora(rank=rank - kept))
        return Schema(head | entries(TAIL, tail, omissible=True))

    def terms(self, sent: Upload) -> Terms:
        """Lines 6 and 7: the client weighs itself, and holds the ranks that it was not pruned of."""
        adapter = whole_adapter(sent.payload)
        terms = mean_of_padded(ADAPTER, sent, adapter, self.settings.rank, self._weights(adapter, sent.client))
        if self.settings.norm_scope == "client":
            return terms
        return replace(terms, secure=False, why="method.norm_scope=module gives every matrix a weight of its own")

    def update(self, state: Payload, means: Means) -> Payload:
        """Line 7; ranks whose holders have no weight keep their global value."""
        ranks = {rank_name(each.client): each.held[RANK].sum() for each in means.contributors}
        return Payload({**state.tensors, **with_part(ADAPTER, means.moved(ADAPTER, state.part(ADAPTER))), **ranks})

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the global A, B truncated to the budget's rank, or to the client's own, pruned or not."""
        plan, adapter = self.plan(model, budget), state.part(ADAPTER)
        rank = plan.lora.rank if own is GLOBAL else next(iter(ranks_of(state).values()))
        return Deployment(plan.with_lora(rank=rank), truncate_rank(adapter, rank))

    def observe(self, state: Payload, model: ModelInfo) -> Sequence[Observation]:
        """Returns every client's rank."""
        ranks = ranks_of(state)
        return [Observation("rank", torch.tensor([*ranks.values()]).float(), [f"client {index}" for index in ranks])]

    def pruned(self, rank: int) -> int:
        """Returns the rank after pruning, max(r_min, floor(gamma r)); the rank itself where nothing is pruned."""
        if not self.settings.pruning:
            return rank
        return min(rank, max(self.settings.minimum_rank, tail_start(self.settings.gamma, rank)))

    def _truncated(self, state: Payload, client: ClientInfo) -> dict[str, Tensor]:
        """Returns the global A, B truncated to the client's own rank."""
        return truncate_rank(state.part(ADAPTER), int(state.tensors[rank_name(client)]))

    def _parted(self, adapter: Mapping[str, Tensor], *, prune: bool = False) -> Payload:
        """Returns an adapter as it is sent: the ranks that pruning keeps and, unless it is to be pruned, the tail."""
        rank = rank_of(adapter)
        kept = self.pruned(rank)
        head = with_part(ADAPTER, truncate_rank(adapter, kept))
        if prune or kept == rank:
            return Payload(head)
        tail = {name: value.narrow(_axis(name), kept, rank - kept) for name, value in adapter.items()}
        return Payload({**head, **with_part(TAIL, tail)})

    def _weights(self, adapter: Mapping[str, Tensor], client: ClientInfo) -> Weight | dict[str, Weight]:
        """Returns w_k before it is divided by its sum (line 6): one number, or one for each matrix."""
        if self.settings.weights == "size" or not client.examples:
            return float(client.examples)
        wide = {name: value.double() for name, value in adapter.items()}
        norms = {module: product_norm(factors) for module, factors in by_module(wide).items()}
        if self.settings.norm_scope == "client":
            return math.hypot(*(value for norm in norms.values() for value in norm.flatten().tolist()))
        return {f"{module}.{leaf}": norm for module, norm in norms.items() for leaf in (DOWN, UP)}


def tail_start(gamma: float, rank: int) -> int:
    """Returns floor(gamma r), a product that rounding leaves just below a whole number counted as that number."""
    return math.floor(gamma * rank + 1e-9)


def tail_products(trainables: Mapping[str, SlotTensor], starts: Sequence[int]) -> Tensor:
    """Returns [S], each slot's sum over its matrices of ||B[:, t:]|| ||A[t:]||, with gradients (line 4).

    The ranks beyond a slot's own are zero and add nothing. The gradient of a norm is 0 where the norm is.

    Args:
        trainables: `….lora_A` and `….lora_B` of all slots.
        starts: Each slot's t.
    """
    products = [
        _tail_norms(trainables[name], starts) * _tail_norms(trainables[f"{name.removesuffix(DOWN)}{UP}"], starts)
        for name in trainables
        if name.endswith(DOWN)
    ]
    return torch.stack([product.reshape(len(starts), -1).sum(1) for product in products]).sum(0)


def _tail_norms(tensor: SlotTensor, starts: Sequence[int]) -> Tensor:
    """Returns [S] or [S, M], the norm of each matrix's ranks from t on."""
    first = min(starts)
    by_rank = tensor.stored if tensor.swapped else tensor.stored.movedim(_axis(tensor.name), -2)  # [.., R, width]
    tail = by_rank.movedim(tensor.axis, 0)[..., first:, :]
    rows = torch.arange(first, by_rank.shape[-2], device=tail.device)
    in_tail = rows >= kept_on_device(tuple(starts), tail.device)[:, None]
    in_tail = in_tail.reshape(len(starts), *[1] * (tail.dim() - 3), len(rows), 1)
    norms: Tensor = torch.linalg.vector_norm(tail * in_tail, dim=(-2, -1))
    return norms


def rank_of(adapter: Mapping[str, Tensor]) -> int:
    """Returns the rank of an adapter, from the shape of any of its factors."""
    return next(value.shape[_axis(name)] for name, value in adapter.items() if name.endswith(DOWN))


def rank_name(client: ClientInfo) -> str:
    """Returns the name of a client's rank in the state."""
    return f"client/{client.index}/rank"


def ranks_of(state: Payload) -> dict[int, int]:
    """Returns client -> r_k, in the clients' order; of an excerpt the client's own alone."""
    ranks = {int(name.partition("/")[0]): int(rank) for name, rank in state.part("client").items()}
    return dict(sorted(ranks.items()))


def whole_adapter(payload: Payload) -> dict[str, Tensor]:
    """Returns A_k and B_k of a payload at the client's rank; a tail that is not whole is left out, as if pruned."""
    head, tail = payload.part(ADAPTER), payload.part(TAIL)
    if tail.keys() != head.keys():
        return head
    return {name: torch.cat([value, tail[name]], _axis(name)) for name, value in head.items()}


def _axis(name: str) -> int:
    axis = rank_axis(name)
    assert axis is not None, f"{name} has no rank"
    return axis


def product_norm(factors: Factors) -> Tensor:
    """Returns [..], the Frobenius norm of `up @ down`: √trace(upᵀ up · down downᵀ)."""
    down, up = accurate(factors)
    return ((up.mT @ up) * (down @ down.mT)).sum((-2, -1)).clamp(min=0).sqrt()
