"""PFL-MoE: a global and a personal adapter, their logits mixed by each client's gate.

B. Guo, Y. Mei, D. Xiao, W. Wu, "PFL-MoE: Personalized Federated Learning Based on Mixture of
Experts", APWeb-WAIM 2021. Read from the authors' code (guobbin/PFL-MoE). The two models are the
"experts" of its title; the backbone may have experts of its own or not.

The algorithm, in our words:
    1  server: start LoRA (A random, B = 0)
    2  each round, for the sampled clients i:
    3      client: load the global theta and minimise the mean loss over its response tokens
    4      server: theta = mean_i theta_i, every client alike
    5      client: split its data, 3/4 to personalise with and 1/4 for the gate
    6      client: theta_p = theta, trained on the 3/4                          -> second_training.py
    7      client: freeze both; train g(x) = sigmoid(w . phi(x) + b) on the 1/4 with
               z(x) = g(x) z(x; theta) + (1 - g(x)) z(x; theta_p), z the logits -> gate.py
    8      client: its own model is z(x)                                        -> logit_mixture.py

Symbols: theta `received`, theta_p `personal`, g and its w, b `gate`, phi `prompt_features`
(prompt_features.py). The paper's PFL-MF is `features: hidden`, its PFL-MFE `features: embedding`.

Readings and deviations (docs/methods/pfl-moe.md):
    - LoRA replaces the classifier's head; theta_p starts as a copy of the adapter.
    - phi is the mean over the prompt's tokens, of the frozen backbone's last hidden states (MF, its
      features) or of the token embeddings (MFE, its raw input). There is one g for a sequence.
    - The authors personalise once, after the last round. Here lines 5 to 7 follow line 3 in every
      round from `personal_from` on, anew from the theta that the client has received, so that any round can be
      evaluated. Their results are not sent and do not affect line 3.
    - A client's own model mixes the theta that it has received, with which its gate was trained.
    - The gate starts at w = 0, b = 0, so g = 1/2; a client with a single example stays there.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from fedguild.client.budget import Budget
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import ADAPTER, Payload
from fedguild.methods.pfl_moe.gate import GateSettings, train_gates
from fedguild.methods.pfl_moe.logit_mixture import BIAS, SECOND, WEIGHT, LogitMixture
from fedguild.methods.pfl_moe.second_training import add_cost, second_training
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, NotPrivate, Own, Roster, ServerCosts
from fedguild.server.settings import DropoutLoraSettings, Rank, Targets
from fedguild.server.terms import Means, Terms, Upload, mean

RECEIVED, PERSONAL, GATE = "received", "personal", "gate"
"""The parts of a client's memory: theta, theta_p, and w and b."""


class PflMoeSettings(DropoutLoraSettings):
    """The options of PFL-MoE; LoRA's are those of both adapters."""

    rank: Rank = 8
    targets: Targets = ("router", "experts")
    features: Literal["hidden", "embedding"] = Field(
        "hidden",
        description="the gate's features of a prompt: the mean of the frozen backbone's last hidden states (MF), or of "
        "the token embeddings (MFE)",
    )
    personal_from: int = Field(
        1, ge=1, description="first round in which clients personalise; before it, their own model is the global one"
    )
    gate_share: float = Field(0.25, gt=0, lt=1, description="share of a client's examples that its gate trains on")
    personal_epochs: float | None = Field(
        None, gt=0, description="passes of line 6 over the client's other examples; null: as in the run's training"
    )
    personal_learning_rate: float | None = Field(
        None, ge=0, description="learning rate of line 6; null: as in the run's training"
    )
    gate_epochs: float = Field(1.0, gt=0, description="passes of line 7 over the gate's examples")
    gate_learning_rate: float = Field(1e-3, ge=0, description="learning rate of the gate's Adam")
    gate_weight_decay: float = Field(5e-4, ge=0, description="weight decay of the gate's Adam, added to the gradient")


class PflMoe(Method):
    """A mixture of the global and a personal adapter; see the module's docstring."""

    Settings = PflMoeSettings
    settings: PflMoeSettings
    facts = Facts(
        costs=ServerCosts(
            "O(n), whatever C is: a running mean",
            "O(C n)",
            note="A client's personal adapter and gate stay with it; the estimates leave their training out.",
        ),
        not_private=NotPrivate(example="trains a personal model and a gate on the same examples"),
        not_preferences="trains its gate on the loss of single answers",
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns one LoRA, the same for every budget: in training the two adapters take turns in it."""
        return AdapterPlan((self.settings.lora,))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Line 1."""
        return Payload.of({ADAPTER: initial_adapter(model, self.plan(model, roster.budgets[0]), rng)}, {"rounds": 0})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Line 3, then lines 5 to 7."""
        load_received(cohort)
        uploads = train(cohort)
        if cohort.round >= self.settings.personal_from:
            self._personalise(cohort)
        return uploads

    def _personalise(self, cohort: Cohort) -> None:
        """Lines 5 to 7, for all clients of the cohort at once; what they keep replaces what they kept before."""
        settings = self.settings
        another = second_training(cohort, self._personal_training(cohort.settings))
        for_gate = [  # line 5
            another.hold_out(slot, settings.gate_share, len(work.examples)) if len(work.examples) > 1 else []
            for slot, work in enumerate(cohort.work)
        ]
        load_received(another)
        train(another)  # line 6
        received = [work.download.part(ADAPTER) for work in cohort.work]
        personal = [another.read(slot) for slot in range(len(cohort.work))]
        gate_settings = GateSettings(
            settings.features, settings.gate_epochs, settings.gate_learning_rate, settings.gate_weight_decay
        )
        gates = train_gates(another, for_gate, received, personal, gate_settings)  # line 7
        for slot, (theta, theta_p, gate) in enumerate(zip(received, personal, gates, strict=True)):
            cohort.keep(slot, Payload.of({RECEIVED: theta, PERSONAL: theta_p, GATE: gate}).tensors)
            cohort.leave(slot, {})
        add_cost(cohort, another)

    def _personal_training(self, training: TrainingSettings) -> TrainingSettings:
        """Returns the training settings of line 6."""
        settings = self.settings
        if settings.personal_epochs is not None:
            training = training.model_copy(update={"epochs": settings.personal_epochs, "steps": None})
        if settings.personal_learning_rate is not None:
            training = training.model_copy(update={"learning_rate": settings.personal_learning_rate})
        return training

    def terms(self, sent: Upload) -> Terms:
        """Line 4."""
        return mean(ADAPTER, sent, "uniform")

    def update(self, state: Payload, means: Means) -> Payload:
        """Line 4, and the number of rounds."""
        mean = means.moved(ADAPTER, state.part(ADAPTER))
        return Payload.of({ADAPTER: mean}, {"rounds": int(state.scalars["rounds"]) + 1})

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Line 8; a client without a personal model gets the global one, mixed with itself once others have theirs."""
        settings, plan, received = self.settings, self.plan(model, budget), state.part(ADAPTER)
        if own is GLOBAL or int(state.scalars["rounds"]) < settings.personal_from:
            return Deployment(plan, received)
        theta, personal = own.model.part(RECEIVED) or received, own.kept.part(PERSONAL) or received
        gate = own.kept.part(GATE) or {WEIGHT: torch.zeros(model.hidden), BIAS: torch.zeros(())}
        mixture = LogitMixture(settings.rank, settings.targets, settings.features)
        second = {f"{SECOND}{name}": value for name, value in personal.items()}
        return Deployment(AdapterPlan((mixture, plan.lora)), {**theta, **second, **gate})
