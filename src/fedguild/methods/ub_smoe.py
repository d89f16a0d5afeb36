"""UB-SMoE: routing that evens out the experts' use, and pseudo-gradients for those not activated.

V.-T. Tran, H.-H. Nguyen-Le, M. Ruffini, M. Dzaferagic, "UB-SMoE: Universally Balanced Sparse
Mixture-of-Experts for Resource-adaptive Federated Fine-tuning of Foundation Models", 2026.

The algorithm, in our words (Algorithms 1-3):
     1  server: start LoRA Theta (A random, B = 0), phi^l = 0, G~^l = 0 for every MoE layer l
     2  each round, for the sampled clients c:
     3      client: Theta_c = Theta, phi_c = phi, rho_c = sqrt(K-bar / K_c)
     4      each optimizer step, with K_c active experts:
     5          routing by m_i = s_i + phi_i for the N_p largest s_i, else s_i;
                weights: softmax of m over the K_c chosen                              (Eq. 2, 10)
     6          loss: mean NLL + lambda (|relu(phi_min - phi)|^2 + |relu(phi - phi_max)|^2)  (Eq. 11)
     7          gradient of an expert without tokens: rho_c G~_i                       (Eq. 16)
     8      client: upload Theta_c and a_{c,i} / n_c, how often expert i was activated
     9      server: Theta' = sum_c p_c Theta_c
    10      server: G~_i = (Theta_i - Theta'_i) / (eta Gamma), of the experts          (Eq. 15)
    11      server: u~_i = sum_c p_c a_{c,i} / n_c                                     (Eq. 12)
    12      server: phi~_i = tanh((K-bar / M) / (u~_i + epsilon) - 1)                  (Eq. 13)
    13      server: phi = (1 - zeta) phi~ + zeta phi                                   (Eq. 14)

Symbols: K_c `budget.active_experts`, K-bar `mean_active`, N_p `candidates`, lambda `penalty_weight`,
zeta `momentum`, p_c `client.examples` over their sum, eta Gamma `step_size`, G~ `pseudo_gradient`,
u~ `utilisation`, rho `scaling`.

Readings and deviations (docs/methods/ub-smoe.md):
    - N_p is literal (Eq. 10) by default; `preserve` keeps the N_p largest and modulates the rest.
    - phi trains within a round without weight decay, is overwritten by the server's and never
      uploaded; the global model is used with the server's phi.
    - G~ goes into the gradients before the optimizer's step, clipped per expert before rho_c.
      An expert without tokens and without G~ is left alone, which AdamW with a zero gradient is not.
    - eta Gamma is the p_c-weighted mean of the sum of a client's learning rates over its steps.
    - K-bar is over all clients of the federation, p_c of the rest over the round's.
    - A client that took part in the last round holds Theta and receives Theta': it computes line 10
      itself, bit by bit, and the server sends G~ to the others only; to all where a codec rounds Theta.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.held_out import held_out_cosines, taken_out
from fedguild.client.pseudo_gradient import (
    ExpertGradients,
    Inactivity,
    Scaling,
    clip_per_expert,
    pseudo_gradient,
    scaling_factor,
)
from fedguild.client.schedule import learning_rate
from fedguild.methods.common import ADAPTER, in_part, initial_adapter, require_within_top_k, without
from fedguild.model.adapters.modulated_routing import Gating, ModulatedRouting, Modulation
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import Deployment, Observation, Upload
from fedguild.server.utilisation import UtilisationRate, evenness, following, modulate

PHI = "phi"
PSEUDO_GRADIENT = "pseudo_gradient"
UTILISATION = "utilisation"
"""Up: a_{c,i} / n_c, in the state u~; one tensor [M] by each MoE block's name."""
COSINE, COSINE_MEASURED = "cosine/values", "cosine/measured"
"""Up: [L + 1] cosine of G~ in each layer and over all, and of how many experts; in the state its mean over the
clients that measured it, by their examples, and how many did."""
HELD_OUT = 0.1
"""Part of a client's examples that `measure_cosine` takes out of its training, at most."""
STEP_SIZE, WITHOUT = "training/step_size", "training/without_pseudo_gradient"
"""Up: a client's sum of learning rates, and 1 where it should have had G~ but could not derive it."""
HOLDERS, LOST = "server/holders", "server/lost"
"""In the state: the clients whose upload of the last round was on time, and how many uploads lacked G~."""
HELD, VERSION = "held", "version"
"""In a client's memory: the expert LoRA that it received, and after which round it was the global one."""


class UbSmoeSettings(BaseModel):
    """The options of UB-SMoE."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(20, ge=1, description="LoRA rank r, the same for every budget")
    alpha: float = Field(20.0, gt=0, description="LoRA's alpha; the scale is alpha / rank")
    targets: tuple[str, ...] = Field(
        ("attention", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
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
    phi_min: float = Field(-1.0, description="lower end of phi's range in Eq. 11")
    phi_max: float = Field(1.0, description="upper end of phi's range in Eq. 11")
    utilisation_update: bool = Field(True, description="whether the server moves phi by utilisation (Eq. 12-14)")
    momentum: float = Field(0.9, ge=0, le=1, description="zeta of Eq. 14")
    epsilon: float = Field(1e-6, gt=0, description="epsilon of Eq. 13")
    pseudo_gradient: Literal["batch", "token", "none"] = Field(
        "batch",
        description="who gets G~ (Eq. 16): experts without a token in a step, every expert by its share of tokens "
        "that did not activate it, or none",
    )
    scaling: Scaling = Field("root", description="rho_c as a function of K-bar / K_c (Table 19)")
    pseudo_gradient_clip: float | None = Field(
        2.0, gt=0, description="largest norm of an expert's G~ in a layer; null: never clipped"
    )
    send_pseudo_gradient: Literal["when_needed", "always"] = Field(
        "when_needed",
        description="when_needed: G~ goes only to clients that cannot derive it (all, with a codec that rounds); "
        "always: to all (paper)",
    )
    measure_cosine: bool = Field(
        False, description="whether clients hold examples out to compare G~ with the true gradient (Table 8)"
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


class UbSmoe:
    """Modulated routing and pseudo-gradients; see the module's docstring."""

    name: ClassVar[str] = "ub-smoe"
    title: ClassVar[str] = "UB-SMoE: active experts by budget, modulated routing, pseudo-gradients for idle experts"
    needs_experts: ClassVar[bool] = True
    Settings: ClassVar[type[BaseModel]] = UbSmoeSettings

    def __init__(self, settings: UbSmoeSettings) -> None:
        self.settings = settings

    def fitted(self, clients: int, *, exact: bool) -> UbSmoe:
        """Returns itself, or one that sends G~ to all where Theta is rounded, which would drown what little moved."""
        return self if exact else UbSmoe(self.settings.model_copy(update={"send_pseudo_gradient": "always"}))

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's K_c active experts and modulated routing."""
        model.require_experts("UB-SMoE")
        settings = self.settings
        part = ModulatedRouting(settings.modulation, settings.candidates, settings.gating, settings.phi == "learned")
        return AdapterPlan(
            rank=settings.rank,
            scale=settings.alpha / settings.rank,
            targets=settings.targets,
            active_experts=require_within_top_k(model, budget),
            parts=(part,),
        )

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1."""
        for budget in budgets:
            self.plan(model, budget)
        tensors = initial_adapter(model, self.plan(model, budgets[0]), rng)
        phi = {name: tensors.pop(name) for name in list(tensors) if _is_phi(name)}
        idle = {name: torch.zeros_like(value) for name, value in _experts(tensors).items()}
        server = {
            HOLDERS: torch.zeros(0, dtype=torch.int64),
            LOST: torch.zeros(()),
            **{name: torch.zeros(len(model.moe) + 1) for name in self._cosines},
        }
        return Payload(
            {
                **with_part(ADAPTER, tensors),
                **with_part(PHI, phi),
                **with_part(UTILISATION, {layer.name: torch.zeros(layer.num_experts) for layer in model.moe}),
                **(with_part(PSEUDO_GRADIENT, idle) if self._injects else {}),
                **server,
            },
            {VERSION: 0, "step_size": 0.0, "mean_active": 0.0},
        )

    def enroll(self, state: Payload, model: ModelInfo, clients: Sequence[ClientInfo]) -> Payload:
        """K-bar, by the clients' examples (Algorithm 1, line 5)."""
        examples = sum(client.examples for client in clients)
        active = sum(client.examples * client.budget.active_experts for client in clients)
        return Payload(state.tensors, {**state.scalars, "mean_active": active / examples})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Theta, phi and, to clients that cannot derive it, G~ (before the first round it is 0)."""
        known = Payload(state.tensors)
        held = client.index in state.tensors[HOLDERS].tolist() or state.scalars[VERSION] == 0
        derives = self.settings.send_pseudo_gradient == "when_needed" and held
        sent = {} if derives else with_part(PSEUDO_GRADIENT, known.part(PSEUDO_GRADIENT))
        return Payload(
            {**with_part(ADAPTER, known.part(ADAPTER)), **with_part(PHI, known.part(PHI)), **sent}, state.scalars
        )

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 8."""
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, {**work.download.part(ADAPTER), **work.download.part(PHI)})
        received = [self._received(work) for work in cohort.work]
        cosines = self._measure(cohort, received)
        moe = cohort.model.backbone.info.moe
        idle = ExpertGradients(cohort.trainables, [layer.experts for layer in moe])
        for slot, (work, gradient) in enumerate(zip(cohort.work, received, strict=True)):
            if gradient:
                idle.set(slot, clip_per_expert(gradient, self.settings.pseudo_gradient_clip), self.rho(work))
        inactivity: Inactivity = "token" if self.settings.pseudo_gradient == "token" else "batch"
        for step in cohort.steps():
            nll = step.forward()
            if not step.is_update:
                step.backward(nll)
                continue
            step.backward(nll + self.penalty(cohort))  # Eq. 11
            step.apply(idle.inject(*step.activations(), inactivity))  # Eq. 16
        return [
            Payload({**self._upload(cohort, slot, received[slot] is None), **cosines[slot]})
            for slot in range(len(cohort.work))
        ]

    def rho(self, work: LocalWork) -> float:
        """Returns rho_c of a client, K-bar as the server told it (line 3)."""
        mean_active = float(work.download.scalars["mean_active"])
        return scaling_factor(self.settings.scaling, mean_active, work.client.budget.active_experts)

    def penalty(self, cohort: Cohort) -> Tensor:
        """Returns each slot's regulariser of phi, [S]: Eq. 11, or lambda |phi|^2 (Algorithm 1, line 18)."""
        settings = self.settings
        total = torch.zeros(len(cohort.work), device=cohort.model.device)
        if settings.phi == "fixed" or settings.penalty == "none":
            return total
        for name, trainable in cohort.trainables.items():
            if _is_phi(name):
                phi = trainable.stored
                if settings.penalty == "hinge":
                    below, above = (settings.phi_min - phi).relu(), (phi - settings.phi_max).relu()
                    total = total + below.square().sum(dim=1) + above.square().sum(dim=1)
                else:
                    total = total + phi.square().sum(dim=1)
        return settings.penalty_weight * total

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of Theta_c, a_c and the two numbers about the training."""
        shapes = trainable_shapes(model, self.plan(model, client.budget))
        rows = (len(model.moe) + 1,)
        return {
            **in_part(ADAPTER, {name: shape for name, shape in shapes.items() if not _is_phi(name)}),
            **in_part(UTILISATION, {layer.name: (layer.num_experts,) for layer in model.moe}),
            **dict.fromkeys(self._cosines, rows),
            STEP_SIZE: (),
            WITHOUT: (),
        }

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 9 to 13, as running means over the uploads."""
        adapter, step_size, cosine, rate = WeightedMean(), WeightedMean(), WeightedMean(), UtilisationRate()
        delivered, lost = list[tuple[int, int]](), 0.0
        cosines = {name: torch.zeros_like(state.tensors[name]) for name in self._cosines}
        for upload in uploads:
            client, payload = upload.client, upload.payload
            adapter.add(payload.part(ADAPTER), client.examples)
            rate.add(payload.part(UTILISATION), client.examples)
            step_size.add({STEP_SIZE: payload.tensors[STEP_SIZE].clamp(min=0)}, client.examples)
            if self.settings.measure_cosine:
                measured = (payload.tensors[COSINE_MEASURED] > 0).float()
                cosine.add({COSINE: payload.tensors[COSINE]}, measured * float(client.examples))
                cosines[COSINE_MEASURED] += measured
            delivered.append((upload.round, client.index))
            lost += float(payload.tensors[WITHOUT])
        if not delivered:
            return state
        newest = max(number for number, _ in delivered)  # a late upload's client holds an earlier Theta
        before, mean_active = Payload(state.tensors), float(state.scalars["mean_active"])
        after = adapter.result(before.part(ADAPTER))  # line 9
        eta_gamma = float(step_size.result({STEP_SIZE: torch.zeros(())})[STEP_SIZE])
        moved = pseudo_gradient(before.part(ADAPTER), _experts(after), eta_gamma) if self._injects else {}  # Eq. 15
        phi, used = before.part(PHI), rate.result()  # Eq. 12
        if self.settings.utilisation_update:
            phi = modulate(phi, used, mean_active, self.settings.momentum, self.settings.epsilon)  # Eq. 13, 14
        tensors = {
            **with_part(ADAPTER, after),
            **with_part(PSEUDO_GRADIENT, moved),
            **with_part(PHI, phi),
            **with_part(UTILISATION, {**before.part(UTILISATION), **used}),
            **cosines,
            **cosine.result({name: value for name, value in cosines.items() if name == COSINE}),
            HOLDERS: torch.tensor(sorted(client for number, client in delivered if number == newest)),
            LOST: torch.tensor(lost),
        }
        version = int(state.scalars[VERSION]) + 1
        return Payload(tensors, {**state.scalars, VERSION: version, "step_size": eta_gamma})

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the global LoRA and phi with the budget's K."""
        known = Payload(state.tensors)
        return Deployment(self.plan(model, budget), {**known.part(ADAPTER), **known.part(PHI)})

    def excerpt(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns the state without who took part."""
        return without(state, HOLDERS)

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the global model at the client's budget: nothing is private."""
        return self.deploy(state, model, client.budget)

    def observe(self, state: Payload, model: ModelInfo) -> Sequence[Observation]:
        """Returns how evenly the round used the experts, how phi follows it, and what G~ is worth."""
        known = Payload(state.tensors)
        rates, phi = known.part(UTILISATION), known.part(PHI)
        layers = [f"layer {index}" for index in range(len(model.moe))]
        seen = [evenness([rates[layer.name] for layer in model.moe], layers)]
        if phi:
            seen.append(following([(phi[f"{layer.name}.phi"], rates[layer.name]) for layer in model.moe], layers))
        if COSINE in state.tensors and bool(state.tensors[COSINE_MEASURED].any()):
            rows = [*layers, "all layers"]
            seen.append(Observation("cosine of the pseudo-gradient", state.tensors[COSINE], rows))
            seen.append(Observation("clients that measured the cosine", state.tensors[COSINE_MEASURED], rows))
        if self._injects:
            seen.append(Observation("clients that lost their memory", state.tensors[LOST].reshape(1), ["clients"]))
        return seen

    @property
    def _cosines(self) -> Sequence[str]:
        """The names of what is measured of the pseudo-gradient; none unless asked."""
        return (COSINE, COSINE_MEASURED) if self.settings.measure_cosine else ()

    @property
    def _injects(self) -> bool:
        return self.settings.pseudo_gradient != "none"

    def _received(self, work: LocalWork) -> dict[str, Tensor] | None:
        """Returns G~, as sent or from the two states that the client holds (line 10).

        Empty where G~ is 0; None where the server relied on a memory that the client does not have.
        """
        version, sent = work.download.scalars[VERSION], work.download.part(PSEUDO_GRADIENT)
        if version == 0 or not self._injects:
            return {}
        if sent:
            return sent
        held = work.memory.tensors.get(VERSION)
        if held is None or int(held) + 1 != version:
            return None
        after = _experts(work.download.part(ADAPTER))
        return pseudo_gradient(work.memory.part(HELD), after, float(work.download.scalars["step_size"]))

    def _measure(self, cohort: Cohort, received: Sequence[dict[str, Tensor] | None]) -> list[dict[str, Tensor]]:
        """Returns what each slot uploads of cosines on examples that it does not train on; nothing unless asked."""
        if not self.settings.measure_cosine:
            return [{} for _ in cohort.work]
        examples = taken_out(cohort, HELD_OUT, self.settings.cosine_examples)
        found = held_out_cosines(cohort, examples, [gradient or {} for gradient in received])
        return [{COSINE: cosine.values.float(), COSINE_MEASURED: cosine.measured.float()} for cosine in found]

    def _upload(self, cohort: Cohort, slot: int, lost: bool) -> dict[str, Tensor]:
        """Line 8; keeps the expert LoRA that the client received, from which it derives the next G~."""
        work, steps = cohort.work[slot], cohort.reports[slot].steps
        assert cohort.routing is not None
        if self._injects and self.settings.send_pseudo_gradient == "when_needed":
            version = torch.tensor(int(work.download.scalars[VERSION]))
            cohort.keep(slot, {**with_part(HELD, _experts(work.download.part(ADAPTER))), VERSION: version})
        trained = {name: value for name, value in cohort.read(slot).items() if not _is_phi(name)}
        shares = cohort.routing.frequency()[:, slot].float().cpu()
        layers = cohort.model.backbone.info.moe
        used = {layer.name: share[: layer.num_experts] for layer, share in zip(layers, shares, strict=True)}
        rates = [learning_rate(cohort.settings, step, steps, cohort.round) for step in range(steps)]
        return {
            **with_part(ADAPTER, trained),
            **with_part(UTILISATION, used),
            STEP_SIZE: torch.tensor(sum(rates)),
            WITHOUT: torch.tensor(float(lost)),
        }


def _is_phi(name: str) -> bool:
    return name.endswith(".phi")


def _experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the LoRA of the experts: `….experts.up_proj.lora_A`, not that of attention or routers."""
    return {name: value for name, value in tensors.items() if ".experts." in name}
