"""FedPrompt: federated averaging of a soft prompt, the only thing that is trained.

W. Kuang et al., "FederatedScope-LLM", KDD 2024 (the federated method); B. Lester, R. Al-Rfou,
N. Constant, "The Power of Scale for Parameter-Efficient Prompt Tuning", EMNLP 2021 (the prompt).

The algorithm, in our words:
    1  everybody: P = the backbone's embeddings of a text's tokens, n_v x d
    2  each round, for the sampled clients i:
    3      client: P_i = P
    4      client: minimise the mean loss over its response tokens, P_i in front of every text
    5      server: P = mean_i P_i

Symbols: P `soft_prompt`, n_v `tokens`, d the model's hidden size, the text `text`.

Readings and deviations (docs/methods/fedprompt.md):
    - Nobody sends the start. The server has neither a tokenizer nor embeddings, and every client has
      both: the first download is empty, and each client reads the same rows off the same frozen
      backbone (`SoftPrompt.text`). A model deployed before the first round does the same.
    - n_v is a setting, as shapes must be known without a tokenizer. FedAMoLE takes the number of the
      text's tokens; another number cuts or repeats them, as peft does.
    - The virtual tokens are tokens to the layers, routers and their counts; no loss and no candidate's
      likelihood includes them.
    - `personal` is FedPrompt-FT: a client's own model is P_i after line 4, before line 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.methods.common import ADAPTER, in_part
from fedguild.model.adapters.soft_prompt import SoftPrompt
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.payload import Payload, with_part
from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import Deployment, Upload

TEXT = (
    "Generate a clear and direct response that accurately fulfills the task based on the provided instruction "
    "and any given context."
)
"""FedAMoLE's soft prompt for Dolly-15K and Natural Instructions."""


class FedPromptSettings(BaseModel):
    """The options of FedPrompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field(TEXT, min_length=1, description="what the soft prompt starts from")
    tokens: int = Field(
        23, ge=1, description="n_v: virtual tokens; the text's are cut or repeated to as many, so count them"
    )
    personal: bool = Field(
        False, description="FedPrompt-FT: whether a client's own model has its prompt as it trained it, before the mean"
    )


class FedPrompt:
    """Federated prompt tuning; see the module's docstring."""

    name: ClassVar[str] = "fedprompt"
    title: ClassVar[str] = "FedPrompt: federated averaging of a soft prompt"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FedPromptSettings

    def __init__(self, settings: FedPromptSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns a soft prompt and no LoRA, the same for every budget."""
        return AdapterPlan(rank=1, scale=1.0, targets=(), parts=(SoftPrompt(self.settings.tokens, self.settings.text),))

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Returns an empty state: whoever runs the model has line 1."""
        return Payload()

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 3: P; nothing before the first round."""
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
            for slot, prompt in enumerate(trained):
                cohort.keep(slot, prompt)
        return [Payload(with_part(ADAPTER, prompt)) for prompt in trained]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the name and shape of P_i."""
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Line 5."""
        before, mean = state.tensors, WeightedMean()
        for upload in uploads:
            sent = upload.payload.part(ADAPTER)
            before = before or sent
            mean.add(sent, 1.0)
        return Payload(mean.result(before))

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns P; the text's embeddings before the first round."""
        return Deployment(self.plan(model, budget), state.tensors)

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the prompt that the client kept, and the global one where it kept none."""
        return Deployment(self.plan(model, client.budget), memory.tensors or state.tensors)
