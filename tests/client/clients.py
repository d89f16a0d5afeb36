"""Eight unequal clients, and their training in cohorts of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalReport, LocalWork, Step
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.core.seeding import numpy_rng
from fedguild.data.batches import Encoded
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, lora_plan, random_adapter, random_rows

SEED, ROUND = 7, 3

# Rank, scale, active experts, dropout, examples: no two alike.
_CLIENTS = (
    (4, 0.5, 2, 0.0, 3),
    (1, 2.0, 4, 0.3, 8),
    (3, 1.0, 1, 0.1, 20),
    (8, 0.25, 3, 0.0, 5),
    (2, 1.5, None, 0.5, 1),
    (5, 0.8, 1, 0.0, 16),
    (7, 1.0, 4, 0.2, 9),
    (1, 3.0, 2, 0.0, 13),
)
TARGETS = ("attention", "router", "experts")

# With batches of 2, accumulated over 2, and two epochs: 2, 4, 10, 4, 2, 8, 6 and 8 steps.
SETTINGS = TrainingSettings(
    optimizer="adamw",
    weight_decay=0.1,
    learning_rate=0.01,
    batch_size=2,
    gradient_accumulation_steps=2,
    epochs=2,
    lr_scheduler="cosine",
    warmup=0.3,
    round_decay=0.9,
    max_grad_norm=0.5,
)
STEPS = (2, 4, 10, 4, 2, 8, 6, 8)


@dataclass(frozen=True)
class Client:
    """A client's identity, plan, data and start."""

    info: ClientInfo
    plan: AdapterPlan
    examples: tuple[Encoded, ...]
    start: dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """What training made of one client.

    Attributes:
        weights: Its trainables.
        moments: Its slices of the optimizer's moments.
        report: Its report.
        counts: [L, M] activations, and `hits` [L, M] steps with activations.
    """

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    report: LocalReport
    counts: Tensor
    hits: Tensor


def make_clients(backbone: Backbone, *, dropout: bool = True, output_scale: str = "per_layer") -> list[Client]:
    """Returns the eight clients."""
    clients = []
    for index, (rank, scale, active, rate, count) in enumerate(_CLIENTS):
        plan = lora_plan(rank, scale, TARGETS, active, output_scale=output_scale, dropout=rate if dropout else 0.0)
        lengths = numpy_rng(SEED, "lengths", index).integers(4, 11, size=count).tolist()
        rows = random_rows(lengths, seed=100 + index)
        examples = tuple(Encoded(tuple(ids), 1 + number % 3) for number, ids in enumerate(rows))
        info = ClientInfo(index, Budget("any", active or 4, rank), count)
        clients.append(Client(info, plan, examples, random_adapter(backbone.info, plan, index, size=0.2)))
    return clients


def make_cohort(model: SlotModel, clients: Sequence[Client], settings: TrainingSettings, **options: object) -> Cohort:
    """Returns the cohort of some clients, their start loaded."""
    work = [LocalWork(client.info, client.examples, Payload(), Payload()) for client in clients]
    cohort = Cohort(model, work, settings, round_index=ROUND, seed=SEED, pad_id=PAD, **options)  # type: ignore[arg-type]
    for slot, client in enumerate(clients):
        cohort.load(slot, client.start)
    return cohort


def train(
    backbone: Backbone,
    clients: Sequence[Client],
    settings: TrainingSettings = SETTINGS,
    after: Callable[[Cohort, Step], None] | None = None,
) -> list[Trained]:
    """Trains some clients in one cohort.

    Args:
        backbone: The frozen model.
        clients: Who trains.
        settings: How.
        after: Called after every `apply`.
    """
    with SlotModel(backbone, [client.plan for client in clients]) as model:
        cohort = make_cohort(model, clients, settings)
        for step in cohort.steps():
            step.backward(step.forward())
            step.apply()
            if after is not None:
                after(cohort, step)
        assert cohort.routing is not None
        return [
            Trained(
                cohort.read(slot),
                moments(cohort, slot),
                cohort.reports[slot],
                cohort.routing.counts[:, slot],
                cohort.routing.step_hits[:, slot],
            )
            for slot in range(len(clients))
        ]


def moments(cohort: Cohort, slot: int) -> dict[str, Tensor]:
    """Returns copies of a client's slices of the optimizer's moments, at its own shapes."""
    kinds = {"first": cohort.optimizer.first, "second": cohort.optimizer.second}
    return {
        f"{kind} of {trainable.name}": trainable.own(slot, of=whole).clone()
        for kind, tensors in kinds.items()
        for trainable, whole in zip(cohort.optimizer.trainables, tensors, strict=False)
    }


def first_gradients(
    backbone: Backbone, clients: Sequence[Client], settings: TrainingSettings
) -> list[dict[str, Tensor]]:
    """Returns every client's gradients of the first optimizer step, before clipping."""
    with SlotModel(backbone, [client.plan for client in clients]) as model:
        cohort = make_cohort(model, clients, settings)
        for step in cohort.steps():
            step.backward(step.forward())
            if step.is_update:
                break
        model.dropout.seed(None)
        return [
            {name: t.own(slot, of=t.stored.grad).clone() for name, t in cohort.trainables.items()}
            for slot in range(len(clients))
        ]


def distance(found: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over the expected norm."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=torch.finfo(torch.float64).tiny))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """Returns all values of some tensors in one vector."""
    return torch.cat([value.reshape(-1) for value in tensors.values()])
