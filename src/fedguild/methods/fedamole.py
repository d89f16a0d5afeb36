"""FedAMoLE: every client gets a mixture of LoRA experts of its own, and the experts choose their clients.

Y. Zhang, Z. Qin, Z. Wu, J. Hou, S. Deng, "Personalized Federated Fine-Tuning for LLMs via
Data-Driven Heterogeneous Model Architectures", NeurIPS 2025.

The algorithm, in our words (Section 4; m runs over the targeted linear layers, the modules):
    1  server: start a shared expert, E domain experts and a token projection W^t per module
       (A and W^t random, B = 0), and assign the experts by random scores (line 10)
    2  each round, for the sampled clients i:
    3      client: load the shared expert, W^t and the domain experts j with d_mij = 1
    4      client: put its embedding set aside, a disjoint part of its training data
    5      client: minimise NLL + beta sum_m |E_mi| sum_j f_mij p_mij             (Eq. 3, 19-21)
               over y = W h + B^s A^s h + sum of p_j B_j A_j h, the top-k^e j     (Eq. 4-9)
    6      client: over the embedding set, h^t_mi = mean of W^t h and
               h^e_mij = mean of A_j h; upload them with what it trained          (Eq. 11, 13)
    7      server: each domain expert, and its h^e_mj, is the mean over the
               clients that trained it; the shared expert and W^t over all        (Eq. 10, 12)
    8      server: s_mij = <h^t_mi, h^e_mj> / sqrt(r)                             (Eq. 14)
    9      server: P_mj = softmax of s_mij over the clients                       (Def. 4.1)
    10     server: D_m maximises <P_m, D_m>, where each client gets k^e to b
               experts and each expert goes to k^c clients                        (Def. 4.1)

Symbols: E `experts`, k^e `active_experts`, k^c `clients_per_expert`, b `experts_per_client`, beta
`balance`, D_m `assigned` [clients, experts], P_m `selection_probability`, h^t `token`, h^e `embedding`.

The variants of Table 3: -H `router: vanilla`, -S `shared_expert: false`, -R `assignment: fixed`,
Random `assignment: random`.

Readings and deviations (docs/methods/fedamole.md):
    - s is scaled by sqrt(r), the active weights are renormalised and alpha / r applies, as in the
      released code; `score_scale: hidden` and `renormalise: false` are the paper's text.
    - The program is solved exactly as a linear program (server/assignment.py).
    - A client that sits a round out keeps its last h^t in the program; one that never took part has
      the mean h^t of the others. An expert that nobody trained keeps its weights and its h^e, which
      is 0 before its first training: it prefers no client.
    - -H has no W^t: there s is the mean router logit of expert j over client i's embedding set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.embedding_privacy import privatised
from fedguild.methods.common import new_seed
from fedguild.model.adapters.mole import Held, Mixture, MixtureOfLora
from fedguild.model.adapters.mole_embeddings import Embeddings
from fedguild.model.adapters.mole_pool import STACK, held_experts, single_experts, stacked_experts
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.payload import Payload, with_part
from fedguild.seeding import numpy_rng, torch_rng
from fedguild.server.aggregation import WeightedMean
from fedguild.server.assignment import AssignmentRules, assign_experts, selection_probability
from fedguild.server.method import Deployment, Observation, Upload

COMMON = "common"
"""The payload part with the shared experts and W^t, which every client gets."""
EXPERTS = "experts"
"""The part with a client's domain experts by their ids: `{module}.experts.{id}.lora_A` [r, in], `.lora_B` [out, r]."""
TOKEN = "token_embedding"
"""The part with h^t_mi: for each module [r], or the mean logits [E] of a vanilla router."""
EXPERT = "expert_embedding"
"""The part with h^e_mij: for each module [held, r], in ascending order of the ids."""
FACTORS = ("lora_A", "lora_B")
EMBEDDING = "embedding"


class FedAMoLESettings(BaseModel):
    """The options of FedAMoLE."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(8, ge=1, description="LoRA rank r of every expert, and the width of the embeddings")
    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; the scale is alpha / rank")
    targets: tuple[str, ...] = Field(
        ("q_proj", "v_proj"),
        description="what gets a mixture: leaf names of linear layers, or the groups attention, mlp",
    )
    dropout: float = Field(0.05, ge=0, lt=1, description="dropout on the input of the experts")
    experts: int = Field(30, ge=1, description="E, domain experts in the pool of a module")
    active_experts: int = Field(
        2, ge=1, description="k^e, domain experts that a token activates, and the fewest that a client gets"
    )
    experts_per_client: int = Field(8, ge=1, description="b, most domain experts of a module that a client gets")
    clients_per_expert: int = Field(2, ge=1, description="k^c, clients that a domain expert goes to")
    scale_clients_per_expert: bool = Field(
        False, description="whether to raise k^c where it is too low for every client to get k^e experts, or refuse"
    )
    balance: float = Field(1e-3, ge=0, description="beta, weight of the load balance loss")
    score_scale: Literal["rank", "hidden"] = Field(
        "rank", description="what routing scores and relevance are divided by the root of: r, or the layer's width"
    )
    renormalise: bool = Field(True, description="whether the weights of a token's active experts sum to one")
    router: Literal["invariant", "vanilla"] = Field(
        "invariant", description="HMoLE's router, or a row of W_r for each expert (the variant -H)"
    )
    shared_expert: bool = Field(True, description="whether there is a shared expert (false: the variant -S)")
    assignment: Literal["relevance", "fixed", "random"] = Field(
        "relevance", description="by relevance, or the first round's for good (-R), or by new random scores each round"
    )
    embedding_share: float = Field(0.05, gt=0, lt=1, description="part of a client's examples in its embedding set")
    embedding_limit: int = Field(200, ge=1, description="most examples in an embedding set")
    privacy_eta: float | None = Field(
        None,
        gt=0,
        description="eta of the noise exp(-eta ||z||) on uploaded embeddings: the smaller, the more; null: none",
    )
    privacy_bound: float | None = Field(
        None, gt=0, description="norm that noisy embeddings are clipped to; null: each one's own norm before the noise"
    )


@dataclass(frozen=True)
class Pool:
    """The server's state, typed: C clients, E experts.

    Attributes:
        common: The shared experts and W^t, by the names of their trainables.
        experts: `{module}.experts.lora_A` [E, r, in], `.lora_B` [E, out, r] and `.embedding` [E, r], h^e.
        token: Module -> h^t [C, r], each client's last; mean logits [C, E] of a vanilla router.
        assigned: Module -> D [C, E] bool, who gets which expert in the next round.
        before: Module -> the D of the round that led here.
        known: [C] bool, whether a client has ever uploaded its h^t.
        seed: Of the random scores.
        round: Rounds that are over.
    """

    common: dict[str, Tensor]
    experts: dict[str, Tensor]
    token: dict[str, Tensor]
    assigned: dict[str, Tensor]
    before: dict[str, Tensor]
    known: Tensor
    seed: int
    round: int

    @classmethod
    def of(cls, state: Payload) -> Pool:
        """Reads a state."""
        parts, scalars = Payload(state.tensors), state.scalars
        return cls(
            common=parts.part(COMMON),
            experts=parts.part(EXPERTS),
            token=parts.part(TOKEN),
            assigned=parts.part("assigned"),
            before=parts.part("before"),
            known=state.tensors["known"],
            seed=int(scalars["seed"]),
            round=int(scalars["round"]),
        )

    def state(self) -> Payload:
        """Returns it as a state."""
        parts = {COMMON: self.common, EXPERTS: self.experts, TOKEN: self.token}
        parts |= {"assigned": self.assigned, "before": self.before}
        tensors = {name: value for part, held in parts.items() for name, value in with_part(part, held).items()}
        return Payload({**tensors, "known": self.known}, {"seed": self.seed, "round": self.round})

    @property
    def modules(self) -> list[str]:
        """The modules, in alphabetical order."""
        return sorted({name.rpartition(f"{STACK}.")[0] for name in self.experts})


class FedAMoLE:
    """Mixtures of LoRA experts, assigned to clients by relevance; see the module's docstring."""

    name: ClassVar[str] = "fedamole"
    title: ClassVar[str] = "FedAMoLE: a mixture of LoRA experts for every client, experts assigned by relevance"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FedAMoLESettings

    def __init__(self, settings: FedAMoLESettings) -> None:
        self.settings = settings

    def fitted(self, clients: int, *, exact: bool) -> FedAMoLE:
        """Returns itself, where so many clients have an assignment.

        Raises:
            ConfigError: E, k^e, k^c and b leave them none.
        """
        self._mixture()
        self._rules(clients).require_feasible(clients, self.settings.experts)
        return self

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns a mixture with room for b experts on every target, whatever the budget."""
        return self._plan()

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1, but for the assignment, which `enroll` makes."""
        mixture, common, experts = self._mixture(), {}, {}
        for name, shape in mixture.shapes(model).items():
            if f"{STACK}." not in name:
                common[name] = mixture.initial(name, shape, rng)
                continue
            experts[name] = mixture.initial(name, (self.settings.experts, *shape[1:]), rng)
            if self._invariant:
                stack = name.rpartition(".")[0]
                experts[f"{stack}.{EMBEDDING}"] = torch.zeros(self.settings.experts, self.settings.rank)
        seed = new_seed(rng)
        return Pool(common, experts, {}, {}, {}, torch.zeros(0, dtype=torch.bool), seed, 0).state()

    def enroll(self, state: Payload, model: ModelInfo, clients: Sequence[ClientInfo]) -> Payload:
        """Line 1's assignment.

        Raises:
            ConfigError: E, k^e, k^c and b leave so many clients no assignment.
        """
        pool = Pool.of(state)
        pool = replace(
            pool,
            token={module: torch.zeros(len(clients), self._token_width) for module in pool.modules},
            known=torch.zeros(len(clients), dtype=torch.bool),
        )
        assigned = self._assigned(pool, self._random_scores(pool))
        return replace(pool, assigned=assigned, before=assigned).state()

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: the shared experts, W^t, and the domain experts with d_ij = 1, named by their ids."""
        pool = Pool.of(state)
        held = {module: rows[client.index].nonzero().flatten() for module, rows in pool.assigned.items()}
        names = [(f"{module}{STACK}.{factor}", module) for module in held for factor in FACTORS]
        stacks = {name: pool.experts[name][held[module]] for name, module in names}
        experts = single_experts(stacks, {module: ids.tolist() for module, ids in held.items()})
        return Payload({**with_part(COMMON, pool.common), **with_part(EXPERTS, experts)})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 6."""
        settings, mixture, embedding_sets = self.settings, cohort.model.attached[MixtureOfLora], []
        for slot, work in enumerate(cohort.work):
            mixture.assign(slot, held_experts(work.download.part(EXPERTS)))
            cohort.load(slot, _trainables(work.download, mixture.part))
            embedding_sets.append(cohort.hold_out(slot, settings.embedding_share, settings.embedding_limit))
        for step in cohort.steps():
            nll = step.forward()
            step.backward(nll + settings.balance * step.shares() * mixture.balance_loss())  # Eq. 19
            step.apply()
        with mixture.embeddings() as embeddings:
            for _ in cohort.passes(embedding_sets):
                pass
        return [self._upload(cohort, slot, mixture, embeddings) for slot in range(len(cohort.work))]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of what the client got, with its h^t and its experts' h^e."""
        shapes = {name: tuple(tensor.shape) for name, tensor in download.tensors.items()}
        for module, ids in held_experts(download.part(EXPERTS)).items():
            shapes[f"{TOKEN}/{module}"] = (self._token_width,)
            if self._invariant:
                shapes[f"{EXPERT}/{module}"] = (len(ids), self.settings.rank)
        return shapes

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 7 to 10."""
        pool, mean = Pool.of(state), WeightedMean()
        token, known = {module: rows.clone() for module, rows in pool.token.items()}, pool.known.clone()
        for upload in uploads:
            sent = upload.payload
            stacks = {f"{module}{STACK}.{EMBEDDING}": rows for module, rows in sent.part(EXPERT).items()}
            experts, held = sent.part(EXPERTS), held_experts(sent.part(EXPERTS))
            mean.add({**sent.part(COMMON), **experts, **single_experts(stacks, held)}, 1.0)  # Eq. 10, 12
            for module, own in sent.part(TOKEN).items():
                token[module][upload.client.index] = own
            known[upload.client.index] = True
        every = dict.fromkeys(pool.modules, range(self.settings.experts))
        means = mean.result({**pool.common, **single_experts(pool.experts, every)})
        experts = {name: value for name, value in means.items() if name not in pool.common}
        pool = replace(
            pool,
            common={name: means[name] for name in pool.common},
            experts=stacked_experts(experts, self.settings.experts),
            token=token,
            known=known,
            before=pool.assigned,
            round=pool.round + 1,
        )
        return replace(pool, assigned=self._next_assignment(pool)).state()

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> None:
        """Returns None: every client has a model of its own."""

    def excerpt(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns what the client would receive next: its own experts, and nothing of who has which others."""
        return Payload(self.download(state, model, client).tensors)

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the client's model as it left its own training, or what it would receive next."""
        received = self.download(state, model, client) if "known" in state.tensors else Payload(state.tensors)
        own = memory if memory.tensors else received
        plan = self._plan(tuple(held_experts(own.part(EXPERTS)).items()))
        return Deployment(plan, _trainables(own, self._mixture()))

    def relevance(self, pool: Pool) -> Tensor:
        """Returns s [modules, C, E] in fp64 (Eq. 14); a client that never took part has the others' mean h^t."""
        token = torch.stack([pool.token[module] for module in pool.modules]).double()
        if pool.known.any():
            token[:, ~pool.known] = token[:, pool.known].mean(dim=1, keepdim=True)
        if not self._invariant:
            return token
        expert = torch.stack([pool.experts[f"{module}{STACK}.{EMBEDDING}"] for module in pool.modules]).double()
        width = 1 if self.settings.score_scale == "rank" else 2
        widths = torch.tensor([pool.experts[f"{module}{STACK}.lora_A"].shape[width] for module in pool.modules])
        return token @ expert.mT / widths.double().sqrt()[:, None, None]

    def observe(self, state: Payload, model: ModelInfo) -> Sequence[Observation]:
        """Returns P of the last module (Figure 8), experts per client, the share kept, and client 0's (Table 6)."""
        pool = Pool.of(state)
        clients = [f"client {index}" for index in range(len(pool.known))]
        experts = [f"expert {index}" for index in range(self.settings.experts)]
        modules = [linear.name for linear in self._mixture().linears(model)]
        chosen = selection_probability(self.relevance(pool))[pool.modules.index(modules[-1])].T
        held = torch.stack([pool.assigned[module].sum(dim=1) for module in modules])
        stayed = torch.stack([pool.assigned[module] & pool.before[module] for module in modules])
        traced = pool.before[modules[-1]][:1].float()
        return (
            Observation(f"selection probability, {modules[-1]}", chosen, experts, clients),
            Observation("experts held in the next round", held, modules, clients, unit="experts"),
            Observation("assignment kept", stayed.sum(dim=(1, 2)) / held.sum(dim=1), modules),
            Observation(f"experts of client 0, {modules[-1]}", traced, clients[:1], experts),
        )

    @property
    def _invariant(self) -> bool:
        """Whether the router is HMoLE's, with h^t and h^e in R^r."""
        return self.settings.router == "invariant"

    @property
    def _token_width(self) -> int:
        """Numbers in a client's h^t: r, or E of a vanilla router."""
        return self.settings.rank if self._invariant else self.settings.experts

    def _mixture(self) -> MixtureOfLora:
        settings = self.settings
        return MixtureOfLora(
            targets=settings.targets,
            rank=settings.rank,
            scale=settings.alpha / settings.rank,
            experts=settings.experts,
            capacity=min(settings.experts_per_client, settings.experts),
            top_k=settings.active_experts,
            shared=settings.shared_expert,
            router=settings.router,
            score_scale=settings.score_scale,
            renormalise=settings.renormalise,
            dropout=settings.dropout,
        )

    def _plan(self, held: Held = ()) -> AdapterPlan:
        mixture = replace(self._mixture(), held=held)
        return AdapterPlan(rank=mixture.rank, scale=mixture.scale, targets=(), parts=(mixture,))

    def _upload(self, cohort: Cohort, slot: int, mixture: Mixture, embeddings: Embeddings) -> Payload:
        """Line 6: what the client trained, which it also keeps as its own model, and the embeddings."""
        trained, held = cohort.read(slot), mixture.held(slot)
        stacks = {name: trained.pop(name) for name in list(trained) if f"{STACK}." in name}
        own = {**with_part(COMMON, trained), **with_part(EXPERTS, single_experts(stacks, held))}
        cohort.keep(slot, own)
        found = with_part(TOKEN, embeddings.token(slot))
        if self._invariant:
            found |= with_part(EXPERT, embeddings.experts(slot))
        eta = self.settings.privacy_eta
        if eta is not None:
            rng = numpy_rng(cohort.private_seed, "embedding noise", cohort.round, cohort.clients[slot].index)
            bound = self.settings.privacy_bound
            found = {name: privatised(value, eta, bound, rng) for name, value in sorted(found.items())}
        return Payload({**own, **found})

    def _next_assignment(self, pool: Pool) -> dict[str, Tensor]:
        """Lines 8 to 10, or what the variants -R and Random do instead."""
        if self.settings.assignment == "fixed":
            return pool.assigned
        random = self.settings.assignment == "random"
        return self._assigned(pool, self._random_scores(pool) if random else self.relevance(pool))

    def _assigned(self, pool: Pool, scores: Tensor) -> dict[str, Tensor]:
        chosen = assign_experts(selection_probability(scores), self._rules(len(pool.known)))
        return dict(zip(pool.modules, chosen, strict=True))

    def _rules(self, clients: int) -> AssignmentRules:
        settings = self.settings
        rules = AssignmentRules(settings.active_experts, settings.experts_per_client, settings.clients_per_expert)
        return rules.scaled(clients, settings.experts) if settings.scale_clients_per_expert else rules

    def _random_scores(self, pool: Pool) -> Tensor:
        rng = torch_rng(pool.seed, "assignment", pool.round)
        return torch.rand(len(pool.modules), len(pool.known), self.settings.experts, generator=rng)


def _trainables(payload: Payload, mixture: MixtureOfLora) -> dict[str, Tensor]:
    """Returns a client's trainables from what it received or kept, its experts in the order of their ids."""
    return {**payload.part(COMMON), **stacked_experts(payload.part(EXPERTS), mixture.capacity)}
