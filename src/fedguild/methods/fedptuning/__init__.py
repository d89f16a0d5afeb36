"""FedPTuning: federated averaging of a soft prompt's encoder.

W. Kuang et al., "FederatedScope-LLM", KDD 2024 (the federated method); X. Liu et al., "P-Tuning:
Prompt Tuning Can Be Comparable to Fine-tuning Across Scales and Tasks", ACL 2022 (the encoder).

The algorithm, in our words:
    1  server: start E (n_v x d) and the layers of MLP: d -> w -> w -> d with ReLU between
                                                                       -> encoded_prompt.py
    2  each round, for the sampled clients i:
    3      client: E_i = E, MLP_i = MLP
    4      client: minimise the mean loss over its response tokens, MLP_i(E_i) in front of every text
    5      server: E = mean_i E_i, MLP = mean_i MLP_i
    6  to run a model: P = MLP(E), n_v x d; E and MLP are no longer needed

Symbols: E `prompt_encoder.embedding`, MLP `prompt_encoder.layers`, n_v `tokens`, w `width`, d the
model's hidden size, P `soft_prompt`.

Readings and deviations (docs/methods/fedptuning.md):
    - E and MLP are both sent and averaged. The released comparison (FedAMoLE's) uploads P, loads it
      as E in the next round, and lets the MLP leak from client to client through a model that they
      share; its traffic is P's alone.
    - `personal` is FedPTuning-FT: a client's own model is MLP_i(E_i) after line 4, before line 5.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.core.payload import ADAPTER, Payload
from fedguild.methods.fedptuning.encoded_prompt import EncodedPrompt, encoded_prompt
from fedguild.model.adapters.soft_prompt import PROMPT, SoftPrompt
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import GLOBAL, RUNNING_MEAN, Deployment, Facts, Method, Own
from fedguild.server.settings import MethodSettings
from fedguild.server.terms import Terms, Upload, mean


class FedPTuningSettings(MethodSettings):
    """The options of FedPTuning."""

    tokens: int = Field(20, ge=1, description="n_v: virtual tokens")
    width: int = Field(1024, ge=1, description="w: inner width of the MLP")
    personal: bool = Field(
        False,
        description="FedPTuning-FT: whether a client's own model has its prompt as trained, before the mean",
    )


class FedPTuning(Method):
    """Federated P-tuning; see the module's docstring."""

    Settings = FedPTuningSettings
    settings: FedPTuningSettings
    facts = Facts(
        costs=RUNNING_MEAN,
        not_private="",  # its uploads are the received adapters, after plain training
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns an encoded prompt and no LoRA, the same for every budget."""
        return AdapterPlan((EncodedPrompt(self.settings.tokens, self.settings.width, model.hidden),))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4."""
        load_received(cohort)
        uploads = train(cohort)
        if self.settings.personal:
            for slot, upload in enumerate(uploads):
                cohort.keep(slot, {PROMPT: encoded_prompt(upload.part(ADAPTER))})
        return uploads

    def terms(self, sent: Upload) -> Terms:
        """Line 5."""
        return mean(ADAPTER, sent, "uniform")

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Line 6."""
        prompt = own.model.tensors.get(PROMPT)
        return self._deployed(encoded_prompt(state.part(ADAPTER)) if prompt is None else prompt)

    def _deployed(self, prompt: Tensor) -> Deployment:
        return Deployment(AdapterPlan((SoftPrompt(self.settings.tokens),)), {PROMPT: prompt})
