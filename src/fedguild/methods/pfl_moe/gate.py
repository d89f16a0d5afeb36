"""Training of the gates between global and personal adapters, both frozen (PFL-MoE, line 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedguild.client.cohort import Cohort
from fedguild.client.optimizer import SlotOptimizer
from fedguild.client.schedule import plan_steps
from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded, SlotBatch, collate
from fedguild.methods.pfl_moe.logit_mixture import BIAS, WEIGHT, gate_values, mixed
from fedguild.methods.pfl_moe.prompt_features import Features, prompt_features, target_rows
from fedguild.model.adapters.storage import SlotTensor
from fedguild.seeding import numpy_rng

Adapters = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class GateSettings:
    """Settings of the gates' training, which uses Adam and the run's batch size.

    Attributes:
        features: The features whose mean is phi.
        epochs: Passes over a client's gate examples.
        learning_rate: Adam's learning rate.
        weight_decay: Adam's, added to the gradient.
    """

    features: Features
    epochs: float
    learning_rate: float
    weight_decay: float


class LogitGates:
    """The gates of a cohort's clients, from g = 1/2 on.

    Args:
        cohort: The clients.
        features: The features whose mean is phi.
    """

    def __init__(self, cohort: Cohort, features: Features) -> None:
        self._cohort, self._features = cohort, features
        slots, hidden = len(cohort.work), cohort.model.backbone.info.hidden
        kind = torch.float64 if cohort.model.backbone.dtype is torch.float64 else torch.float32
        self.trainables: dict[str, SlotTensor] = {}
        shapes: dict[str, tuple[int, ...]] = {WEIGHT: (hidden,), BIAS: ()}
        for name, shape in shapes.items():
            stored = torch.zeros(slots, *shape, dtype=kind, device=cohort.model.device, requires_grad=True)
            self.trainables[name] = SlotTensor(name, stored, 0, False, (shape,) * slots)

    def read(self, slot: int) -> dict[str, Tensor]:
        """Returns copies of a client's w [H] and b [], on the CPU."""
        return {name: tensor.own(slot).to("cpu", copy=True) for name, tensor in self.trainables.items()}

    def losses(self, batch: SlotBatch, first: Adapters, second: Adapters) -> Tensor:
        """Returns [S], each client's mean loss over its response tokens, in nats; 0 for a client without any.

        Args:
            batch: Rows of the clients.
            first: Each client's adapter that g weighs.
            second: Each client's adapter that 1 - g weighs.
        """
        model = self._cohort.model
        with torch.no_grad():
            sides = [self._logits(batch, adapters) for adapters in (first, second)]
        features = prompt_features(model.backbone, batch, self._features)
        rows = torch.tensor(batch.rows_per_slot, device=model.device)
        weight, bias = (self.trainables[name].stored.repeat_interleave(rows, dim=0) for name in (WEIGHT, BIAS))
        gate = gate_values(features, weight, bias)[target_rows(batch).to(model.device)]
        losses = cross_entropy(mixed(gate, *sides), batch.targets.to(model.device), reduction="none")
        slot = batch.group.to(model.device)
        sums = losses.new_zeros(len(rows)).index_add(0, slot, losses)
        return sums / losses.new_zeros(len(rows)).index_add(0, slot, torch.ones_like(losses)).clamp(min=1)

    def _logits(self, batch: SlotBatch, adapters: Adapters) -> Tensor:
        for slot, adapter in enumerate(adapters):
            self._cohort.load(slot, adapter)
        return self._cohort.model.logits(batch)


def train_gates(
    cohort: Cohort, examples: Sequence[Sequence[Encoded]], first: Adapters, second: Adapters, settings: GateSettings
) -> list[dict[str, Tensor]]:
    """Returns every client's trained w [H] and b []; a client without examples keeps zeros, which is g = 1/2.

    Args:
        cohort: The clients; their slots are loaded with one adapter and then the other.
        examples: `examples[slot]`, the examples that the client's gate trains on.
        first: Each client's adapter that g weighs.
        second: Each client's adapter that 1 - g weighs.
        settings: The settings of the gates' training.
    """
    gates = LogitGates(cohort, settings.features)
    training = TrainingSettings(
        optimizer="adam",
        weight_decay=settings.weight_decay,
        batch_size=cohort.settings.batch_size,
        epochs=settings.epochs,
    )
    optimizer = SlotOptimizer(gates.trainables, training)
    plans = [_batches(cohort, slot, len(rows), training) if rows else [] for slot, rows in enumerate(examples)]
    cohort.model.dropout.seed(None)
    for index, batches in enumerate(zip_longest(*plans, fillvalue=[])):
        rows = [[encoded[i] for i in batch] for encoded, batch in zip(examples, batches, strict=True)]
        optimizer.zero_grad()
        gates.losses(collate(rows, cohort.pad_id, cohort.model.seq2seq), first, second).sum().backward()
        optimizer.step([settings.learning_rate if index < len(plan) else None for plan in plans])
    return [gates.read(slot) for slot in range(len(examples))]


def _batches(cohort: Cohort, slot: int, examples: int, training: TrainingSettings) -> list[list[int]]:
    """Returns the examples of each of a client's steps."""
    rng = numpy_rng(cohort.seed, "gate", cohort.round, cohort.clients[slot].index)
    return [batch for step in plan_steps(examples, training, rng) for batch in step]
