"""FedPrompt: federated averaging of a soft prompt.

W. Kuang et al., "FederatedScope-LLM", KDD 2024 (the federated method); B. Lester, R. Al-Rfou,
N. Constant, "The Power of Scale for Parameter-Efficient Prompt Tuning", EMNLP 2021 (the prompt).

The algorithm, in our words:
    1  everyone: P = the backbone's embeddings of a text's tokens, n_v x d
    2  each round, for the sampled clients i:
    3      client: P_i = P
    4      client: minimise the mean loss over its response tokens, P_i in front of every text
    5      server: P = mean_i P_i

Symbols: P `soft_prompt`, n_v `tokens`, d the model's hidden size, the text `text`.

Readings and deviations (docs/methods/fedprompt.md):
    - The initial prompt is not sent. The server has neither a tokenizer nor embeddings, and every client has both: the
      first download is empty, and each client reads the same rows from the same frozen backbone (`SoftPrompt.text`). A
      model deployed before the first round does the same.
    - n_v is a setting, as shapes must be known without a tokenizer. FedAMoLE takes the number of the
      text's tokens; another number cuts or repeats them, as peft does.
    - The virtual tokens are tokens to the layers, routers and their counts; no loss and no candidate's
      likelihood includes them.
    - `personal` is FedPrompt-FT: a client's own model is P_i after line 4, before line 5.
"""

from __future__ import annotations

import torch
from pydantic import Field

from fedguild.client.budget import Budget
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.core.payload import ADAPTER, Payload
from fedguild.model.adapters.soft_prompt import SoftPrompt
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.server.method import RUNNING_MEAN, Facts, Method, NotPrivate, Roster
from fedguild.server.settings import MethodSettings
from fedguild.server.terms import Terms, Upload, mean

TEXT = (
    "Generate a clear and direct response that accurately fulfills the task based on the provided instruction "
    "and any given context."
)
"""FedAMoLE's soft prompt for Dolly-15K and Natural Instructions."""


class FedPromptSettings(MethodSettings):
    """The options of FedPrompt."""

    text: str = Field(TEXT, min_length=1, description="what the soft prompt starts from")
    tokens: int = Field(
        23, ge=1, description="n_v: virtual tokens; the text is cut or repeated to this number, so match its length"
    )
    personal: bool = Field(
        False, description="FedPrompt-FT: whether a client's own model has its prompt as trained, before the mean"
    )


class FedPrompt(Method):
    """Federated prompt tuning; see the module's docstring."""

    Settings = FedPromptSettings
    settings: FedPromptSettings
    facts = Facts(
        costs=RUNNING_MEAN,
        not_private=NotPrivate(client="starts the prompt at the clients, which receive none at first"),
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns a soft prompt and no LoRA, the same for every budget."""
        return AdapterPlan((SoftPrompt(self.settings.tokens, self.settings.text),))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Returns an empty state: every machine that runs the model can do line 1 itself."""
        return Payload()

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 and 4; before the first round the download is empty, and the prompt starts from the text."""
        load_received(cohort)
        return train(cohort, keep=self.settings.personal)

    def terms(self, sent: Upload) -> Terms:
        """Line 5; before the first round the server has no prompt, and P_i counts as a whole."""
        return mean(ADAPTER, sent, "uniform")
