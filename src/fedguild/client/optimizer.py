"""SGD, Adam and AdamW for all clients of a cohort at once, each with its own learning rate and step count.

On a GPU with Triton, and on a CPU, a fused kernel takes every step of Adam and AdamW (`model/kernels/adam.py`,
`cpu_adam.py`). Everywhere else (SGD, MPS, a GPU without Triton, `FEDGUILD_KERNELS=none`) the same formulas are plain
torch operations. Both read each slot's rate, count and clipping factor, and the entries to skip. A client that does not
step keeps its weights and moments untouched, and so do the experts that it skips.

A client gets the same bits in a cohort and alone, because every operation works on one element and rounds it
separately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings
from fedguild.model import kernels
from fedguild.model.adapters.storage import SlotTensor
from fedguild.model.kernels.adam_updates import NUMBERS, State, Update, step_numbers


class SlotOptimizer:
    """Optimizer state of all slots' trainables, created at the first step and reset every round.

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
        self._states: list[State] = []
        self._factor: Tensor | None = None

    def zero_grad(self) -> None:
        self._factor = None
        for trainable in self.trainables:
            trainable.stored.grad = None

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Lets the next step scale each slot's gradient to at most `max_norm`.

        Nothing is copied to the host, and on a GPU nothing waits for a value.

        Returns:
            The norms [S] before clipping, on the device.
        """
        graded = [t for t in self.trainables if t.stored.grad is not None]
        if not graded:
            return torch.zeros(self.slots, dtype=torch.float64)
        squares = [_squares(_grad(trainable), trainable.axis) for trainable in graded]
        all_squares = torch.stack(squares)
        exact = all_squares.float() if all_squares.device.type == "mps" else all_squares.double()  # which has no fp64
        norms = exact.sum(dim=0).sqrt()
        self._factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        return norms

    @torch.no_grad()
    def step(self, rates: Sequence[float | None], updated: Mapping[str, Tensor] | None = None) -> None:
        """Updates the slots that have a learning rate.

        Args:
            rates: Each slot's learning rate; None for a slot that does not step.
            updated: Name -> [M, S] bool for a trainable stored as [M, S, …], whose other entries keep their weights and
                moments; Adam's bias correction still counts the slot's steps, as in `torch.optim.SparseAdam`. A name
                that is missing is updated as a whole.
        """
        if not any(self.steps):
            self._allocate()
        factor, self._factor = self._factor, None
        for slot, rate in enumerate(rates):
            self.steps[slot] += rate is not None
        graded = [index for index, trainable in enumerate(self.trainables) if trainable.stored.grad is not None]
        names = {index: self.trainables[index].name for index in graded} if updated else {}
        masks = {index: updated[name] for index, name in names.items() if updated and name in updated}
        if self._states:
            self._update_by_kernel(rates, graded, masks, factor)
        else:
            self._update_by_torch(rates, graded, masks, factor)
        if any(rate is not None for rate in rates):  # a kernel does not count as a change, which casts of factors watch
            torch.autograd.graph.increment_version([self.trainables[index].stored for index in graded])

    def _allocate(self) -> None:
        """Creates the moments, lazily: passes that only compute gradients need none."""
        is_adam = self.settings.optimizer != "sgd"
        has_first = is_adam or bool(self.settings.momentum)
        self.first = [torch.zeros_like(t.stored, requires_grad=False) for t in self.trainables] if has_first else []
        self.second = [torch.zeros_like(t.stored, requires_grad=False) for t in self.trainables] if is_adam else []
        if is_adam and self.trainables and kernels.runs("optimizer", self.trainables[0].stored.device):
            parts = zip(self.trainables, self.first, self.second, strict=True)
            self._states = [State(t.stored.detach(), first, second, t.axis, t.decays) for t, first, second in parts]

    def _update_by_kernel(
        self, rates: Sequence[float | None], graded: Sequence[int], masks: Mapping[int, Tensor], factor: Tensor | None
    ) -> None:
        if kernels.language(self.trainables[0].stored.device) == "numba":
            from fedguild.model.kernels.cpu_adam import adam_step
        else:
            from fedguild.model.kernels.adam import adam_step

        updates = defaultdict(list)
        for index in graded:
            state, grad = self._states[index], _grad(self.trainables[index]).contiguous()
            updates[state.dtype].append(Update(state, grad, masks.get(index)))
        for of_dtype in updates.values():
            adam_step(
                of_dtype,
                rates,
                self.steps,
                betas=self.settings.betas,
                eps=self.settings.eps,
                decay=self.settings.weight_decay,
                decoupled=self.settings.optimizer == "adamw",
                factor=factor,
            )

    def _update_by_torch(
        self, rates: Sequence[float | None], graded: Sequence[int], masks: Mapping[int, Tensor], factor: Tensor | None
    ) -> None:
        """Updates the slots that step, one trainable after the other."""
        settings = self.settings
        numbers = step_numbers(rates, self.steps, settings.betas, settings.eps, settings.weight_decay)
        by_slot = torch.tensor(numbers[NUMBERS:], dtype=self.trainables[0].stored.dtype).view(self.slots, NUMBERS)
        columns = by_slot.to(self.trainables[0].stored.device, non_blocking=True).unbind(1)
        beta1, beta2 = settings.betas
        for index in graded:
            trainable = self.trainables[index]
            value, grad = trainable.stored.detach(), _grad(trainable)
            steps, rate, size, root = map(trainable.slot_factor, columns)
            moves, decay = steps.bool(), settings.weight_decay if trainable.decays else 0.0
            if (mask := masks.get(index)) is not None:
                moves = moves & mask.view(*mask.shape, *[1] * (value.dim() - mask.dim()))
            if factor is not None:
                grad = grad * trainable.slot_factor(factor.to(grad.dtype))
            if decay and settings.optimizer != "adamw":
                grad = grad + decay * value
            if self.second:
                first, second = self.first[index], self.second[index]
                _move(first, first + (1 - beta1) * (grad - first), moves)
                _move(second, beta2 * second + (1 - beta2) * grad * grad, moves)
                change = size * first / (second.sqrt() / root + settings.eps)
                if settings.optimizer == "adamw":
                    change += rate * decay * value
            elif self.first:
                _move(self.first[index], settings.momentum * self.first[index] + grad, moves)
                change = rate * self.first[index]
            else:
                change = rate * grad
            _move(value, value - change, moves)


def _move(tensor: Tensor, new: Tensor, where: Tensor) -> None:
    """Writes `new` where the mask, which is broadcast, is True."""
    torch.where(where, new, tensor, out=tensor)


def _squares(grad: Tensor, axis: int) -> Tensor:
    """Returns [S], the sum of each slot's squares; on a GPU without materialising the squares."""
    others = [other for other in range(grad.dim()) if other != axis]
    if not others or grad.device.type == "cpu":
        return grad.square().sum(others) if others else grad.square()
    norms: Tensor = torch.linalg.vector_norm(grad, dim=others)
    return norms.square()


def _grad(trainable: SlotTensor) -> Tensor:
    grad = trainable.stored.grad
    assert grad is not None
    return grad
