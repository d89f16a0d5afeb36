"""SGD, Adam and AdamW for all clients of a cohort at once, each with its own learning rate and step count.

torch's fused kernels do the work. Clients that are at the same step with the same rate are
updated together; a client that does not step keeps its weights and its moments untouched,
which a zero gradient alone would not ensure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedguild.config.training import TrainingSettings
from fedguild.model.adapters.storage import SlotTensor


class SlotOptimizer:
    """Optimizer state of all slots' trainables, created at the first step and anew in every round.

    Args:
        trainables: Name -> trainable of all slots.
        settings: The kind of optimizer and its constants; the rates come with each step.
    """

    def __init__(self, trainables: Mapping[str, SlotTensor], settings: TrainingSettings) -> None:
        self.settings = settings
        self.trainables = list(trainables.values())
        self.slots = len(self.trainables[0].shapes) if self.trainables else 0
        self.steps = [0] * self.slots
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []

    def zero_grad(self) -> None:
        """Discards the gradients."""
        for trainable in self.trainables:
            trainable.stored.grad = None

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scales each slot's gradient to at most `max_norm`; returns the norms [S] before clipping."""
        squares = torch.zeros(self.slots, dtype=torch.float64)
        graded = [t for t in self.trainables if t.stored.grad is not None]
        for trainable in graded:
            grad = _grad(trainable)
            others = [axis for axis in range(grad.dim()) if axis != trainable.axis]
            squares += (grad.square().sum(others) if others else grad.square()).double().cpu()
        norms = squares.sqrt()
        factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        if bool((factor < 1).any()):
            for trainable in graded:
                grad = _grad(trainable)
                grad.mul_(trainable.slot_factor(factor.to(grad.device, grad.dtype)))
        return norms

    @torch.no_grad()
    def step(self, rates: Sequence[float | None], updated: Mapping[str, Tensor] | None = None) -> None:
        """Updates the slots that have a learning rate.

        Args:
            rates: Each slot's learning rate; None for a slot that does not step.
            updated: Name -> [M, S] bool for a trainable stored as [M, S, …], whose other entries keep their
                weights and moments; Adam's bias correction still counts the slot's steps, as in
                `torch.optim.SparseAdam`. A name left out is updated as a whole.
        """
        if not any(self.steps):
            self._allocate()
        together: dict[tuple[float, int], list[int]] = defaultdict(list)
        for slot, rate in enumerate(rates):
            if rate is not None:
                self.steps[slot] += 1
                together[(rate, self.steps[slot])].append(slot)
        for (rate, count), slots in together.items():
            for decays in (True, False):
                chosen = [
                    index
                    for index, trainable in enumerate(self.trainables)
                    if trainable.stored.grad is not None and decays == trainable.decays
                ]
                if chosen:
                    decay = self.settings.weight_decay if decays else 0.0
                    self._update(chosen, slots, rate, count, decay, updated or {})

    def _allocate(self) -> None:
        """Creates the moments, which passes that only compute gradients do not need."""
        if self.settings.optimizer != "sgd" or self.settings.momentum:
            self.first = [torch.zeros_like(t.stored, requires_grad=False) for t in self.trainables]
        if self.settings.optimizer != "sgd":
            self.second = [torch.zeros_like(t.stored, requires_grad=False) for t in self.trainables]

    def _update(
        self,
        chosen: list[int],
        slots: list[int],
        rate: float,
        count: int,
        decay: float,
        updated: Mapping[str, Tensor],
    ) -> None:
        def parts(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [
                part
                for index, whole in zip(chosen, tensors, strict=True)
                for part in self._parts(whole, index, slots, updated.get(self.trainables[index].name))
            ]

        values = parts([self.trainables[index].stored.detach() for index in chosen])
        if not values:
            return
        grads = parts([_grad(self.trainables[index]) for index in chosen])
        first = parts([self.first[index] for index in chosen]) if self.first else []
        if self.settings.optimizer == "sgd":
            sgd(
                values,
                grads,
                [*first] if first else [None] * len(values),
                foreach=True,
                weight_decay=decay,
                momentum=self.settings.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        adam(
            values,
            grads,
            first,
            parts([self.second[index] for index in chosen]),
            [],
            [torch.tensor(float(count - 1), device=value.device) for value in values],
            fused=True,
            decoupled_weight_decay=self.settings.optimizer == "adamw",
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=rate,
            weight_decay=decay,
            eps=self.settings.eps,
            maximize=False,
        )

    def _parts(self, tensor: Tensor, index: int, slots: list[int], updated: Tensor | None) -> Iterable[Tensor]:
        """Returns the contiguous pieces of a storage that belong to some slots and are to be updated."""
        if updated is not None:
            wanted = torch.zeros_like(updated)
            wanted[:, slots] = updated[:, slots]
            edges = torch.diff(pad(wanted.flatten().int(), (1, 1))).nonzero().flatten().tolist()
            rows = tensor.flatten(0, 1)
            return [rows[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
        if len(slots) == self.slots:
            return [tensor]
        if self.trainables[index].axis == 0:
            return [tensor[slot] for slot in slots]
        return [row[slot] for row in tensor for slot in slots]


def _grad(trainable: SlotTensor) -> Tensor:
    grad = trainable.stored.grad
    assert grad is not None
    return grad
