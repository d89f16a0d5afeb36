"""PFL-MoE: a global and a personal model, mixed example by example by a gate that each client trains.

B. Guo, Y. Mei, D. Xiao, W. Wu, "PFL-MoE: Personalized Federated Learning Based on Mixture of
Experts", APWeb-WAIM 2021. Read from the authors' code (guobbin/PFL-MoE). The two models are the
"experts" of its title; the backbone may have experts of its own or not.

The algorithm, in our words:
    1  server: start LoRA (A random, B = 0)
    2  each round, for the sampled clients i:
    3      client: load the global theta and minimise the mean loss over its response tokens
    4      server: theta = mean_i theta_i, every client alike
    5      client: split its data, 3/4 to personalise with and 1/4 for the gate
    6      client: theta_p = theta, trained on the 3/4
    7      client: freeze both; train g(x) = sigmoid(w . phi(x) + b) on the 1/4 with
               z(x) = g(x) z(x; theta) + (1 - g(x)) z(x; theta_p), z the logits
    8      client: its own model is z(x)

Symbols: theta `received`, theta_p `personal`, g and its w, b `gate`, phi `prompt_features`. The paper's
PFL-MF is `features: hidden`, its PFL-MFE `features: embedding`.

Readings and deviations (docs/methods/pfl-moe.md):
    - What was the classifier's head is LoRA here; theta_p starts as a copy of the adapter.
    - phi is the mean over the prompt's tokens, of the frozen backbone's last hidden states (MF, its
      features) or of the token embeddings (MFE, its raw input). There is one g for a sequence.
    - The authors personalise once, after the last round. Here lines 5 to 7 follow line 3 in every
      round from `personal_from` on, anew from the theta that the client has received, so that any
      round can be evaluated. Nothing of them is sent, and line 3 does not see them.
    - A client's own model mixes the theta that it has received, with which its gate was trained.
    - The gate starts at w = 0, b = 0, so g = 1/2; a client with a single example stays there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.logit_gate import GateSettings, train_gates
from fedguild.config.training import TrainingSettings
from fedguild.methods.common import ADAPTER, in_part, initial_adapter
from fedguild.model.adapters.logit_mixture import BIAS, SECOND, WEIGHT, LogitMixture
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.seeding import derive
from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import Deployment, Upload

RECEIVED, PERSONAL, GATE = "received", "personal", "gate"
"""The parts of a client's memory: theta, theta_p, and w and b."""


class PflMoeSettings(BaseModel):
    """The options of PFL-MoE."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(8, ge=1, description="LoRA rank r of both adapters")
    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; the scale is alpha / rank")
    targets: tuple[str, ...] = Field(
        ("router", "experts"),
        description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of LoRA on linear layers")
    features: Literal["hidden", "embedding"] = Field(
        "hidden",
        description="what the gate sees of a prompt: the mean of the frozen backbone's last hidden states (MF), or of "
        "the token embeddings (MFE)",
    )
    personal_from: int = Field(
        1, ge=1, description="first round in which clients personalise; before it, their own model is the global one"
    )
    gate_share: float = Field(0.25, gt=0, lt=1, description="part of a client's examples that its gate trains on")
    personal_epochs: float | None = Field(
        None, gt=0, description="passes of line 6 over the client's other examples; null: as the run's training says"
    )
    personal_learning_rate: float | None = Field(
        None, ge=0, description="learning rate of line 6; null: as the run's training says"
    )
    gate_epochs: float = Field(1.0, gt=0, description="passes of line 7 over the gate's examples")
    gate_learning_rate: float = Field(1e-3, ge=0, description="learning rate of the gate's Adam")
    gate_weight_decay: float = Field(5e-4, ge=0, description="weight decay of the gate's Adam, added to the gradient")


class PflMoe:
    """A mixture of the global and a personal adapter; see the module's docstring."""

    name: ClassVar[str] = "pfl-moe"
    title: ClassVar[str] = "PFL-MoE: a global and a personal adapter, their logits mixed by each client's gate"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = PflMoeSettings

    def __init__(self, settings: PflMoeSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns one LoRA, the same for every budget: in training the two adapters take turns in it."""
        settings = self.settings
        return AdapterPlan(
            settings.rank, settings.alpha / settings.rank, targets=settings.targets, dropout=settings.dropout
        )

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1."""
        return Payload(with_part(ADAPTER, initial_adapter(model, self.plan(model, budgets[0]), rng)), {"rounds": 0})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: theta."""
        return Payload(with_part(ADAPTER, state.part(ADAPTER)))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Line 3, then lines 5 to 7."""
        train_from_received(cohort)
        uploads = [Payload(with_part(ADAPTER, cohort.read(slot))) for slot in range(len(cohort.work))]
        if cohort.round >= self.settings.personal_from:
            self._personalise(cohort)
        return uploads

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of theta_i."""
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Line 4."""
        mean = WeightedMean()
        for upload in uploads:
            mean.add(upload.payload.part(ADAPTER), 1.0)
        after = mean.result(state.part(ADAPTER))
        return Payload(with_part(ADAPTER, after), {"rounds": int(state.scalars["rounds"]) + 1})

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns the global model."""
        return Deployment(self.plan(model, budget), state.part(ADAPTER))

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Line 8; for a client without a personal model the global one, mixed with itself once others have theirs."""
        deployment = self.deploy(state, model, client.budget)
        if int(state.scalars["rounds"]) < self.settings.personal_from:
            return deployment
        theta = memory.part(RECEIVED) or deployment.tensors
        personal = memory.part(PERSONAL) or deployment.tensors
        gate = memory.part(GATE) or {WEIGHT: torch.zeros(model.hidden), BIAS: torch.zeros(())}
        settings = self.settings
        mixture = LogitMixture(settings.rank, settings.targets, settings.features)
        second = {f"{SECOND}{name}": value for name, value in personal.items()}
        return Deployment(replace(deployment.plan, parts=(mixture,)), {**theta, **second, **gate})

    def _personalise(self, cohort: Cohort) -> None:
        """Lines 5 to 7, for all clients of the cohort at once; what they keep replaces what they kept before."""
        settings, started = self.settings, time.perf_counter()
        own = Cohort(
            cohort.model,
            cohort.work,
            self._personal_training(cohort.settings),
            round_index=cohort.round,
            seed=derive(cohort.seed, "personal"),
            pad_id=cohort.pad_id,
        )
        for_gate = [
            own.hold_out(slot, settings.gate_share, len(work.examples)) if len(work.examples) > 1 else []
            for slot, work in enumerate(cohort.work)
        ]
        train_from_received(own)
        received = [work.download.part(ADAPTER) for work in cohort.work]
        personal = [own.read(slot) for slot in range(len(cohort.work))]
        how = GateSettings(
            settings.features, settings.gate_epochs, settings.gate_learning_rate, settings.gate_weight_decay
        )
        gates = train_gates(own, for_gate, received, personal, how)
        for slot, kept in enumerate(zip(received, personal, gates, strict=True)):
            parts = zip((RECEIVED, PERSONAL, GATE), kept, strict=True)
            cohort.keep(slot, {name: value for part, held in parts for name, value in with_part(part, held).items()})
        add_cost(cohort, own, time.perf_counter() - started)

    def _personal_training(self, training: TrainingSettings) -> TrainingSettings:
        """Returns how line 6 trains."""
        settings = self.settings
        if settings.personal_epochs is not None:
            training = training.model_copy(update={"epochs": settings.personal_epochs, "steps": None})
        if settings.personal_learning_rate is not None:
            training = training.model_copy(update={"learning_rate": settings.personal_learning_rate})
        return training


def train_from_received(cohort: Cohort) -> None:
    """Trains every client of a cohort from the global theta on the cohort's examples."""
    for slot, work in enumerate(cohort.work):
        cohort.load(slot, work.download.part(ADAPTER))
    for step in cohort.steps():
        nll = step.forward()
        step.backward(nll)
        step.apply()


def add_cost(cohort: Cohort, own: Cohort, seconds: float) -> None:
    """Adds the tokens, examples and time of the personal training to the clients' reports of the round."""
    total = sum(report.tokens for report in own.reports)
    for report, extra in zip(cohort.reports, own.reports, strict=True):
        report.tokens += extra.tokens
        report.examples += extra.examples
        report.seconds += seconds * extra.tokens / max(1, total)
