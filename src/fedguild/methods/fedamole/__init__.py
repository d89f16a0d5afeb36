"""FedAMoLE: a mixture of LoRA experts for every client, experts assigned by relevance.

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
               -> mixture.py, its product in kernel.py
    6      client: over the embedding set, h^t_mi = mean of W^t h and
               h^e_mij = mean of A_j h; upload them with what it trained          (Eq. 11, 13)
               -> embeddings.py, their noise in embedding_privacy.py
    7      server: each domain expert, and its h^e_mj, is the mean over the
               clients that trained it; the shared expert and W^t over all        (Eq. 10, 12)
    8      server: s_mij = <h^t_mi, h^e_mj> / sqrt(r)                             (Eq. 14)
    9      server: P_mj = softmax of s_mij over the clients                       (Def. 4.1)
    10     server: D_m maximises <P_m, D_m>, where each client gets k^e to b
               experts and each expert goes to k^c clients                        (Def. 4.1)
               -> assignment.py

Symbols: E `experts`, k^e `active_experts`, k^c `clients_per_expert`, b `experts_per_client`, beta
`balance`, D_m `assigned` [clients, experts], P_m `selection_probability`, h^t `token`, h^e `embedding`.
The state is a `Pool` (pool.py), which also defines the names of experts in payloads.

The variants of Table 3: -H `router: vanilla`, -S `shared_expert: false`, -R `assignment: fixed`,
Random `assignment: random`. `assignment: once`, not in the paper, runs lines 8 to 10 after the first
round alone.

Readings and deviations (docs/methods/fedamole.md):
    - s is scaled by sqrt(r), the active weights are renormalised and alpha / r applies, as in the
      released code; `score_scale: hidden` and `renormalise: false` are the paper's text.
    - The program is solved exactly as a linear program.
    - A client that sits a round out keeps its last h^t in the program; one that never took part has the mean h^t of the
      others. An expert that no client trained keeps its weights and its h^e, which is 0 before its first training: it
      prefers no client.
    - -H has no W^t: there s is the mean router logit of expert j over client i's embedding set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.core.payload import Payload, with_part
from fedguild.core.seeding import new_seed, torch_rng
from fedguild.methods.fedamole.assignment import AssignmentRules, assign_experts, selection_probability
from fedguild.methods.fedamole.embedding_privacy import privatised
from fedguild.methods.fedamole.embeddings import Embeddings
from fedguild.methods.fedamole.mixture import Held, MixtureOfLora
from fedguild.methods.fedamole.observations import observations
from fedguild.methods.fedamole.pool import (
    EXPERT,
    EXPERTS,
    TOKEN,
    Pool,
    client_trainables,
    held_experts,
    named_by_ids,
    uploaded_tensors,
)
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, Observation, Own, Roster, ServerCosts
from fedguild.server.schema import Entry, Schema, entries
from fedguild.server.settings import Alpha, MethodSettings
from fedguild.server.terms import Means, Terms, Upload, mean

POOL = "pool"
"""The part of the means of what clients train, each expert by itself."""


class FedAMoLESettings(MethodSettings):
    """The options of FedAMoLE."""

    rank: int = Field(8, ge=1, description="LoRA rank r of every expert, and the width of the embeddings")
    alpha: Alpha = 16.0
    targets: tuple[str, ...] = Field(
        ("q_proj", "v_proj"),
        description="layers that get a mixture: leaf names of linear layers, or the groups attention, mlp",
    )
    dropout: float = Field(0.05, ge=0, lt=1, description="dropout on the input of the experts")
    experts: int = Field(30, ge=1, description="E, domain experts in the pool of a module")
    active_experts: int = Field(
        2, ge=1, description="k^e, domain experts that a token activates, and the fewest that a client gets"
    )
    experts_per_client: int = Field(8, ge=1, description="b, most domain experts of a module that one client gets")
    clients_per_expert: int = Field(2, ge=1, description="k^c, number of clients that get each domain expert")
    scale_clients_per_expert: bool = Field(
        False, description="whether to raise k^c if it is too low for every client to get k^e experts, or refuse"
    )
    balance: float = Field(1e-3, ge=0, description="beta, weight of the load balance loss")
    score_scale: Literal["rank", "hidden"] = Field(
        "rank", description="divisor of routing scores and relevance: the square root of r, or of the layer's width"
    )
    renormalise: bool = Field(True, description="whether the weights of a token's active experts sum to one")
    router: Literal["invariant", "vanilla"] = Field(
        "invariant", description="HMoLE's router, or a row of W_r for each expert (the variant -H)"
    )
    shared_expert: bool = Field(True, description="whether there is a shared expert (false: the variant -S)")
    assignment: Literal["relevance", "once", "fixed", "random"] = Field(
        "relevance",
        description="relevance: anew after each round; once: after the first, then kept; fixed: the first, random one "
        "for good (-R); random: by new random scores each round",
    )
    embedding_share: float = Field(0.05, gt=0, lt=1, description="share of a client's examples in its embedding set")
    embedding_limit: int = Field(200, ge=1, description="largest number of examples in an embedding set")
    privacy_eta: float | None = Field(
        None,
        gt=0,
        description="eta of the noise exp(-eta ||z||) on uploaded embeddings: smaller means more noise; null: none",
    )
    privacy_bound: float | None = Field(
        None, gt=0, description="norm that noisy embeddings are clipped to; null: each one's own norm before the noise"
    )

    def fitted(self, model: ModelInfo, clients: int, *, exact: bool) -> Self:
        """Takes targets that the model has, and a k^c and an E that allow an assignment.

        Raises:
            ConfigError: E, k^e, k^c and b, as far as the config sets them, allow none.
        """
        given, settings = self.model_fields_set, super().fitted(model, clients, exact=exact)
        if clients < settings.clients_per_expert and "clients_per_expert" not in given:
            settings = settings.model_copy(update={"clients_per_expert": clients})
        experts = settings.rules(clients).feasible_experts(clients, settings.experts)
        if experts != settings.experts and "experts" not in given:
            settings = settings.model_copy(update={"experts": experts})
        settings.mixture()
        settings.rules(clients).require_feasible(clients, settings.experts)
        return settings

    def mixture(self, held: Held = ()) -> MixtureOfLora:
        """Returns the plan's mixture, for training or for a client that holds these experts."""
        return MixtureOfLora(
            targets=self.targets,
            rank=self.rank,
            scale=self.alpha / self.rank,
            experts=self.experts,
            capacity=min(self.experts_per_client, self.experts),
            top_k=self.active_experts,
            shared=self.shared_expert,
            router=self.router,
            score_scale=self.score_scale,
            renormalise=self.renormalise,
            dropout=self.dropout,
            held=held,
        )

    def rules(self, clients: int) -> AssignmentRules:
        """Returns k^e, b and k^c for this number of clients."""
        rules = AssignmentRules(self.active_experts, self.experts_per_client, self.clients_per_expert)
        return rules.scaled(clients, self.experts) if self.scale_clients_per_expert else rules


class FedAMoLE(Method):
    """Mixtures of LoRA experts, assigned to clients by relevance; see the module's docstring."""

    Settings = FedAMoLESettings
    facts = Facts(
        costs=ServerCosts(
            "O(E n / b) for the pool of experts, and C E scores a module",
            "O(C n), and a linear program of C E variables a module",
            varies="mean",
            note="Clients hold between k^e and b experts of a module; over all of them the mean is E k^c / C. The "
            "estimates leave out the passes over a client's embedding set.",
        ),
        not_private="sends embeddings of the clients' examples (method.privacy_eta adds noise that no account covers)",
        not_preferences="balances the experts of its mixtures in a loop of its own",
        has_global_model=False,
        not_linear="it assigns experts by every client's embedding",
        not_stepped="assigns its experts anew after every round",
    )
    settings: FedAMoLESettings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns a mixture with room for b experts on every target, whatever the budget."""
        return AdapterPlan((self.settings.mixture(),))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1.

        Raises:
            ConfigError: E, k^e, k^c and b allow no assignment for this number of clients.
        """
        mixture = self.settings.mixture()
        pooled = replace(mixture, capacity=self.settings.experts)
        tensors = {name: mixture.initial(name, shape, rng) for name, shape in pooled.shapes(model).items()}
        width = self.settings.rank if self.invariant else None
        pool = Pool.new(tensors, width, new_seed(rng), len(roster.clients), self.token_width)
        assigned = self.assigned(pool, self.random_scores(pool))
        return replace(pool, assigned=assigned, before=assigned).state()

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: the shared experts, W^t, and the domain experts with d_ij = 1, named by their ids."""
        return Pool.of(state).sent_to(client.index)

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 6."""
        settings, mixture = self.settings, cohort.model.attached[MixtureOfLora]
        for slot, work in enumerate(cohort.work):  # line 3
            mixture.assign(slot, held_experts(work.download.part(EXPERTS)))
            cohort.load(slot, client_trainables(work.download, mixture.part.capacity))
        share, limit = settings.embedding_share, settings.embedding_limit
        embedding_sets = [cohort.hold_out(slot, share, limit) for slot in range(len(cohort.work))]  # line 4
        for step in cohort.steps():  # line 5
            nll = step.forward()
            step.backward(nll + settings.balance * step.shares() * mixture.balance_loss())  # Eq. 19
            step.apply()
        with mixture.embeddings() as embeddings:  # line 6
            for _ in cohort.passes(embedding_sets):
                pass
        uploads = []
        for slot in range(len(cohort.work)):
            trained = named_by_ids(cohort.read(slot), mixture.held(slot))
            cohort.keep(slot, trained)
            cohort.leave(slot, {})
            uploads.append(Payload({**trained, **self.uploaded_embeddings(cohort, slot, embeddings)}))
        return uploads

    def uploaded_embeddings(self, cohort: Cohort, slot: int, embeddings: Embeddings) -> dict[str, Tensor]:
        """Returns h^t and h^e of a client for its upload, with noise if the options ask for it (line 6)."""
        sent = with_part(TOKEN, embeddings.token(slot))
        if self.invariant:
            sent |= with_part(EXPERT, embeddings.experts(slot))
        eta, bound = self.settings.privacy_eta, self.settings.privacy_bound
        if eta is None:
            return sent
        rng = cohort.noise_rng(slot, "embedding noise")
        return {name: privatised(value, eta, bound, rng) for name, value in sorted(sent.items())}

    def terms(self, sent: Upload) -> Terms:
        """Line 7 (Eq. 10 and 12); lines 8 to 10 need each client's embeddings by themselves."""
        means = mean(POOL, sent, "uniform", tensors=uploaded_tensors(sent.payload), is_change=False)
        return replace(means, disclose=(TOKEN,), secure=False, why=self.facts.not_linear)

    def update(self, state: Payload, means: Means) -> Payload:
        """Lines 7 to 10."""
        before = Pool.of(state)
        token = {each.client.index: each.disclosed.part(TOKEN) for each in means.contributors}
        pool = before.after_round(means.moved(POOL, before.one_by_one()), token)  # line 7
        return replace(pool, assigned=self.next_assignment(pool, is_first=not before.known.any())).state()

    def next_assignment(self, pool: Pool, *, is_first: bool) -> dict[str, Tensor]:
        """Lines 8 to 10, or what stands in their place.

        Args:
            pool: After the round.
            is_first: Whether no client had uploaded its embeddings before this round.
        """
        assignment = self.settings.assignment
        if assignment == "fixed" or (assignment == "once" and not is_first):
            return pool.assigned
        return self.assigned(pool, self.random_scores(pool) if assignment == "random" else self.relevance(pool))

    def relevance(self, pool: Pool) -> Tensor:
        """Returns s [modules, C, E] in fp64 (line 8, Eq. 14)."""
        token = pool.token_embeddings()
        if not self.invariant:
            return token
        widths = pool.widths(self.settings.score_scale).double()
        return token @ pool.expert_embeddings().mT / widths.sqrt()[:, None, None]

    def random_scores(self, pool: Pool) -> Tensor:
        """Returns scores [modules, C, E] in place of s, drawn anew each round."""
        rng = torch_rng(pool.seed, "assignment", pool.round)
        return torch.rand(len(pool.modules), pool.clients, self.settings.experts, generator=rng)

    def assigned(self, pool: Pool, scores: Tensor) -> dict[str, Tensor]:
        """Returns module -> D [C, E] by scores [modules, C, E] (lines 9 and 10)."""
        probability = selection_probability(scores)
        return dict(zip(pool.modules, assign_experts(probability, self.settings.rules(pool.clients)), strict=True))

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the names and shapes of the download's tensors, with the client's h^t and its experts' h^e."""
        held = held_experts(download.part(EXPERTS))
        sent = {name: Entry(tuple(tensor.shape)) for name, tensor in download.tensors.items()}
        sent |= entries(TOKEN, dict.fromkeys(held, (self.token_width,)))
        if self.invariant:
            sent |= entries(EXPERT, {module: (len(ids), self.settings.rank) for module, ids in held.items()})
        return Schema(sent)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment | None:
        """Returns the client's model after its own training, or the one that it would receive next; none for all."""
        if own is GLOBAL:
            return None
        latest = own.model if own.model.tensors else state
        mixture = self.settings.mixture(tuple(held_experts(latest.part(EXPERTS)).items()))
        return Deployment(AdapterPlan((mixture,)), client_trainables(latest, mixture.capacity))

    def observe(self, state: Payload, model: ModelInfo) -> Sequence[Observation]:
        """Returns P of the last module (Figure 8), experts per client, share kept, client 0's (Table 6), and drift."""
        pool, modules = Pool.of(state), [linear.name for linear in self.settings.mixture().linears(model)]
        return observations(pool, selection_probability(self.relevance(pool)), modules)

    @property
    def invariant(self) -> bool:
        """Whether the router is HMoLE's, with h^t and h^e in R^r."""
        return self.settings.router == "invariant"

    @property
    def token_width(self) -> int:
        """Number of entries in a client's h^t: r, or E with a vanilla router."""
        return self.settings.rank if self.invariant else self.settings.experts
