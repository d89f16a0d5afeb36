"""A federation of small clients on a random backbone, without files or a round loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload, with_part
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.runs.promises import Rehearsal
from fedguild.server.method import Method, Upload
from tests.backbones import random_rows

LARGE, MIDDLE, SMALL = Budget("large", 4, 3), Budget("middle", 2, 2), Budget("small", 1, 1)
SETTINGS = TrainingSettings(optimizer="adam", learning_rate=0.05, batch_size=2, steps=2, max_grad_norm=None)


def client(index: int, budget: Budget, examples: int = 4) -> ClientInfo:
    return ClientInfo(index, budget, examples)


class Federation(Rehearsal):
    """Clients with data of their own (a row of 4 to 8 tokens each), a method, and the clients' memory."""

    def __init__(self, backbone: Backbone, method: Method, clients: Sequence[ClientInfo], folder: Path) -> None:
        examples = {
            who.index: [
                Encoded(tuple(row), 2)
                for row in random_rows([4 + (who.index + i) % 5 for i in range(who.examples)], who.index)
            ]
            for who in clients
        }
        super().__init__(backbone, method, clients, examples, folder, SETTINGS)

    def train(self, state: Payload, *given: Any, learning_rate: float | None = None, **more: Any) -> list[Upload]:
        """Returns their uploads; a learning rate need not be one that settings allow."""
        if learning_rate is not None:
            more["settings"] = self.settings.model_copy(update={"learning_rate": learning_rate})
        return super().train(state, *given, **more)


def random_tensors(model: ModelInfo, plan: AdapterPlan, seed: int) -> dict[str, torch.Tensor]:
    """Every trainable of a plan, normal."""
    rng = torch_rng(seed, "tensors")
    return {name: torch.randn(value.shape, generator=rng) for name, value in initial_adapter(model, plan, rng).items()}


def upload(who: ClientInfo, **parts: dict[str, torch.Tensor]) -> Upload:
    """An upload of these parts."""
    tensors = {name: value for part, held in parts.items() for name, value in with_part(part, held).items()}
    return Upload(1, who, Payload(tensors))
