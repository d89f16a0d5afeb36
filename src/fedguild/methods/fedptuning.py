"""FedPTuning: federated averaging of a soft prompt that an MLP makes of an embedding.

W. Kuang et al., "FederatedScope-LLM", KDD 2024 (the federated method); X. Liu et al., "P-Tuning:
Prompt Tuning Can Be Comparable to Fine-tuning Across Scales and Tasks", ACL 2022 (the encoder).

The algorithm, in our words:
    1  server: start E (n_v x d) and the layers of MLP: d -> w -> w -> d with ReLU between
    2  each round, for the sampled clients i:
    3      client: E_i = E, MLP_i = MLP
    4      client: minimise the mean loss over its response tokens, MLP_i(E_i) in front of every text
    5      server: E = mean_i E_i, MLP = mean_i MLP_i
    6  to run a model: P = MLP(E), n_v x d; E and MLP are no longer needed

Symbols: E `prompt_encoder.embedding`, MLP `prompt_encoder.layers`, n_v `tokens`, w `width`, d the
model's hidden size, P `soft_prompt`.

Readings and deviations (docs/methods/fedptuning.md):
    - E and MLP travel and are averaged, both. The released comparison (FedAMoLE's) uploads P, loads it
      as E in the next round, and lets the MLP leak from client to client through a model that they
      share; its traffic is P's alone.
    - `personal` is FedPTuning-FT: a client's own model is MLP_i(E_i) after line 4, before line 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.methods.common import ADAPTER, in_part, initial_adapter
from fedguild.model.adapters.soft_prompt import PROMPT, EncodedPrompt, SoftPrompt, encoded_prompt
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import Deployment, Upload


class FedPTuningSettings(BaseModel):
    """The options of FedPTuning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int = Field(20, ge=1, description="n_v: virtual tokens")
    width: int = Field(1024, ge=1, description="w: inner width of the MLP")
    personal: bool = Field(
        False,
        description="FedPTuning-FT: whether a client's own model has its prompt as it trained it, before the mean",
    )


class FedPTuning:
    """Federated P-tuning; see the module's docstring."""

    name: ClassVar[str] = "fedptuning"
    title: ClassVar[str] = "FedPTuning: federated averaging of a soft prompt's encoder"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FedPTuningSettings

    def __init__(self, settings: FedPTuningSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns an encoded prompt and no LoRA, the same for every budget."""
        part = EncodedPrompt(self.settings.tokens, self.settings.width, model.hidden)
        return AdapterPlan(rank=1, scale=1.0, targets=(), parts=(part,))

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1."""
        return Payload(initial_adapter(model, self.plan(model, budgets[0]), rng))

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: E and MLP."""
        return Payload(with_part(ADAPTER, state.tensors))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        for slot, work in enumerate(cohort.work):
            cohort.load(slot, work.download.part(ADAPTER))
        for step in cohort.steps():
            nll = step.forward()
            step.backward(nll)
            step.apply()
        trained = [cohort.read(slot) for slot in range(len(cohort.work))]
        if self.settings.personal:
            for slot, encoder in enumerate(trained):
                cohort.keep(slot, {PROMPT: encoded_prompt(encoder)})
        return [Payload(with_part(ADAPTER, encoder)) for encoder in trained]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of E_i and MLP_i."""
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Line 5."""
        mean = WeightedMean()
        for upload in uploads:
            mean.add(upload.payload.part(ADAPTER), 1.0)
        return Payload(mean.result(state.tensors))

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Line 6."""
        return self._deployed(encoded_prompt(state.tensors))

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the prompt that the client kept, and the global one where it kept none."""
        if memory.tensors:
            return self._deployed(memory.tensors[PROMPT])
        return self.deploy(state, model, client.budget)

    def _deployed(self, prompt: Tensor) -> Deployment:
        part = SoftPrompt(self.settings.tokens)
        return Deployment(AdapterPlan(rank=1, scale=1.0, targets=(), parts=(part,)), {PROMPT: prompt})
