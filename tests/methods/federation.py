"""A federation of small clients on a random backbone, without files or a round loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload, with_part
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded
from fedguild.engines.local import CohortSize, LocalEngine
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.server.engine import Delivery, Task
from fedguild.server.method import Method, Roster, Upload
from tests.backbones import random_rows

LARGE, MIDDLE, SMALL = Budget("large", 4, 3), Budget("middle", 2, 2), Budget("small", 1, 1)
SETTINGS = TrainingSettings(optimizer="adam", learning_rate=0.05, batch_size=2, steps=2, max_grad_norm=None)


def client(index: int, budget: Budget, examples: int = 4) -> ClientInfo:
    return ClientInfo(index, budget, examples)


class Federation:
    """Clients with data of their own (a row of 4 to 8 tokens each), a method, and the clients' memory."""

    def __init__(self, backbone: Backbone, method: Method, clients: Sequence[ClientInfo], folder: Path) -> None:
        self.backbone, self.method, self.clients = backbone, method, list(clients)
        self.model: ModelInfo = backbone.info
        self.memory = ClientMemory(folder / "clients")
        self.examples = {
            who.index: [
                Encoded(tuple(row), 2)
                for row in random_rows([4 + (who.index + i) % 5 for i in range(who.examples)], who.index)
            ]
            for who in clients
        }

    def start(self) -> Payload:
        return self.method.start(
            self.model, Roster([who.budget for who in self.clients], self.clients), torch_rng(0, "start")
        )

    def deliver(
        self,
        state: Payload,
        round: int = 1,
        who: Sequence[int] | None = None,
        settings: TrainingSettings = SETTINGS,
        cohort: CohortSize = "auto",
    ) -> list[Delivery]:
        """Trains some clients (by index; all by default), their memory kept."""
        engine = LocalEngine(self.backbone, self.examples, settings, self.memory, cohort_size=cohort, seed=1)
        asked = [known for known in self.clients if who is None or known.index in who]
        tasks = [Task(round, known, self.method.download(state, self.model, known)) for known in asked]
        return sorted(engine.train(self.method, self.model, tasks), key=lambda one: one.task.client.index)

    def train(
        self,
        state: Payload,
        round: int = 1,
        who: Sequence[int] | None = None,
        learning_rate: float | None = None,
        settings: TrainingSettings = SETTINGS,
        cohort: CohortSize = "auto",
    ) -> list[Upload]:
        """Returns their uploads."""
        if learning_rate is not None:
            settings = settings.model_copy(update={"learning_rate": learning_rate})
        uploads = []
        for delivery in self.deliver(state, round, who, settings, cohort):
            assert delivery.upload is not None
            uploads.append(Upload(round, delivery.task.client, delivery.upload, delivery.task.download))
        return uploads


def random_tensors(model: ModelInfo, plan: AdapterPlan, seed: int) -> dict[str, torch.Tensor]:
    """Every trainable of a plan, normal."""
    rng = torch_rng(seed, "tensors")
    return {name: torch.randn(value.shape, generator=rng) for name, value in initial_adapter(model, plan, rng).items()}


def upload(who: ClientInfo, **parts: dict[str, torch.Tensor]) -> Upload:
    """An upload of these parts."""
    tensors = {name: value for part, held in parts.items() for name, value in with_part(part, held).items()}
    return Upload(1, who, Payload(tensors))
