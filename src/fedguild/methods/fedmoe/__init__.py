"""FedMoE: a sub-MoE for every client that fits its memory and data, adjusted by its peers.

H. Mei, D. Cai, A. Zhou, S. Wang, M. Xu, "FedMoE: Personalized Federated Learning via Heterogeneous
Mixture of Experts", arXiv 2408.11304, 2024.

The algorithm, in our words (k, j are clients, i a layer, e an expert of it):
     1  server: start what trains: LoRA on dense layers and experts, and the routers
     2  stage 1, each round, for the sampled clients: train the full MoE, send it and
            p_k(i, e), each expert's share of the activations on held-out data -> validation.py
     3  server: a client that cannot hold the full MoE gets the mean p of those of its
            task that can, by their sizes                                      -> sub_moes.py
     4  server: theta_k = the largest theta in [0, 1] whose sets fit into alpha memory_k, where a
            layer's set is its likeliest experts, as few as together reach a share of theta
                                                                               -> fitting.py
     5  stage 2, each round, for the sampled clients k:
     6      client: take the dense parts and the held experts with their router rows -> rows.py;
                choose among these                                             -> held_experts.py
     7      client: minimise the cross-entropy with smoothed labels + lambda L_balance, validate, send
                what it trained, p_k and the accuracy
     8      server: dense parts: mean by size; an expert and its router row: mean over its holders
     9      server: without a gain for some rounds: S_kj = cos(p_k, p_j)        (Eq. 4),
                the K most similar are the peers                               (Eq. 5),
                p-hat_k = sum_j S_kj p_j / sum_j S_kj                          (Eq. 6),
                n = mean_j n_j - n_k: the n best outside come in, or the |n| worst go, by p-hat
                                                                               -> adjusting.py
    10      server: no gain after an adjustment: undo it, and never adjust this client again
                                                                               -> sub_moes.py

Symbols: p `activation`, theta the threshold of `fitted_sets`, alpha `memory_share`, memory_k
`memory[budget]` of all expert parameters, lambda `balance`, K `peers`, n_k experts held.

Readings and deviations (docs/methods/fedmoe.md):
    - What trains is LoRA on experts and dense layers, and the routers in full, in both stages.
    - The backbone is shared in a simulation, so all experts are in memory; a client neither runs, trains nor receives
      experts that it does not hold.
    - In stage 1 a client that cannot hold the full MoE trains random sets that fit.
    - Memory is counted in expert parameters. The server knows no tasks: `tasks` names them; by
      default all clients have the same. A client without p by the end of stage 1 is treated as in line 3.
    - The routers' load-balancing loss has the number of all experts as its factor in every sub-MoE.
    - A client's own model is what it would receive next; the global model has all experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.load_balancing import LoadBalancing
from fedguild.client.observing import observing
from fedguild.core.payload import ADAPTER, SERVER, Payload, with_part
from fedguild.core.seeding import new_seed
from fedguild.methods.fedmoe.adjusting import adjusted_sets, recommendation, similarities, top_peers
from fedguild.methods.fedmoe.fitting import fitted_sets
from fedguild.methods.fedmoe.held_experts import HeldExperts
from fedguild.methods.fedmoe.observations import observations
from fedguild.methods.fedmoe.options import limits_of, require_targets, task_numbers
from fedguild.methods.fedmoe.rows import all_rows, by_part, full_tensors, held_rows, holder_weights, together
from fedguild.methods.fedmoe.sub_moes import TRYING, SubMoes
from fedguild.methods.fedmoe.validation import Validation, validate
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes
from fedguild.model.targets import layer_of
from fedguild.server.limits import require_budgets
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, Observation, Own, Roster, ServerCosts
from fedguild.server.schema import Bound, Entry, Schema, entries
from fedguild.server.settings import LoraSettings, Rank
from fedguild.server.terms import Means, Term, Terms, Upload, mean

EXPERTS = "experts"
"""The part with tensors that have a row per expert, such as the routers' rows (rows.py), for the held experts."""
POOL = f"{SERVER}/{EXPERTS}"
"""The part of the state with these tensors for all experts."""
HELD = "held"
"""The part of a download with the held experts: path of each layer's experts -> [n] ids, ascending."""
ACTIVATION = "activation"
"""The part of an upload with p: path of each layer's experts -> [M]."""
LOSS, ACCURACY = "validation/loss", "validation/accuracy"


class FedMoeSettings(LoraSettings):
    """The options of FedMoE."""

    rank: Rank = 8
    targets: tuple[str, ...] = Field(
        ("attention",),
        description="what LoRA adapts apart from the experts: leaf names of linear layers, or attention and mlp",
    )
    stage_one_rounds: int = Field(5, ge=1, description="rounds of stage 1, with the full MoE")
    memory: Mapping[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        {}, description="budget's name -> share of all expert parameters that its clients can hold; 1 if left out"
    )
    memory_share: float = Field(
        0.8, gt=0, le=1, description="alpha: share of a client's memory that its experts may use"
    )
    tasks: tuple[str, ...] = Field((), description="each client's task, in client order; empty: all have the same")
    held_out: float = Field(0.1, gt=0, lt=1, description="share of a client's examples that it validates on")
    held_out_limit: int = Field(100, ge=1, description="largest number of examples that a client validates on")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="label smoothing of the cross-entropy")
    balance: float = Field(0.01, ge=0, description="lambda: weight of the load-balancing loss")
    gain: Literal["accuracy", "loss"] = Field("accuracy", description="validation figure that has to improve")
    patience: int = Field(3, ge=1, description="rounds without a gain after which a client's sets are adjusted")
    peers: int = Field(3, ge=1, description="K, number of peers that an adjustment uses")


class FedMoe(Method):
    """Heterogeneous sub-MoEs in two stages; see the module's docstring."""

    Settings = FedMoeSettings
    settings: FedMoeSettings
    facts = Facts(
        needs_experts=True,
        costs=ServerCosts(
            "O(n) and C L M shares of tokens",
            "O(C n + C² L M)",
            varies="at most",
            note="Counted as in stage 1, in which a client holds as many experts as fit; later it may hold fewer. The "
            "estimates leave out the passes of a client's validation.",
            rounds=3,
        ),
        not_private="sends activations of the experts and what its validation says of them",
        not_preferences="trains and chooses sub-models by the loss of single answers",
        not_stepped="moves its experts apart from its adapter",
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA, full routers and a restricted routing; the held experts come with the download."""
        model.require_experts("FedMoE")
        require_targets(self.settings.targets)
        return AdapterPlan((self._lora, FullRouter(), HeldExperts()))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1; every client's set of stage 1 is all experts, or random ones if these do not fit.

        Raises:
            ConfigError: `memory` names an unknown budget, a budget's memory does not hold the active experts, or there
                are more or fewer tasks than clients.
        """
        settings = self.settings
        require_budgets("method.memory", settings.memory, roster.budgets)
        dense, experts = by_part(model, initial_adapter(model, self.plan(model, roster.budgets[0]), rng))
        for budget in roster.budgets:
            limits_of(model, budget, settings.memory, settings.memory_share)
        clients = roster.clients
        tasks = task_numbers(settings.tasks, len(clients))
        sub_moes = SubMoes.new(
            {layer.experts: layer.num_experts for layer in model.moe},
            [limits_of(model, client.budget, settings.memory, settings.memory_share) for client in clients],
            poor=[settings.memory.get(client.budget.name, 1.0) < 1 for client in clients],
            tasks=tasks,
            examples=[client.examples for client in clients],
            seed=new_seed(rng),
        )
        parts = Payload.of({ADAPTER: dense, POOL: experts})
        return Payload({**parts.tensors, **sub_moes.tensors()}, {f"{SERVER}/round": 0})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 6: the client's sub-MoE, and nothing of its peers' sets, data or scores."""
        held = SubMoes.of(state).ids(client.index)
        rows = held_rows(state.part(POOL), held)
        return Payload.of({ADAPTER: state.part(ADAPTER), EXPERTS: rows, HELD: held})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 2, 6 and 7."""
        settings, model = self.settings, cohort.model
        for slot, work in enumerate(cohort.work):
            model.attached[HeldExperts].hold(slot, work.download.part(HELD))
            cohort.load(slot, _received(model.backbone.info, work.download))
        slots = range(len(cohort.work))
        held_out = [cohort.hold_out(slot, settings.held_out, settings.held_out_limit) for slot in slots]
        balancing = LoadBalancing(len(cohort.work))
        with observing(model.backbone.moe, balancing.observe):
            for step in cohort.steps():
                loss = step.forward(settings.label_smoothing)
                balance, _ = balancing.losses()
                step.backward(loss + settings.balance * balance * step.shares())
                step.apply()
        for slot, work in enumerate(cohort.work):
            cohort.leave(slot, {**cohort.read(slot), **with_part(HELD, work.download.part(HELD))})
        figures = validate(cohort, held_out)
        return [_upload(cohort, slot, validation) for slot, validation in enumerate(figures)]

    def terms(self, sent: Upload) -> Terms:
        """Line 8; the sets of lines 3, 4 and 9 need each client's p, loss and accuracy by themselves."""
        held, examples = sent.download.part(HELD), sent.client.examples
        sizes = {layer: len(share) for layer, share in sent.payload.part(ACTIVATION).items()}
        rows, before = (all_rows(payload.part(EXPERTS), held, sizes) for payload in (sent.payload, sent.download))
        weights, ones = holder_weights(held, sizes, examples), holder_weights(held, sizes, 1)
        experts = {
            f"{EXPERTS}/{name}": Term(row, weights[layer], layer, 0, before[name], groups=layer, held=ones[layer] > 0)
            for name, row in rows.items()
            if (layer := layer_of(name))
        }
        return mean(ADAPTER, sent) | Terms(experts, disclose=(ACTIVATION, LOSS.partition("/")[0]))

    def update(self, state: Payload, means: Means) -> Payload:
        """Line 8, then lines 3 and 4 after the last round of stage 1, or lines 9 and 10 in stage 2."""
        round, sub_moes = int(state.scalars[f"{SERVER}/round"]) + 1, SubMoes.of(state)
        for contributor in means.contributors:
            sent = contributor.disclosed
            loss, accuracy = float(sent.tensors[LOSS]), float(sent.tensors[ACCURACY])
            sub_moes.note(contributor.client.index, sent.part(ACTIVATION), loss, accuracy)
        if round == self.settings.stage_one_rounds:
            fit(sub_moes)
        elif round > self.settings.stage_one_rounds:
            validated = [each.client.index for each in means.contributors if each.round == round]
            adjust(sub_moes, sorted(validated), self.settings)
        dense, experts = means.moved(ADAPTER, state.part(ADAPTER)), means.moved(EXPERTS, state.part(POOL))
        trained = Payload.of({ADAPTER: dense, POOL: experts})
        return Payload({**trained.tensors, **sub_moes.tensors()}, {f"{SERVER}/round": round})

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the names and shapes of the dense parts, the held experts, p and the validation's figures."""
        dense, experts = by_part(model, trainable_shapes(model, self.plan(model, client.budget)))
        counts = {layer: len(ids) for layer, ids in download.part(HELD).items()}
        rows = {name: (counts[layer_of(name)], *shape[1:]) for name, shape in experts.items()}
        share = Bound(total=1.0)
        return Schema(
            {
                **entries(ADAPTER, dense),
                **entries(EXPERTS, rows),
                **entries(ACTIVATION, {layer.experts: (layer.num_experts,) for layer in model.moe}, share),
                LOSS: Entry((), Bound()),
                ACCURACY: Entry((), share),
            }
        )

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the global model with all experts, which a client may not be able to hold."""
        if own is GLOBAL:
            plan = AdapterPlan((self._lora, FullRouter()))
            return Deployment(plan, together(model, state.part(ADAPTER), state.part(POOL)))
        if not own.trained.tensors:
            return Deployment(self._sub_moe(model, state.part(HELD)), _received(model, state))
        held = with_part(HELD, own.trained.part(HELD))
        return Deployment(self._sub_moe(model, own.trained.part(HELD)), own.trained.without(*held).tensors)

    def _sub_moe(self, model: ModelInfo, held: Mapping[str, Tensor]) -> AdapterPlan:
        """Returns the plan of a client's own model: held is each layer's path -> the indices of its experts."""
        sets = tuple(tuple(held[layer.experts].tolist()) for layer in model.moe)
        return AdapterPlan((self._lora, FullRouter(), HeldExperts(sets)))

    def observe(self, state: Payload, model: ModelInfo) -> list[Observation]:
        """Returns each client's number of experts, their size, its validation score, and whether its set is final."""
        return observations(SubMoes.of(state), model)

    @property
    def _lora(self) -> Lora:
        return replace(self.settings.lora, targets=(*self.settings.targets, "experts"))


def fit(sub_moes: SubMoes) -> None:
    """Assigns every client the sets that fit, by its own p or that of others."""
    for client in range(sub_moes.clients):
        activation = sub_moes.activation_for(client)  # line 3
        sets, _ = fitted_sets(activation, sub_moes.limits(client))  # line 4
        sub_moes.give(client, sets)
    sub_moes.known &= ~sub_moes.poor  # what they measured was on the random sets of stage 1


def adjust(sub_moes: SubMoes, clients: Sequence[int], settings: FedMoeSettings) -> None:
    """Adjusts the sets of clients that do not improve, or undoes their last adjustment.

    Args:
        sub_moes: The sub-MoEs of all clients.
        clients: The clients that validated in this round.
        settings: `gain`, `patience` and `peers`.
    """
    activation, counts = sub_moes.activations(), sub_moes.counts().sum(dim=1)
    similarity = similarities(activation)  # Eq. 4
    for client in clients:
        if not sub_moes.is_stuck(client, settings.gain, settings.patience):
            continue
        if sub_moes.status[client] == TRYING:
            sub_moes.undo(client)  # line 10
            continue
        peers = top_peers(similarity, client, sub_moes.known, settings.peers)  # Eq. 5
        wanted = recommendation(similarity[client, peers], activation[peers])  # Eq. 6
        if wanted is not None:
            per_layer = wanted.split(list(sub_moes.layers().values()))
            sets = adjusted_sets(sub_moes.sets(client), per_layer, counts[peers].tolist(), sub_moes.limits(client))
            sub_moes.attempt(client, sets)  # line 9


def _upload(cohort: Cohort, slot: int, validation: Validation) -> Payload:
    """Line 7."""
    dense, experts = by_part(cohort.model.backbone.info, cohort.read(slot))
    rows = held_rows(experts, cohort.work[slot].download.part(HELD))
    parts = Payload.of({ADAPTER: dense, EXPERTS: rows, ACTIVATION: validation.activation})
    figures = {LOSS: torch.tensor(validation.loss), ACCURACY: torch.tensor(validation.accuracy)}
    return Payload({**parts.tensors, **figures})


def _received(model: ModelInfo, download: Payload) -> dict[str, torch.Tensor]:
    """Returns a client's received tensors in the form in which they are loaded."""
    return full_tensors(model, download.part(ADAPTER), download.part(EXPERTS), download.part(HELD))
