"""The objects of a run, with the protocols of those that may be on other machines or in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import uuid4

import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.config import Config
from fedguild.core.files import write_text
from fedguild.core.payload import Payload
from fedguild.core.progress import Progress
from fedguild.data import Example
from fedguild.data.batches import Encoded
from fedguild.measuring.log.records import EvaluationRecord
from fedguild.measuring.scores.metrics import Metric
from fedguild.measuring.scores.preferences import Losses
from fedguild.measuring.scores.tasks import EvaluatedModel
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.runs.guarantee import Privacy, privacy_of
from fedguild.runs.setup.data import PreparedData, Split, encoded_texts
from fedguild.server.engine import Engine
from fedguild.server.method import Method
from fedguild.server.round import Outcome

OwnScope = Literal["client", "trained", "received"]
"""Whose scores a client takes on its own examples: its own model, the same as trained, and as received."""
IDENTITY = "run-id"


class Remote(Protocol):
    """Clients on their own machines, where they train and score their own models."""

    @property
    def engine(self) -> Engine:
        """The engine that trains these clients."""
        ...

    def current(self) -> list[ClientInfo]:
        """Returns all clients of the federation, as known before a round; some may be offline."""
        ...

    def is_revoked(self, client: int) -> bool:
        """Whether a client's key was revoked; nothing from it is used from then on."""
        ...

    def note(self, outcome: Outcome) -> None:
        """Records a complete round for the audit log."""
        ...

    def note_asked(self, *, round: int, attempt: int, clients: Sequence[int]) -> None:
        """Records which clients a round asks to train."""
        ...

    def note_failure(self, round: int, reason: str) -> None:
        """Records a round that failed."""
        ...

    def note_session(self, facts: Mapping[str, Any]) -> None:
        """Records a session of a secure aggregation that has ended, successfully or not."""
        ...

    def score(self, scope: OwnScope, state: Payload, number: int, split: Split) -> list[EvaluationRecord]:
        """Returns the scores of every client's own model, or of the model as it was trained or would be received."""
        ...


class Scorer(Protocol):
    """An engine that scores models in its own processes, which hold the backbone instead of this one."""

    @property
    def device(self) -> torch.device:
        """The kind of device that they compute on."""
        ...

    def slots(
        self,
        plans: Sequence[AdapterPlan],
        tensors: Sequence[Mapping[str, Tensor]],
        merged: Mapping[str, Tensor],
        model: ModelInfo,
    ) -> AbstractContextManager[EvaluatedModel]:
        """Loads models for the duration of a block, on a backbone with the given changes."""
        ...

    def free_bytes(self) -> int:
        """Returns the free bytes of the fullest device."""
        ...


@dataclass
class Experiment:
    """The objects of a run.

    `scorer` is None until there is an engine that scores models instead of this process. `remote` is None if the
    clients are simulated by the engine that the config names. `metrics` are those given in Python, by their names in
    the config. `references` are the losses of the preference pairs that were scored, under the backbone with so many
    active experts.
    """

    config: Config
    folder: Path
    method: Method
    data: PreparedData
    backbone: Backbone
    budgets: list[Budget]
    clients: list[ClientInfo]
    memory: ClientMemory
    progress: Progress
    remote: Remote | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    scorer: Scorer | None = None
    references: dict[tuple[Example, int | None], Losses] = field(default_factory=dict, repr=False)

    @cached_property
    def privacy(self) -> Privacy | None:
        return privacy_of(self.config, self.folder, self._training_examples, real=self.remote is not None)

    @cached_property
    def encoded(self) -> dict[int, list[Encoded]]:
        """Client index -> its training examples as token ids."""
        return encoded_texts(self.data, self.backbone.tokenizer, self.config.data.max_length)

    def _training_examples(self, client: int) -> int:
        """Returns the number of a client's training examples; for a real one, what it reports."""
        if self.remote is None:
            return len(self.data.clients[client].train)
        said = self.data.sizes()["train"][client]  # 0 for one that joined later
        return said or next(each.examples for each in self.clients if each.index == client)


def run_identity(folder: Path) -> str:
    """Returns the identity of a run, 32 hexadecimal digits, drawn on the first call and constant from then on.

    Two runs of the same config have different identities. Messages between machines carry the identity, so the tasks,
    uploads and memory of one run are never confused with those of another.
    """
    path = folder / IDENTITY
    if not path.is_file():
        write_text(path, uuid4().hex + "\n")
    return path.read_text("utf-8").strip()
