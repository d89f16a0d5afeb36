"""FedAlign-MoE: private gates with aligned routing, experts averaged by region and direction.

Z. Fang, Q. Wang, H. An, Z. Lin, Y. Deng, X. Chen, Y. Fang, "Aggregation Alignment for Federated
Learning with Mixture-of-Experts under Data Heterogeneity".

The algorithm, in our words (Algorithm 1; i, j are clients, e an expert of one MoE layer):
     1  server: start the experts; there is no reference p_g yet
     2  each round, for the sampled clients i:
     3      client: take the global experts and p_g, continue with its own gate
     4      client: alpha_i(e) = sigmoid(o_i(e) - eta)                              (Eq. 9)
     5      client: train gate and experts on L_task + lambda L_reg                 (Eq. 11), where
                L_reg = sum_e alpha_i(e) KL(p(x, e) || p_g(e))
                over e in Top-k(p(x)) or Top-k(p_g)         -> regulariser.py       (Eq. 8, 10)
     6      client: p-bar_i(e), m_i(e), mu_i(e) over its data -> measuring.py       (Eq. 3, 5, 12)
     7      client: send them, and the change dtheta_i of the experts it activated, each expert's
                trainables in one row                       -> parts.py
     8      server: o_i = p-bar_i mean_j p-bar_j                                    (Eq. 4)
     9      server: omega_i = o_i m_i / sum_j o_j m_j, p_g = sum_i omega_i p-bar_i  (Eq. 6, 7)
    10      server, for each expert: S_ij = cos(mu_i, mu_j), tau = M - beta Sigma   (Eq. 16, 17)
    11      server: D_ij = cos(dtheta_i, dtheta_j)                                  (Eq. 13)
    12      server: gamma_ij = sigmoid(S_ij - tau) max(0, D_ij)                     (Eq. 18; 14)
    13      server: theta += sum_i (sum_j gamma_ij / sum_ij gamma_ij) dtheta_i      (Eq. 15)
    The formulas of lines 8 to 13 are in aggregation.py; the buffer of uploads for lines 10 to 13 is in uploads.py.

Symbols: p-bar `routing`, m `margin`, mu `region`, dtheta `update`, o `overlap`, p_g `reference`,
mean_j p-bar_j `consensus`, eta `overlap_threshold`, lambda `regularisation`, beta `tolerance`.

Readings and deviations (docs/methods/fedalign-moe.md):
    - p is the softmax over all experts: over the active ones, as in Eq. 1, top-1 routing has p = 1.
      The forward pass keeps the model's own weights.
    - An expert's part of Eq. 8 is a divergence that is least at p = p_g; p log(p / p_g) is not, under the mask.
    - o_i needs all clients' p-bar, so line 4 uses that of the rounds before: the client's last p-bar
      times the downloaded consensus; 0 before its first round. Without p_g (round 1) there is no L_reg.
    - p_g is scaled to sum to one. Where all o m are zero, omega is uniform.
    - A client that did not activate an expert sends nothing for it and is left out of lines 10-13.
      A cosine with a zero vector is 0; where all gamma are 0, the expert stays as it was.
    - Gates are never uploaded, so the global model runs the published gate; the clients' own models
      (`evaluation.clients`) have the global experts behind their own gates; `evaluation.pooled` is their
      mean on one and the same test, the reading of the paper's global accuracy that the tables show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.observing import observing
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.methods.fedalign_moe import aggregation as region
from fedguild.methods.fedalign_moe.measuring import RoutingProfile, measure_routing
from fedguild.methods.fedalign_moe.observations import FIGURES, expert_figures, observations, reference_figures
from fedguild.methods.fedalign_moe.options import require_direction, require_targets
from fedguild.methods.fedalign_moe.parts import EXPERTS, GATE, by_layer, by_part, expert_vectors, from_expert_vectors
from fedguild.methods.fedalign_moe.regulariser import LayerTarget, Regulariser, adaptive_weights
from fedguild.methods.fedalign_moe.uploads import RegionUploads, Spool
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes
from fedguild.server.aggregation import WeightedMean
from fedguild.server.limits import active_experts_of
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, Observation, Own, Roster, ServerCosts
from fedguild.server.schema import Bound, Schema, entries
from fedguild.server.settings import Alpha, MethodSettings, Rank, StartNorm
from fedguild.server.terms import Upload

ROUTING, MARGIN, REGION, UPDATE = "routing", "margin", "region", "update"
"""The parts of an upload with p-bar, m, mu and dtheta; `routing` also of a client's memory."""
REFERENCE, CONSENSUS = "reference", "consensus"
"""The parts of the state, and of a download, with p_g and mean_j p-bar_j."""


class FedAlignMoeSettings(MethodSettings):
    """The options of FedAlign-MoE."""

    experts: Literal["lora", "full"] = Field("lora", description="how the experts train: LoRA, or their full weights")
    rank: Rank = 8
    alpha: Alpha = 16.0
    start_norm: StartNorm = None
    targets: tuple[str, ...] = Field(
        (),
        description="other layers with LoRA, averaged by size: leaf names of linear layers, or attention and mlp",
    )
    gate: Literal["private", "uploaded", "averaged"] = Field(
        "private",
        description="private: each client's own, never sent; uploaded: the same, but sent for the global model to run "
        "the mean gate; averaged: parameters averaged by size, no L_reg (Fig. 13 a)",
    )
    regularisation: float = Field(0.1, ge=0, description="lambda of Eq. 11; 0 leaves L_reg out")
    overlap_threshold: float = Field(0.1, description="eta of Eq. 9")
    overlap_temperature: float = Field(1.0, gt=0, description="divides o - eta in Eq. 9")
    divergence: Literal["bernoulli", "generalised", "pointwise"] = Field(
        "bernoulli",
        description="an expert's part of Eq. 8: the divergence of 'goes to e or not'; p log(p / p_g) - p + p_g; or "
        "p log(p / p_g) alone, which pushes away from p_g",
    )
    layers: Literal["mean", "sum"] = Field("mean", description="how L_reg combines the layers, which Eq. 8 leaves open")
    adaptive_weights: bool = Field(
        True, description="alpha by Eq. 9; false: the same for all experts, by `equal_weight` (Fig. 13 c)"
    )
    equal_weight: Literal["one", "mean"] = Field(
        "one", description="without adaptive weights: alpha = 1, or the mean over a layer's experts of Eq. 9's"
    )
    consistency_weights: bool = Field(True, description="omega by Eq. 6; false: uniform (Fig. 13 b)")
    aggregation: Literal["region", "index", "size"] = Field(
        "region",
        description="weights of Eq. 15: by gamma; index: the same for all that activated the expert (Fig. 14 a); size: "
        "by the number of examples over all clients of the round, as FedAvg",
    )
    direction: Literal["flat", "product", "none"] = Field(
        "flat", description="D of Eq. 13 from the trained tensors, from the change of B A, or left out (Fig. 14 b)"
    )
    tolerance: float = Field(1.0, ge=0, description="beta of Eq. 17")
    fixed_threshold: float | None = Field(
        None, ge=-1, le=1, description="tau of Eq. 14, in place of Eq. 17 (Fig. 14 c)"
    )
    similarity_temperature: float = Field(1.0, gt=0, description="divides S - tau in Eq. 18")
    statistics_tokens: int | None = Field(
        4096,
        ge=1,
        description="largest number of a client's tokens that line 6 uses, the same ones in each round; null: all",
    )


class FedAlignMoe(Method):
    """Aligned routing with private gates, region-conditioned expert averaging; see the module's docstring."""

    Settings = FedAlignMoeSettings
    facts = Facts(
        needs_experts=True,
        costs=ServerCosts(
            "O(n + C n_e): the uploads wait on disk, one expert's C versions (n_e each) are in memory",
            "O(C² n): a Gram matrix over the clients for every expert",
            varies="at most",
            leave_out=True,
            note="An upload leaves out the experts that the client did not activate. After its training a client runs "
            "forward passes over its data, up to `statistics_tokens` tokens, which the estimates leave out.",
        ),
        not_private="sends means of the routing and of the experts' inputs",
        not_preferences="aligns the routing in a loop of its own",
        not_linear="it compares the clients' experts by their cosines",
    )
    settings: FedAlignMoeSettings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns a full gate and LoRA on the experts, or full experts, with the budget's active experts."""
        settings = self.settings
        model.require_experts("FedAlign-MoE")
        require_targets(settings.targets)
        require_direction(settings.direction, settings.experts)
        targets = (*settings.targets, "experts") if settings.experts == "lora" else settings.targets
        lora = Lora(settings.rank, settings.alpha / settings.rank, targets, start_norm=settings.start_norm)
        parts: list[AdapterPart] = [lora] if targets else []
        parts += [FullRouter()]
        parts += [FullExperts()] if settings.experts == "full" else []
        return AdapterPlan(tuple(parts), active_experts_of(model, budget))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        parts = by_part(model, initial_adapter(model, self.plan(model, roster.budgets[0]), rng))
        if self.settings.gate == "private":
            del parts[GATE]
        return Payload.of(parts)

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: the experts, p_g and the consensus; a gate only where gates are averaged."""
        parts = [EXPERTS, ADAPTER]
        parts += [GATE] if self.settings.gate == "averaged" else []
        parts += [REFERENCE, CONSENSUS] if self._aligns else []
        return Payload({name: value for name, value in state.tensors.items() if name.partition("/")[0] in parts})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 7."""
        for slot, work in enumerate(cohort.work):
            for part in (EXPERTS, ADAPTER, GATE):
                cohort.load(slot, work.download.part(part))
            if self.settings.gate != "averaged":
                cohort.load(slot, work.memory.part(GATE))
        regulariser = self._regulariser(cohort)  # line 4
        with observing(cohort.model.backbone.moe, regulariser.observe):
            for step in cohort.steps():
                nll = step.forward()
                penalty = regulariser.loss() * step.shares()
                step.backward(nll + self.settings.regularisation * penalty)  # Eq. 11
                step.apply()
        profile = measure_routing(cohort, self.settings.statistics_tokens)  # line 6
        return [self._upload(cohort, slot, profile) for slot in range(len(cohort.work))]

    def _regulariser(self, cohort: Cohort) -> Regulariser:
        """Lines 3 and 4: p_g, and alpha from each client's last p-bar and the consensus."""
        settings, model = self.settings, cohort.model
        reference, consensus = (cohort.work[0].download.part(part) for part in (REFERENCE, CONSENSUS))
        targets = {}
        for index, layer in enumerate(model.backbone.info.moe):
            if layer.experts not in reference:
                continue
            nothing = torch.zeros(layer.num_experts)
            last = torch.stack([work.memory.part(ROUTING).get(layer.experts, nothing) for work in cohort.work])
            overlap = last * consensus[layer.experts]  # Eq. 4
            alpha = adaptive_weights(overlap, settings.overlap_threshold, settings.overlap_temperature)  # Eq. 9
            if not settings.adaptive_weights:
                equal = torch.ones_like(alpha) if settings.equal_weight == "one" else alpha.mean(dim=1, keepdim=True)
                alpha = equal.expand_as(alpha)
            targets[index] = LayerTarget(reference[layer.experts].to(model.device), alpha.to(model.device))
        top_k = [plan.active_experts or model.backbone.info.top_k for plan in model.plans]
        return Regulariser(targets, len(cohort.work), top_k, settings.divergence, settings.layers)

    def _upload(self, cohort: Cohort, slot: int, profile: RoutingProfile) -> Payload:
        """Line 7."""
        assert cohort.routing is not None
        info = cohort.model.backbone.info
        parts = by_part(info, cohort.read(slot))
        started = by_layer(cohort.work[slot].download.part(EXPERTS))
        sent = with_part(ADAPTER, parts[ADAPTER])
        if self.settings.gate != "private":
            sent |= with_part(GATE, parts[GATE])
        routing = {}
        for index, (layer, measured) in enumerate(zip(info.moe, profile.of(slot), strict=True)):
            experts = layer.experts
            routing[experts] = measured.routing
            sent[f"{MARGIN}/{experts}"] = measured.margin
            update = expert_vectors(by_layer(parts[EXPERTS])[experts])
            update -= expert_vectors(started[experts])
            for expert in cohort.routing.counts[index, slot].nonzero().flatten().tolist():
                sent[f"{REGION}/{experts}/{expert}"] = measured.region[expert].clone()
                sent[f"{UPDATE}/{experts}/{expert}"] = update[expert : expert + 1].clone()
        own_gate = parts[GATE] if self.settings.gate != "averaged" else {}
        cohort.keep(slot, {**with_part(GATE, own_gate), **with_part(ROUTING, routing)})
        return Payload({**sent, **with_part(ROUTING, routing)})

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 8 to 13. The server holds one upload at a time; data for pairs of clients is buffered."""
        with Spool() as spool:
            received, means = RegionUploads(spool), {ADAPTER: WeightedMean(), GATE: WeightedMean()}
            for upload in uploads:
                client, payload = upload.client, upload.payload
                received.add(client, *(payload.part(part) for part in (ROUTING, MARGIN, REGION, UPDATE)))
                for part, mean in means.items():
                    mean.add(payload.part(part), float(client.examples))
            tensors = {name: value for name, value in state.tensors.items() if not name.startswith(f"{FIGURES}/")}
            for part, mean in means.items():
                tensors |= with_part(part, mean.result(state.part(part)))
            for experts, trained in by_layer(state.part(EXPERTS)).items():
                tensors |= self._reference(experts, received)  # lines 8 and 9
                tensors |= self._experts(experts, trained, received)  # lines 10 to 13
        return Payload(tensors)

    def _reference(self, experts: str, received: RegionUploads) -> dict[str, Tensor]:
        """Lines 8 and 9 for one layer, over the clients with tokens there; without any, p_g stays."""
        routing, margin = received.statistics(experts)
        if not len(routing):
            return {}
        overlap, settings = region.overlap(routing), self.settings  # Eq. 4
        alpha = adaptive_weights(overlap, settings.overlap_threshold, settings.overlap_temperature)  # Eq. 9
        omega = region.consistency_weights(overlap, margin)  # Eq. 6
        if not settings.consistency_weights:
            omega = torch.full_like(omega, 1 / len(omega))
        reference = region.global_reference(routing, omega)  # Eq. 7
        return {
            f"{REFERENCE}/{experts}": reference.float(),
            f"{CONSENSUS}/{experts}": routing.mean(dim=0).float(),
            **reference_figures(experts, overlap, alpha, omega, region.distances(routing, reference)),
        }

    def _experts(self, experts: str, trained: Mapping[str, Tensor], received: RegionUploads) -> dict[str, Tensor]:
        """Lines 10 to 13 for one layer; an expert that no client activated stays unchanged."""
        vectors, thresholds, aggregated = expert_vectors(trained), [], 0
        for expert in range(len(vectors)):
            clients, regions, updates = received.versions(f"{experts}/{expert}")
            if not clients:
                continue
            similarity = region.cosines(region.gram(regions))  # S of Eq. 16
            threshold = self.settings.fixed_threshold
            if threshold is None:
                threshold = region.adaptive_threshold(similarity, self.settings.tolerance)  # Eq. 17
            if self.settings.aggregation == "region":
                direction = self._direction(updates, {name: value[expert] for name, value in trained.items()})
                temperature = self.settings.similarity_temperature
                pairs = region.pair_weights(similarity, direction, threshold, temperature)  # Eq. 18
                weights = region.client_weights(pairs)
            elif self.settings.aggregation == "index":
                weights = torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)
            else:
                weights = received.shares(clients)
            vectors[expert] += region.combined(updates, weights)  # Eq. 15
            thresholds.append(threshold)
            aggregated += bool(weights.any())
        figures = expert_figures(experts, thresholds, aggregated, len(vectors))
        return {**with_part(EXPERTS, from_expert_vectors(vectors, trained)), **figures}

    def _direction(self, updates: Tensor, before: Mapping[str, Tensor]) -> Tensor | None:
        """Returns D [n, n] of one expert (Eq. 13), or None if it is not used."""
        if self.settings.direction == "none":
            return None
        products = region.gram(updates) if self.settings.direction == "flat" else region.product_gram(updates, before)
        return region.cosines(products)

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns p-bar and m, each of which sums to 1 at most in a layer, and each expert's mu and dtheta, if any."""
        shapes = by_part(model, trainable_shapes(model, self.plan(model, client.budget)))
        sent = entries(ADAPTER, shapes[ADAPTER])
        if self.settings.gate != "private":
            sent |= entries(GATE, shapes[GATE])
        for layer in model.moe:
            by_expert = {layer.experts: (layer.num_experts,)}  # a token has one likeliest expert
            sent |= entries(ROUTING, by_expert, Bound(total=1.0)) | entries(MARGIN, by_expert, Bound(total=1.0))
            stacks = [shape for name, shape in shapes[EXPERTS].items() if name.startswith(f"{layer.experts}.")]
            size = sum(torch.Size(shape).numel() for shape in stacks) // layer.num_experts
            for expert in range(layer.num_experts):
                name = f"{layer.experts}/{expert}"
                sent |= entries(REGION, {name: (layer.hidden,)}, omissible=True)
                sent |= entries(UPDATE, {name: (1, size)}, omissible=True)
        return Schema(sent)

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the global experts with the mean gate, or with the gate that the client kept, if it is private."""
        plan, tensors = self.plan(model, budget), {**state.part(EXPERTS), **state.part(ADAPTER)}
        if self.settings.gate == "averaged":
            return Deployment(plan, {**tensors, **state.part(GATE)})
        if own is GLOBAL:
            plan = plan.without(FullRouter) if self.settings.gate == "private" else plan
            return Deployment(plan, {**tensors, **state.part(GATE)})
        gates = {name: torch.zeros(shape) for name, shape in FullRouter().shapes(model).items()}
        return Deployment(plan, {**tensors, **gates, **own.kept.part(GATE)})

    def observe(self, state: Payload, model: ModelInfo) -> list[Observation]:
        """Returns per layer: o, alpha, the spread of omega, tau and the share of experts whose updates counted."""
        return observations(state, model)

    @property
    def _aligns(self) -> bool:
        return self.settings.gate != "averaged" and self.settings.regularisation > 0
