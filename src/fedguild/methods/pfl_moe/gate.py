"""Training of the gates between global and personal adapters, both frozen (PFL-MoE, line 7).

Only the gates change from step to step, so that what the two models say of an example is computed once and kept for all
epochs, where it fits into `KEPT_BYTES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedguild.client.cohort import Cohort
from fedguild.client.optimizer import SlotOptimizer
from fedguild.client.schedule import plan_steps
from fedguild.config.training import TrainingSettings
from fedguild.core.seeding import numpy_rng
from fedguild.data.batches import Encoded, SlotBatch
from fedguild.methods.pfl_moe.logit_mixture import BIAS, WEIGHT, gate_values, mixed
from fedguild.methods.pfl_moe.prompt_features import Features, prompt_features, target_rows
from fedguild.model.adapters.storage import SlotTensor
from fedguild.model.on_device import slot_of_rows

T = TypeVar("T")
Adapters = Sequence[Mapping[str, Tensor]]
KEPT_BYTES = 1 << 30
"""Most bytes of logits that a cohort keeps over the epochs; with more, every step computes its own."""


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


@dataclass(frozen=True)
class Outputs:
    """What the frozen models say of R rows with P response tokens.

    Attributes:
        rows_per_slot: Rows of each client; the rows lie client by client.
        features: phi of each row, [R, H].
        first: Logits of the response tokens under the adapters that g weighs, [P, V].
        second: The same under those that 1 - g weighs.
        row: Row of each response token, [P].
        targets: The response tokens, [P].
    """

    rows_per_slot: Sequence[int]
    features: Tensor
    first: Tensor
    second: Tensor
    row: Tensor
    targets: Tensor

    def by_row(self) -> list[Outputs]:
        """Returns the same for every row alone."""
        order = self.row.argsort(stable=True)
        sizes = torch.bincount(self.row, minlength=len(self.features)).tolist()
        parts = zip(*(tensor[order].split(sizes) for tensor in (self.first, self.second, self.targets)), strict=True)
        return [
            Outputs((1,), features, first, second, torch.zeros_like(targets), targets)
            for features, (first, second, targets) in zip(self.features.split(1), parts, strict=True)
        ]

    @classmethod
    def of(cls, by_slot: Sequence[Sequence[Outputs]]) -> Outputs:
        """Returns that of a batch from those of its rows, client by client."""
        rows = [row for of_slot in by_slot for row in of_slot]
        return cls(
            [len(of_slot) for of_slot in by_slot],
            torch.cat([row.features for row in rows]),
            torch.cat([row.first for row in rows]),
            torch.cat([row.second for row in rows]),
            slot_of_rows([len(row.targets) for row in rows], rows[0].row.device),
            torch.cat([row.targets for row in rows]),
        )


class LogitGates:
    """The gates of a cohort's clients, from g = 1/2 on.

    Args:
        cohort: The clients.
        features: The features whose mean is phi.

    Attributes:
        passes: Forward passes of `outputs`: under both adapters, and the frozen backbone's for its hidden states.
    """

    def __init__(self, cohort: Cohort, features: Features) -> None:
        self._cohort, self._features = cohort, features
        self.passes = 3 if features == "hidden" else 2
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

    def losses(self, outputs: Outputs) -> Tensor:
        """Returns [S], each client's mean loss over its response tokens, in nats; 0 for a client without any."""
        slot = slot_of_rows(outputs.rows_per_slot, outputs.features.device)
        weight, bias = (self.trainables[name].stored.index_select(0, slot) for name in (WEIGHT, BIAS))
        gate = gate_values(outputs.features, weight, bias)[outputs.row]
        losses = cross_entropy(mixed(gate, outputs.first, outputs.second), outputs.targets, reduction="none")
        slots, none = slot[outputs.row], losses.new_zeros(len(outputs.rows_per_slot))
        return none.index_add(0, slots, losses) / none.index_add(0, slots, torch.ones_like(losses)).clamp(min=1)

    @torch.no_grad()
    def outputs(self, batch: SlotBatch, first: Adapters, second: Adapters) -> Outputs:
        """Returns what the frozen models say of a batch.

        Args:
            batch: Rows of the clients.
            first: Each client's adapter that g weighs.
            second: Each client's adapter that 1 - g weighs.
        """
        model = self._cohort.model
        return Outputs(
            batch.rows_per_slot,
            prompt_features(model.backbone, batch, self._features),
            self._logits(batch, first),
            self._logits(batch, second),
            target_rows(batch).to(model.device, non_blocking=True),
            batch.targets.to(model.device, non_blocking=True),
        )

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
    kept = _kept(cohort, gates, examples, first, second) if settings.epochs > 1 else None
    for index, batches in enumerate(zip_longest(*plans, fillvalue=[])):
        optimizer.zero_grad()
        outputs = (
            _outputs(cohort, gates, examples, batches, first, second)
            if kept is None
            else Outputs.of(_taken(kept, batches))
        )
        gates.losses(outputs).sum().backward()
        optimizer.step([settings.learning_rate if index < len(plan) else None for plan in plans])
    return [gates.read(slot) for slot in range(len(examples))]


def _outputs(
    cohort: Cohort,
    gates: LogitGates,
    examples: Sequence[Sequence[Encoded]],
    batches: Sequence[Sequence[int]],
    first: Adapters,
    second: Adapters,
) -> Outputs:
    """Returns what the models say of some of each client's examples, no more than a batch of each."""
    (batch,) = cohort.batches(_taken(examples, batches), gates.passes)
    return gates.outputs(batch, first, second)


def _kept(
    cohort: Cohort, gates: LogitGates, examples: Sequence[Sequence[Encoded]], first: Adapters, second: Adapters
) -> list[list[Outputs]] | None:
    """Returns what the models say of every example of every client; None if that is more than `KEPT_BYTES`."""
    kept: list[list[Outputs]] = [[] for _ in examples]
    left, size = KEPT_BYTES, cohort.settings.batch_size
    for start in range(0, max(map(len, examples), default=0), size):
        batches = [range(start, min(start + size, len(rows))) for rows in examples]
        outputs = _outputs(cohort, gates, examples, batches, first, second)
        left -= outputs.first.nbytes + outputs.second.nbytes
        if left < 0:
            return None
        rows = iter(outputs.by_row())
        for of_slot, batch in zip(kept, batches, strict=True):
            of_slot += islice(rows, len(batch))
    return kept


def _taken(of_slots: Sequence[Sequence[T]], batches: Sequence[Sequence[int]]) -> list[list[T]]:
    """Returns some of what each slot has."""
    return [[own[index] for index in batch] for own, batch in zip(of_slots, batches, strict=True)]


def _batches(cohort: Cohort, slot: int, examples: int, training: TrainingSettings) -> list[list[int]]:
    """Returns the examples of each of a client's steps."""
    rng = numpy_rng(cohort.seed, "gate", cohort.round, cohort.clients[slot].index)
    return [batch for step in plan_steps(examples, training, rng) for batch in step]
