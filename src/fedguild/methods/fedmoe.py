"""FedMoE: every client gets the sub-MoE that fits its memory and its data, and its peers improve it.

H. Mei, D. Cai, A. Zhou, S. Wang, M. Xu, "FedMoE: Personalized Federated Learning via Heterogeneous
Mixture of Experts", arXiv 2408.11304, 2024.

The algorithm, in our words (k, j are clients, i a layer, e an expert of it):
     1  server: start what trains: LoRA on dense layers and experts, and the routers
     2  stage 1, each round, for the sampled clients: train the full MoE, send it and
            p_k(i, e), each expert's share of the activations on held-out data
     3  server: a client that cannot hold the full MoE gets the mean p of those of its
            task that can, by their sizes
     4  server: theta_k = the largest theta in [0, 1] whose sets fit into alpha memory_k, where a
            layer's set are its likeliest experts, as few as have a share of theta together
     5  stage 2, each round, for the sampled clients k:
     6      client: take the dense parts and the held experts with their router rows; choose among these
     7      client: minimise the cross-entropy with smoothed labels + lambda L_balance, validate, send
                what it trained, p_k and the accuracy
     8      server: dense parts: mean by size; an expert and its router row: mean over its holders
     9      server: without a gain for some rounds: S_kj = cos(p_k, p_j)        (Eq. 4),
                the K most similar are the peers                               (Eq. 5),
                p-hat_k = sum_j S_kj p_j / sum_j S_kj                          (Eq. 6),
                n = mean_j n_j - n_k: the n best outside come in, or the |n| worst go, by p-hat
    10      server: no gain after an adjustment: undo it, and never adjust this client again

Symbols: p `activation`, theta the threshold of `fitted_sets`, alpha `memory_share`, memory_k
`memory[budget]` of all expert parameters, lambda `balance`, K `peers`, n_k experts held.

Readings and deviations (docs/methods/fedmoe.md):
    - What trains is LoRA on experts and dense layers, and the routers in full, in both stages.
    - The backbone is shared in a simulation, so all experts are there; what a client does not hold it
      neither runs, trains nor receives.
    - In stage 1 a client that cannot hold the full MoE trains random sets that fit.
    - Memory is counted in expert parameters. The server knows no tasks: `tasks` names them; by
      default all clients have the same. A client without p by the end of stage 1 is treated as in line 3.
    - The routers' load-balancing loss has the number of all experts as its factor in every sub-MoE.
    - A client's own model is what it would receive next; the global model has all experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.load_balancing import LoadBalancing
from fedguild.client.observing import observing
from fedguild.client.sub_moe import Validation, validate
from fedguild.errors import ConfigError
from fedguild.methods.common import ADAPTER, in_part, initial_adapter, new_seed
from fedguild.model.adapters.full_router import FullRouter, delta_name
from fedguild.model.adapters.held_experts import HeldExperts
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.aggregation import WeightedMean
from fedguild.server.expert_sets import Room
from fedguild.server.method import Deployment, Observation, Upload
from fedguild.server.sub_moes import FROZEN, SubMoes

Value = TypeVar("Value")

EXPERTS = "experts"
"""The part with what has a row for each expert, the routers' rows among it; of a payload's the held ones alone.

A name is `{path of the layer's experts}.{what}.{tensor}`: `….experts.up_proj.lora_A`, `….experts.router.delta`.
"""
ROUTER_ROWS = "router.delta"
HELD = "held"
"""The part of a download with the held experts: path of each layer's experts -> [n] ids, ascending."""
ACTIVATION = "activation"
"""The part of an upload with p: path of each layer's experts -> [M]."""
LOSS, ACCURACY = "validation/loss", "validation/accuracy"


class FedMoeSettings(BaseModel):
    """The options of FedMoE."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(8, ge=1, description="LoRA rank r")
    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; the scale is alpha / rank")
    targets: tuple[str, ...] = Field(
        ("attention",),
        description="what LoRA adapts beside the experts: leaf names of linear layers, or attention and mlp",
    )
    stage_one_rounds: int = Field(5, ge=1, description="rounds of stage 1, with the full MoE")
    memory: Mapping[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        {}, description="budget's name -> part of all expert parameters that its clients can hold; 1 where left out"
    )
    memory_share: float = Field(
        0.8, gt=0, le=1, description="alpha: the part of a client's memory that its experts get"
    )
    tasks: tuple[str, ...] = Field((), description="each client's task, in client order; empty: all have the same")
    held_out: float = Field(0.1, gt=0, lt=1, description="part of a client's examples that it validates on")
    held_out_limit: int = Field(100, ge=1, description="most examples that a client validates on")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="label smoothing of the cross-entropy")
    balance: float = Field(0.01, ge=0, description="lambda: weight of the load-balancing loss")
    gain: Literal["accuracy", "loss"] = Field("accuracy", description="which validation figure has to get better")
    patience: int = Field(3, ge=1, description="rounds of a client without a gain after which its sets are adjusted")
    peers: int = Field(3, ge=1, description="K, peers that an adjustment asks")


class FedMoe:
    """Heterogeneous sub-MoEs in two stages; see the module's docstring."""

    name: ClassVar[str] = "fedmoe"
    title: ClassVar[str] = "FedMoE: for every client a sub-MoE that fits its memory and data, adjusted by its peers"
    needs_experts: ClassVar[bool] = True
    Settings: ClassVar[type[BaseModel]] = FedMoeSettings

    def __init__(self, settings: FedMoeSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA, full routers and a restricted routing; which experts are held comes with the download."""
        model.require_experts("FedMoE")
        if taken := {"router", "experts"} & set(self.settings.targets):
            raise ConfigError(
                f"method.targets: {' and '.join(sorted(taken))} cannot be among the targets of fedmoe.",
                "Routers and held experts always train; `targets` names what else does, for example [attention].",
            )
        return self._plan(FullRouter(), HeldExperts())

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1.

        Raises:
            ConfigError: `memory` names an unknown budget, or a budget's memory does not hold the active experts.
        """
        known = {budget.name for budget in budgets}
        if unknown := sorted(set(self.settings.memory) - known):
            raise ConfigError(
                f"method.memory: no budget is called {', '.join(unknown)}.", f"Known: {', '.join(sorted(known))}."
            )
        dense, experts = by_part(model, initial_adapter(model, self.plan(model, budgets[0]), rng))
        for budget in budgets:
            self._room(model, budget)
        return Payload({**with_part(ADAPTER, dense), **with_part(EXPERTS, experts)}, {"seed": new_seed(rng)})

    def enroll(self, state: Payload, model: ModelInfo, clients: Sequence[ClientInfo]) -> Payload:
        """Gives everybody the sets of stage 1: all experts, or random ones where these do not fit.

        Raises:
            ConfigError: there are more or fewer tasks than clients.
        """
        tasks = self.settings.tasks or ("",) * len(clients)
        if len(tasks) != len(clients):
            raise ConfigError(
                f"method.tasks names {len(tasks)} tasks, but there are {len(clients)} clients.",
                "Name a task for every client, in client order, or leave it empty.",
            )
        members = SubMoes.enrolled(
            {layer.experts: layer.num_experts for layer in model.moe},
            [self._room(model, client.budget) for client in clients],
            poor=[self.settings.memory.get(client.budget.name, 1.0) < 1 for client in clients],
            tasks=[sorted(set(tasks)).index(task) for task in tasks],
            examples=[client.examples for client in clients],
            seed=int(state.scalars["seed"]),
        )
        return Payload({**state.tensors, **members.tensors()}, {"round": 0})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 6."""
        held = SubMoes.of(state.tensors).ids(client.index)
        known = Payload(state.tensors)
        own = held_rows(known.part(EXPERTS), held)
        return Payload({**with_part(ADAPTER, known.part(ADAPTER)), **with_part(EXPERTS, own), **with_part(HELD, held)})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 2, 6 and 7."""
        settings, model = self.settings, cohort.model
        for slot, work in enumerate(cohort.work):
            model.attached[HeldExperts].hold(slot, work.download.part(HELD))
            cohort.load(slot, full_tensors(model.backbone.info, work.download))
        slots = range(len(cohort.work))
        held_out = [cohort.hold_out(slot, settings.held_out, settings.held_out_limit) for slot in slots]
        balancing = LoadBalancing(len(cohort.work))
        with observing(model.backbone.moe, balancing.observe):
            for step in cohort.steps():
                loss = step.forward(settings.label_smoothing)
                balance, _ = balancing.losses()
                step.backward(loss + settings.balance * balance * step.shares())
                step.apply()
        return [self._upload(cohort, slot, found) for slot, found in enumerate(validate(cohort, held_out))]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of the dense parts, the held experts, p and the validation's figures."""
        dense, experts = by_part(model, trainable_shapes(model, self.plan(model, client.budget)))
        held = {layer: len(ids) for layer, ids in download.part(HELD).items()}
        own = {name: (held[layer_of(name)], *shape[1:]) for name, shape in experts.items()}
        return {
            **in_part(ADAPTER, dense),
            **in_part(EXPERTS, own),
            **in_part(ACTIVATION, {layer.experts: (layer.num_experts,) for layer in model.moe}),
            LOSS: (),
            ACCURACY: (),
        }

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Line 8, then lines 3 and 4 after the last round of stage 1, or lines 9 and 10 in stage 2."""
        round, members = int(state.scalars["round"]) + 1, SubMoes.of(state.tensors)
        known, dense, experts, heard = Payload(state.tensors), WeightedMean(), WeightedMean(), []
        sizes = {layer: own.shape[1] for layer, own in members.held.items()}
        for upload in uploads:
            client, payload = upload.client, upload.payload
            is_late = upload.round < round
            held = members.ids(client.index, earlier=is_late)
            dense.add(payload.part(ADAPTER), float(client.examples))
            own = all_rows(payload.part(EXPERTS), held, sizes)
            weights = {
                layer: torch.zeros(sizes[layer]).index_fill(0, ids, client.examples) for layer, ids in held.items()
            }
            experts.add(own, {name: weights[layer_of(name)] for name in own})
            loss, accuracy = float(payload.tensors[LOSS]), float(payload.tensors[ACCURACY])
            members.measured(client.index, payload.part(ACTIVATION), loss, accuracy)
            heard += [] if is_late else [client.index]
        members.close_round()
        if round == self.settings.stage_one_rounds:
            members.fit()
        elif round > self.settings.stage_one_rounds:
            members.adjust(sorted(heard), self.settings.gain, self.settings.patience, self.settings.peers)
        trained = {ADAPTER: dense.result(known.part(ADAPTER)), EXPERTS: experts.result(known.part(EXPERTS))}
        tensors = {name: value for part, named in trained.items() for name, value in with_part(part, named).items()}
        return Payload({**tensors, **members.tensors()}, {"round": round})

    def observe(self, state: Payload, model: ModelInfo) -> list[Observation]:
        """Returns how many experts every client holds, what they weigh, how it validates, and who is settled."""
        members = SubMoes.of(state.tensors)
        counts = members.counts()
        clients = [f"client-{index:03d}" for index in range(len(counts))]
        sizes = torch.tensor([float(layer.expert_parameters) for layer in model.moe])
        layers = [f"layer {index}" for index in range(len(model.moe))]
        return [
            Observation("held experts", counts.float(), clients, layers),
            Observation("held expert parameters", counts.float() @ sizes / 1e6, clients, unit="million"),
            Observation("validation accuracy", members.accuracy, clients),
            Observation(
                "clients whose experts are settled", (members.status == FROZEN).sum()[None].float(), ["clients"]
            ),
        ]

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the global model with all experts, which a client may not be able to hold."""
        known = Payload(state.tensors)
        return Deployment(self._plan(FullRouter()), together(model, known.part(ADAPTER), known.part(EXPERTS)))

    def excerpt(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns what the client receives: its sub-MoE, and nothing of its peers' sets, data or scores."""
        return Payload(self.download(state, model, client).tensors)

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the client's sub-MoE: a client of FedMoE keeps nothing of its own."""
        is_whole = any(name.startswith("clients/") for name in state.tensors)
        received = Payload((self.excerpt(state, model, client) if is_whole else state).tensors)
        sets = received.part(HELD)
        held = tuple(tuple(sets[layer.experts].tolist()) for layer in model.moe)
        return Deployment(self._plan(FullRouter(), HeldExperts(held)), full_tensors(model, received))

    def _plan(self, *parts: FullRouter | HeldExperts) -> AdapterPlan:
        settings = self.settings
        scale = settings.alpha / settings.rank
        return AdapterPlan(settings.rank, scale, (*settings.targets, "experts"), parts=parts)

    def _room(self, model: ModelInfo, budget: Budget) -> Room:
        """Returns what bounds the sets of a budget's clients, alpha memory_k.

        Raises:
            ConfigError: not even the active experts fit.
        """
        sizes = [layer.expert_parameters for layer in model.moe]
        memory = self.settings.memory.get(budget.name, 1.0)
        whole = sum(layer.num_experts * size for layer, size in zip(model.moe, sizes, strict=True))
        room = Room(sizes, [layer.top_k for layer in model.moe], int(self.settings.memory_share * memory * whole))
        if room.smallest > room.limit:
            raise ConfigError(
                f"method.memory: budget '{budget.name}' can hold {memory:.3g} of all expert parameters, of which "
                f"{self.settings.memory_share:.3g} are for its experts, but the {model.top_k} active experts of "
                f"every layer are {room.smallest / whole:.3g} of all.",
                "Raise method.memory of this budget, or method.memory_share.",
            )
        return room

    def _upload(self, cohort: Cohort, slot: int, found: Validation) -> Payload:
        """Line 7."""
        dense, experts = by_part(cohort.model.backbone.info, cohort.read(slot))
        own = held_rows(experts, cohort.work[slot].download.part(HELD))
        parts = {ADAPTER: dense, EXPERTS: own, ACTIVATION: found.activation}
        tensors = {name: value for part, named in parts.items() for name, value in with_part(part, named).items()}
        return Payload({**tensors, LOSS: torch.tensor(found.loss), ACCURACY: torch.tensor(found.accuracy)})


def by_part(model: ModelInfo, named: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Returns trainables without and with a row for each expert, the latter by their names in the part `experts`."""
    names = _names_of_experts(model, named)
    dense = {name: value for name, value in named.items() if name not in names}
    return dense, {own: named[name] for name, own in names.items()}


def together(model: ModelInfo, dense: Mapping[str, Value], experts: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the trainables of both parts by their own names: what `by_part` took apart."""
    routers = {f"{layer.experts}.{ROUTER_ROWS}": delta_name(layer.router) for layer in model.moe}
    return {**dense, **{routers.get(name, name): value for name, value in experts.items()}}


def layer_of(name: str) -> str:
    """Returns the path of the experts that a name of the part `experts` belongs to."""
    return name.rsplit(".", 2)[0]


def held_rows(experts: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns [n, ..] of every [M, ..]: the rows of the held experts of its layer."""
    return {name: value[held[layer_of(name)]] for name, value in experts.items()}


def all_rows(own: Mapping[str, Tensor], held: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns [M, ..] of every [n, ..]: a row for each expert of its layer, zero for those that are not held."""
    return {
        name: rows.new_zeros(sizes[layer_of(name)], *rows.shape[1:]).index_copy(0, held[layer_of(name)], rows)
        for name, rows in own.items()
    }


def full_tensors(model: ModelInfo, download: Payload) -> dict[str, Tensor]:
    """Returns what a client received as it is loaded."""
    sizes = {layer.experts: layer.num_experts for layer in model.moe}
    own = all_rows(download.part(EXPERTS), download.part(HELD), sizes)
    return together(model, download.part(ADAPTER), own)


def _names_of_experts(model: ModelInfo, names: Iterable[str]) -> dict[str, str]:
    """Returns the name of every trainable with a row for each expert -> its name in the part `experts`."""
    routers = {delta_name(layer.router): f"{layer.experts}.{ROUTER_ROWS}" for layer in model.moe}
    prefixes = tuple(f"{layer.experts}." for layer in model.moe)
    return {name: routers.get(name, name) for name in names if name in routers or name.startswith(prefixes)}
