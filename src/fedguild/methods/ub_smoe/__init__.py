"""UB-SMoE: active experts by budget, modulated routing, pseudo-gradients for idle experts.

V.-T. Tran, H.-H. Nguyen-Le, M. Ruffini, M. Dzaferagic, "UB-SMoE: Universally Balanced Sparse
Mixture-of-Experts for Resource-adaptive Federated Fine-tuning of Foundation Models", 2026.

The algorithm, in our words (Algorithms 1-3):
     1  server: start LoRA Theta (A random, B = 0), phi^l = 0, G~^l = 0 for every MoE layer l
     2  each round, for the sampled clients c:
     3      client: Theta_c = Theta, phi_c = phi, rho_c = sqrt(K-bar / K_c)
     4      each optimizer step, with K_c active experts:
     5          routing by m_i = s_i + phi_i for the N_p largest s_i, else s_i; weights:
                softmax of m over the K_c chosen        (Eq. 2, 10)  -> modulated_routing.py
     6          loss: mean NLL + lambda (|relu(phi_min - phi)|^2 + |relu(phi - phi_max)|^2)  (Eq. 11)
     7          gradient of an expert without tokens: rho_c G~_i  (Eq. 16)  -> pseudo_gradient.py
     8      client: upload Theta_c and a_{c,i} / n_c, how often expert i was activated
     9      server: Theta' = sum_c p_c Theta_c
    10      server: G~_i = (Theta_i - Theta'_i) / (eta Gamma), of the experts
                                                        (Eq. 15)  -> pseudo_gradient.py
    11      server: u~_i = sum_c p_c a_{c,i} / n_c                  (Eq. 12)  -> modulation.py
    12      server: phi~_i = tanh((K-bar / M) / (u~_i + epsilon) - 1)  (Eq. 13)  -> modulation.py
    13      server: phi = (1 - zeta) phi~ + zeta phi                (Eq. 14)  -> modulation.py

Symbols: K_c `budget.active_experts`, K-bar `mean_active`, N_p `candidates`, lambda `penalty_weight`,
zeta `momentum`, p_c `client.examples` over their sum, eta Gamma `step_size`, G~ `pseudo_gradient`,
u~ `utilisation`, rho `scaling_factor`.

Readings and deviations (docs/methods/ub-smoe.md):
    - N_p is literal (Eq. 10) by default; `preserve` keeps the N_p largest and modulates the rest.
    - phi trains within a round without weight decay, is then overwritten by the server's phi and never uploaded; the
      global model is used with the server's phi.
    - G~ goes into the gradients before the optimizer's step, clipped per expert before rho_c.
      An expert without tokens and without G~ is not updated; AdamW with a zero gradient would still change it.
    - eta Gamma is the p_c-weighted mean of the sum of a client's learning rates over its steps.
    - K-bar is over all clients of the federation, p_c of the rest over the round's.
    - A client that took part in the last round holds Theta and receives Theta': it computes line 10
      itself, bit by bit, and the server sends G~ to the others only (delivery.py); to all where a codec
      rounds Theta.

Beside the algorithm: the figures of a round are in observations.py, the measurement of Table 8 in cosine.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.schedule import learning_rate
from fedguild.client.training import activation_frequency
from fedguild.core.payload import ADAPTER, SERVER, Payload, with_part
from fedguild.methods.ub_smoe.cosine import cosine_shapes, cosine_terms, mean_cosines, measured_cosines
from fedguild.methods.ub_smoe.delivery import can_derive, holders_after, keep_received, no_holders, received_gradient
from fedguild.methods.ub_smoe.modulated_routing import Gating, ModulatedRouting, Modulation, split
from fedguild.methods.ub_smoe.modulation import Range, modulate
from fedguild.methods.ub_smoe.names import (
    COSINE,
    FIGURES,
    IDLE,
    MEAN_ACTIVE,
    PHI,
    PSEUDO_GRADIENT,
    RATIO,
    STEP_SIZE,
    TRAINING,
    UTILISATION,
    VERSION,
    WITHOUT,
)
from fedguild.methods.ub_smoe.observations import observations
from fedguild.methods.ub_smoe.pseudo_gradient import (
    ExpertGradients,
    Inactivity,
    Norm,
    Scaling,
    clip_per_expert,
    experts_of,
    pseudo_gradient,
    scaling_factor,
    unit_per_expert,
)
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes
from fedguild.server.limits import require_within_top_k
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, Observation, Own, Roster, ServerCosts
from fedguild.server.schema import Bound, Entry, Schema, entries
from fedguild.server.settings import Alpha, LoraSettings
from fedguild.server.terms import Means, Term, Terms, Upload, mean, mean_of_budget


class UbSmoeSettings(LoraSettings):
    """The options of UB-SMoE; the LoRA rank is the same for every budget."""

    alpha: Alpha = 20.0
    modulation: Modulation = Field(
        "candidate",
        description="DMR: phi shifts the N_p largest logits (Eq. 10), all others while those stay active (preserve), "
        "or none",
    )
    candidates: int = Field(2, ge=0, description="N_p of Eq. 10; in preserve the number of experts preserved")
    gating: Gating = Field(
        "renormalised", description="weights of the active experts: softmax over them (Eq. 2), or the model's own rule"
    )
    phi: Literal["learned", "fixed"] = Field("learned", description="whether phi also trains within a round")
    penalty: Literal["hinge", "square", "none"] = Field(
        "hinge", description="regulariser of phi: Eq. 11, the square of Algorithm 1, or none"
    )
    penalty_weight: float = Field(0.01, ge=0, description="lambda of Eq. 11")
    phi_range: Literal["hinge", "clamp", "scale"] = Field(
        "hinge",
        description="what keeps phi in its range: Eq. 11 alone; clamp: phi never leaves it; scale: the tanh of Eq. 13 "
        "times the range",
    )
    phi_min: float = Field(-1.0, description="lower end of phi's range")
    phi_max: float = Field(1.0, description="upper end of phi's range")
    utilisation_update: bool = Field(True, description="whether the server moves phi by utilisation (Eq. 12-14)")
    momentum: float = Field(0.9, ge=0, le=1, description="zeta of Eq. 14")
    epsilon: float = Field(1e-6, gt=0, description="epsilon of Eq. 13")
    pseudo_gradient: Inactivity = Field(
        "batch",
        description="experts that get G~ (Eq. 16): those without a token in a step, all by their share of tokens "
        "that did not activate them, or none",
    )
    scaling: Scaling = Field("root", description="rho_c as a function of K-bar / K_c (Table 19)")
    pseudo_gradient_clip: float | None = Field(
        2.0, gt=0, description="largest norm of an expert's G~ in a layer; null: never clipped"
    )
    pseudo_gradient_norm: Norm = Field(
        "published",
        description="size of G~: published, Eq. 15's up to the clip; expert, the norm of the expert's own gradient in "
        "the round, before rho_c",
    )
    send_pseudo_gradient: Literal["when_needed", "always"] = Field(
        "when_needed",
        description="when_needed: G~ goes only to clients that cannot derive it (all, with a codec that rounds); "
        "always: to all (paper)",
    )
    measure_cosine: bool = Field(
        False,
        description="whether clients hold examples out to compare G~ with the true gradient (Table 8); a run's FLOPs "
        "leave the backward passes for this out",
    )
    cosine_examples: int = Field(8, ge=1, description="most examples that a client holds out for measure_cosine")

    @field_validator("targets")
    @classmethod
    def _adapts_experts(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if "experts" not in targets:
            raise ValueError("must include experts, which UB-SMoE balances")
        return targets

    @field_validator("phi_max")
    @classmethod
    def _above_the_lower_end(cls, phi_max: float, known: ValidationInfo) -> float:
        if phi_max < known.data.get("phi_min", phi_max):
            raise ValueError(f"must be at least phi_min, {known.data['phi_min']}")
        return phi_max

    def fitted(self, model: ModelInfo, clients: int, *, exact: bool) -> Self:
        """Sends G~ to all clients if Theta is rounded, which hides small moves."""
        return self if exact else self.model_copy(update={"send_pseudo_gradient": "always"})


class UbSmoe(Method):
    """Modulated routing and pseudo-gradients; see the module's docstring."""

    Settings = UbSmoeSettings
    settings: UbSmoeSettings
    facts = Facts(
        needs_experts=True,
        start_hint="Set method.gating=native: with few active experts the published weights (Eq. 2) are near 1, too "
        "much for experts that were trained with a softmax over all.",
        costs=ServerCosts(
            "O(n): a running mean, and the pseudo-gradient (as large as the experts' LoRA)",
            "O(C n)",
            note="A client that took part in the round before derives the pseudo-gradient; others download it.",
        ),
        not_private="sends how often a client's tokens used each expert",
        not_preferences="trains with an alignment of the routers in a loop of its own",
        needs_float64="measures its pseudo-gradient",
        told_alike=(ADAPTER, PHI),
        not_stepped="takes its pseudo-gradient from the step of its adapter",
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's K_c active experts and modulated routing."""
        model.require_experts("UB-SMoE")
        settings = self.settings
        lora = settings.lora
        routing = ModulatedRouting(settings.modulation, settings.candidates, settings.gating, settings.phi == "learned")
        pseudo_gradients = experts_of(lora.shapes(model)) if self.injects else {}
        return AdapterPlan(
            (lora, routing),
            require_within_top_k(model, budget),
            buffers=sum(map(math.prod, pseudo_gradients.values())),
        )

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        plans = [self.plan(model, budget) for budget in roster.budgets]
        theta, phi = split(initial_adapter(model, plans[0], rng))
        zeros = {name: torch.zeros_like(value) for name, value in experts_of(theta).items()}
        return Payload.of(
            {
                ADAPTER: theta,
                PHI: phi,
                PSEUDO_GRADIENT: zeros if self.injects else {},
                UTILISATION: {layer.name: torch.zeros(layer.num_experts) for layer in model.moe},
                COSINE: {name: torch.zeros(shape) for name, shape in self.cosine_shapes(model).items()},
                SERVER: no_holders(),
            },
            {VERSION: 0, STEP_SIZE: 0.0, MEAN_ACTIVE: mean_active_experts(roster.clients)},
        )

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: Theta, phi and, for clients that cannot derive it, G~."""
        derives = self.settings.send_pseudo_gradient == "when_needed" and can_derive(state, client)
        parts = (ADAPTER, PHI) if derives else (ADAPTER, PHI, PSEUDO_GRADIENT)
        return Payload.of({part: state.part(part) for part in parts}, state.scalars)

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 8."""
        settings = self.settings
        for slot, work in enumerate(cohort.work):  # line 3
            cohort.load(slot, {**work.download.part(ADAPTER), **work.download.part(PHI)})
        gradients = [received_gradient(work) if self.injects else {} for work in cohort.work]
        cosines = measured_cosines(cohort, gradients, settings.cosine_examples) if settings.measure_cosine else None
        paths = [layer.experts for layer in cohort.model.backbone.info.moe]
        idle = ExpertGradients(cohort.trainables, paths, settings.pseudo_gradient_norm)
        for slot, (work, gradient) in enumerate(zip(cohort.work, gradients, strict=True)):
            if gradient:
                idle.set(slot, self.sized(gradient), self.rho(work))
        for step in cohort.steps():
            nll = step.forward()  # line 5
            if not step.is_update:
                step.backward(nll)
                continue
            step.backward(nll + self.penalty(cohort))  # line 6, Eq. 11
            step.apply(idle.inject(*step.activations(), settings.pseudo_gradient))  # line 7, Eq. 16
            self.keep_in_range(cohort)
        uploads = []
        for slot, gradient in enumerate(gradients):  # line 8
            if self.injects and settings.send_pseudo_gradient == "when_needed":
                keep_received(cohort, slot)
            theta, _ = split(cohort.read(slot))
            frequency = activation_frequency(cohort, slot)
            used = {layer.name: frequency[layer.experts] for layer in cohort.model.backbone.info.moe}
            numbers = {STEP_SIZE: summed_rates(cohort, slot), WITHOUT: torch.tensor(float(gradient is None))}
            numbers |= dict(zip((IDLE, RATIO), idle.figures(slot), strict=True))
            parts = {ADAPTER: theta, UTILISATION: used, TRAINING: numbers, COSINE: cosines[slot] if cosines else {}}
            uploads.append(Payload.of(parts))
        return uploads

    def rho(self, work: LocalWork) -> float:
        """Returns rho_c of a client, with K-bar from the server (line 3)."""
        mean_active = float(work.download.scalars[MEAN_ACTIVE])
        return scaling_factor(self.settings.scaling, mean_active, work.client.budget.active_experts)

    def sized(self, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns G~ as it is injected: clipped, or of norm 1 where each expert's own gradient gives it its size."""
        if self.settings.pseudo_gradient_norm == "expert":
            return unit_per_expert(gradient)
        return clip_per_expert(gradient, self.settings.pseudo_gradient_clip)

    @torch.no_grad()
    def keep_in_range(self, cohort: Cohort) -> None:
        """Brings every slot's phi back into its range, where that is how it is kept."""
        if self.settings.phi_range == "clamp":
            for trainable in split(cohort.trainables)[1].values():
                trainable.stored.clamp_(self.settings.phi_min, self.settings.phi_max)

    def penalty(self, cohort: Cohort) -> Tensor:
        """Returns each slot's regulariser of phi, [S]: Eq. 11, or lambda |phi|^2 (Algorithm 1, line 18)."""
        settings = self.settings
        total = torch.zeros(len(cohort.work), device=cohort.model.device)
        if settings.phi == "fixed" or settings.penalty == "none":
            return total
        _, modulations = split(cohort.trainables)
        for phi in (trainable.stored for trainable in modulations.values()):
            if settings.penalty == "hinge":
                below, above = (settings.phi_min - phi).relu(), (phi - settings.phi_max).relu()
                total = total + below.square().sum(dim=1) + above.square().sum(dim=1)
            else:
                total = total + phi.square().sum(dim=1)
        return settings.penalty_weight * total

    def terms(self, sent: Upload) -> Terms:
        """Lines 9 and 11, eta Gamma, and figures of each budget; a layer counts where a client's tokens reached it."""
        numbers, examples = sent.payload.part(TRAINING), float(sent.client.examples)
        step_size = {STEP_SIZE: numbers[STEP_SIZE].clamp(min=0)}
        figures = {name: numbers[name].clamp(min=0) for name in (IDLE, RATIO) if name in numbers}
        terms = (
            mean(ADAPTER, sent)
            | mean(TRAINING, sent, tensors=step_size, is_change=False)
            | mean_of_budget(FIGURES, sent, figures, "size")
            | Terms(totals={WITHOUT: float(numbers[WITHOUT] > 0)})
        )
        for layer, share in sent.payload.part(UTILISATION).items():
            reached = examples * bool((share > 0).any())
            rate = Term(share.clamp(0.0, 1.0), reached, layer, is_change=False)
            terms |= Terms({f"{UTILISATION}/{layer}": rate})
        return terms | cosine_terms(sent) if self.settings.measure_cosine else terms

    def update(self, state: Payload, means: Means) -> Payload:
        """Lines 9 to 13."""
        if not means.contributors:
            return state
        settings, before, phi = self.settings, state.part(ADAPTER), state.part(PHI)
        after = means.moved(ADAPTER, before)  # line 9
        eta_gamma = float(means.moved(TRAINING, {STEP_SIZE: torch.zeros(())})[STEP_SIZE])
        moved = pseudo_gradient(before, experts_of(after), eta_gamma) if self.injects else {}  # line 10
        used = means.moved(UTILISATION, {})  # line 11
        if settings.utilisation_update:  # lines 12 and 13
            limits = Range(settings.phi_min, settings.phi_max, settings.phi_range)
            mean_active = float(state.scalars[MEAN_ACTIVE])
            phi = modulate(phi, used, mean_active, settings.momentum, settings.epsilon, limits)
        return Payload.of(
            {
                ADAPTER: after,
                PSEUDO_GRADIENT: moved,
                PHI: phi,
                UTILISATION: {**state.part(UTILISATION), **used},
                COSINE: mean_cosines(means, state.part(COSINE)),
                SERVER: {**holders_after(means), **with_part(FIGURES, means.moved("budget", {}))},
            },
            {**state.scalars, VERSION: int(state.scalars[VERSION]) + 1, STEP_SIZE: eta_gamma},
        )

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns Theta_i, and figures of the training (lines 5 and 6)."""
        theta, _ = split(trainable_shapes(model, self.plan(model, client.budget)))
        layers = len(model.moe)
        utilisation = {layer.name: (layer.num_experts,) for layer in model.moe}
        measured = sum(layer.num_experts for layer in model.moe)
        bounds = {"values": Bound(largest=1.001), "measured": Bound(largest=float(measured))}
        return Schema(
            {
                **entries(ADAPTER, theta),
                **entries(UTILISATION, utilisation, Bound(1.0, client.budget.active_experts)),
                **{
                    f"{COSINE}/{name}": Entry(shape, bounds.get(name))
                    for name, shape in self.cosine_shapes(model).items()
                },
                **entries(TRAINING, {STEP_SIZE: ()}, Bound(largest=1e3)),
                **entries(TRAINING, {WITHOUT: (), IDLE: (layers,)}, Bound(largest=1.0)),
                **entries(TRAINING, {RATIO: (layers,)}, Bound()),
            }
        )

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns the global Theta and phi with the budget's K."""
        return Deployment(self.plan(model, budget), {**state.part(ADAPTER), **state.part(PHI)})

    def observe(self, state: Payload, model: ModelInfo) -> Sequence[Observation]:
        """Returns figures of the experts' utilisation in the round, of phi's response to it, and of G~'s quality."""
        return observations(state, model)

    @property
    def injects(self) -> bool:
        """Whether experts without tokens get G~."""
        return self.settings.pseudo_gradient != "none"

    def cosine_shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the measurements of G~; empty unless enabled."""
        return cosine_shapes(model) if self.settings.measure_cosine else {}


def mean_active_experts(clients: Sequence[ClientInfo]) -> float:
    """Returns K-bar, the mean number of active experts, each client weighed by its examples (Algorithm 1, line 5)."""
    examples = sum(client.examples for client in clients)
    return sum(client.examples * client.budget.active_experts for client in clients) / examples


def summed_rates(cohort: Cohort, slot: int) -> Tensor:
    """Returns a client's sum of learning rates over the steps of the round, its part of eta Gamma."""
    steps = cohort.reports[slot].steps
    return torch.tensor(sum(learning_rate(cohort.settings, step, steps, cohort.round) for step in range(steps)))
