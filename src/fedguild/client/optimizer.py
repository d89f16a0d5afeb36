"""SGD, Adam and AdamW for all clients of a cohort at once, each with its own learning rate and step count.

On a GPU with Triton, and on a CPU with Numba, one kernel of our own takes every step of Adam and AdamW
(`model/kernels/adam.py`, `cpu_adam.py`): each slot's rate, count and clipping factor, and the entries to leave out, are
numbers that it reads.

Without them, and for SGD, torch's fused kernels do the work. While all clients are at the same step with the same rate,
they update each tensor as it is stored. They still do when some clients rest or have finished, as long as most have
not: the others' gradients and moments are zero then, which changes no weight, and their moments wait elsewhere
(`_Resting`). At rates of their own, the moments lie slot by slot (`slot_major.py`), and every client's part of them is
updated in a few large pieces. A client that does not step keeps its weights and its moments untouched, and so do the
experts that it leaves out: what an update did to them is undone.

A client gets the same bits either way, and the same as alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fedguild.client.slot_major import SlotMajor, is_aligned
from fedguild.config.training import TrainingSettings
from fedguild.model import kernels
from fedguild.model.adapters.storage import SlotTensor

Together = Mapping[tuple[float, int], Sequence[int]]
"""Rate and count of a step -> the slots that take it."""


class SlotOptimizer:
    """Optimizer state of all slots' trainables, created at the first step and anew in every round.

    Args:
        trainables: Name -> trainable of all slots.
        settings: The kind of optimizer and its constants; the rates come with each step.
    """

    def __init__(self, trainables: Mapping[str, SlotTensor], settings: TrainingSettings) -> None:
        self.settings = settings
        self.trainables = list(trainables.values())
        self._dtypes = {trainable.stored.dtype for trainable in self.trainables}
        self.slots = len(self.trainables[0].shapes) if self.trainables else 0
        self.steps = [0] * self.slots
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self._states: list[Any] = []
        self._apart: list[SlotMajor] = []
        self._resting: dict[int, _Resting] = {}
        self._factor: Tensor | None = None

    def zero_grad(self) -> None:
        """Discards the gradients."""
        self._factor = None
        for trainable in self.trainables:
            trainable.stored.grad = None

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scales each slot's gradient to at most `max_norm`; returns the norms [S] before clipping, on the device.

        Nothing is copied to the host, and on a GPU nothing waits for a value. Where a kernel of ours takes the step, it
        is that which scales the gradients, as it reads them.
        """
        graded = [t for t in self.trainables if t.stored.grad is not None]
        if not graded:
            return torch.zeros(self.slots, dtype=torch.float64)
        squares = [_squares(_grad(trainable), trainable.axis) for trainable in graded]
        all_squares = torch.stack(squares)
        exact = all_squares.float() if all_squares.device.type == "mps" else all_squares.double()  # which has no fp64
        norms = exact.sum(dim=0).sqrt()
        factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        if self._by_kernel():
            self._factor = factor
        elif factor.device.type != "cpu" or bool((factor < 1).any()):
            for trainable in graded:
                grad = _grad(trainable)
                grad.mul_(trainable.slot_factor(factor.to(grad.dtype)))
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
        factor, self._factor = self._factor, None
        together: dict[tuple[float, int], list[int]] = defaultdict(list)
        for slot, rate in enumerate(rates):
            if rate is not None:
                self.steps[slot] += 1
                together[(rate, self.steps[slot])].append(slot)
        graded = [index for index, trainable in enumerate(self.trainables) if trainable.stored.grad is not None]
        names = {index: self.trainables[index].name for index in graded} if updated else {}
        masks = {index: updated[name] for index, name in names.items() if updated and name in updated}
        if self._by_kernel():
            self._update_by_kernel(rates, graded, masks, factor)
        else:
            self._update_by_torch(rates, together, graded, masks)
        if together:  # fused kernels do not count as changes, which casts of the factors watch
            torch.autograd.graph.increment_version([self.trainables[index].stored for index in graded])

    def _by_kernel(self) -> bool:
        """Whether a kernel of ours takes the steps."""
        if self.settings.optimizer == "sgd" or not self.trainables:
            return False
        exact = self._dtypes <= {torch.float32, torch.float64}
        return exact and kernels.runs("optimizer", self.trainables[0].stored.device)

    def _update_by_kernel(
        self, rates: Sequence[float | None], graded: Sequence[int], masks: Mapping[int, Tensor], factor: Tensor | None
    ) -> None:
        """Updates all slots that step, at once."""
        from fedguild.model.kernels.adam_updates import Update

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
        self, rates: Sequence[float | None], together: Together, graded: Sequence[int], masks: Mapping[int, Tensor]
    ) -> None:
        """Updates all slots that step, those that take the same step together."""
        stored = [index for index in graded if not self._owner(index)]
        resting = [slot for slot, rate in enumerate(rates) if rate is None]
        at_once = len(together) == 1 and 2 * len(resting) <= self.slots
        self._rest(resting if at_once else [])
        if not at_once:
            self._set_apart(stored)
        for decays in (True, False):
            decay = self.settings.weight_decay if decays else 0.0
            of_kind = {index for index in graded if self.trainables[index].decays == decays}
            if at_once:
                here = [index for index in stored if index in of_kind]
                self._update_stored([index for index in here if index not in masks], together, decay, resting)
                for index in (index for index in here if index in masks):
                    with _unless(masks[index], self._tensors(index)):
                        self._update_stored([index], together, decay, resting)
            for owner in self._apart:
                indices = [index for index in owner.places if index in of_kind]
                self._update_apart(owner, indices, together, decay, masks)

    def _allocate(self) -> None:
        """Creates the moments, which passes that only compute gradients do not need."""
        has_first = self.settings.optimizer != "sgd" or bool(self.settings.momentum)
        has_second = self.settings.optimizer != "sgd"
        self.first = [torch.zeros_like(t.stored, requires_grad=False) for t in self.trainables] if has_first else []
        self.second = [torch.zeros_like(t.stored, requires_grad=False) for t in self.trainables] if has_second else []
        self._apart = []
        if self._by_kernel():
            from fedguild.model.kernels.adam_updates import State

            parts = zip(self.trainables, self.first, self.second, strict=True)
            self._states = [State(t.stored.detach(), first, second, t.axis, t.decays) for t, first, second in parts]
        else:
            self._set_apart([index for index, trainable in enumerate(self.trainables) if not is_aligned(trainable)])

    def _moments(self) -> list[list[Tensor]]:
        return [kind for kind in (self.first, self.second) if kind]

    def _tensors(self, index: int) -> list[Tensor]:
        """Returns what an update changes of a trainable: its values and moments."""
        return [self.trainables[index].stored.detach(), *(kind[index] for kind in self._moments())]

    def _owner(self, index: int) -> SlotMajor | None:
        """Returns what holds a trainable's moments slot by slot; None if they are stored like the trainable."""
        return next((owner for owner in self._apart if index in owner.places), None)

    def _set_apart(self, indices: Sequence[int]) -> None:
        """Stores the moments of some trainables slot by slot from now on."""
        for decays in (True, False):
            own = {index: self.trainables[index] for index in indices if self.trainables[index].decays == decays}
            if own:
                owner = SlotMajor(own, self.slots, len(self._moments()))
                for rows, kind in zip(owner.moments, self._moments(), strict=True):
                    for index in own:
                        kind[index] = owner.view(index, rows).copy_(kind[index])
                self._apart.append(owner)

    def _rest(self, slots: Sequence[int]) -> None:
        """Puts the moments of these slots aside and leaves zeros; gives all others theirs back."""
        for slot in [slot for slot in self._resting if slot not in slots]:
            self._resting.pop(slot).end()
        for slot in slots:
            if slot not in self._resting:
                own = [index for index in range(len(self.trainables)) if not self._owner(index)]
                self._resting[slot] = _Resting(
                    [kind[index].select(self.trainables[index].axis, slot) for kind in self._moments() for index in own]
                )

    def _update_stored(self, indices: list[int], together: Together, decay: float, resting: Sequence[int]) -> None:
        """Updates whole tensors, all of whose slots take the same step, or rest."""
        if not indices:
            return
        ((rate, count),) = together
        trainables = [self.trainables[index] for index in indices]
        values = [trainable.stored.detach() for trainable in trainables]
        grads = [_grad(trainable) for trainable in trainables]
        moments = [[kind[index] for index in indices] for kind in self._moments()]
        axes = [trainable.axis for trainable in trainables]
        for slot in resting:
            torch._foreach_zero_([grad.select(axis, slot) for axis, grad in zip(axes, grads, strict=True)])
        resting_values = (
            [value.select(axis, slot) for slot in resting for axis, value in zip(axes, values, strict=True)]
            if decay
            else []
        )
        before = [value.clone() for value in resting_values]
        self._kernel(values, grads, moments, rate, count, decay)
        if before:
            torch._foreach_copy_(resting_values, before)

    def _update_apart(
        self,
        owner: SlotMajor,
        indices: list[int],
        together: Together,
        decay: float,
        masks: Mapping[int, Tensor],
    ) -> None:
        """Updates each slot's part of some trainables at its own rate and count, where their masks allow it."""
        if not indices:
            return
        grads = {index: _grad(self.trainables[index]) for index in indices}
        # Adam without decay adds a change that does not depend on the value: the same bits, and less to copy.
        changes_only = self.settings.optimizer != "sgd" and not decay
        for piece in owner.pieces(indices):
            piece.gather(grads, changes_only=changes_only)
            moments = [rows[:, piece.start : piece.end] for rows in owner.moments]
            mask = piece.mask(masks)
            with nullcontext() if mask is None else _unless(mask, [piece.values, *moments]):
                for (rate, count), slots in together.items():
                    rows = [[of_all[slot] for slot in slots] for of_all in (piece.values, piece.grads, *moments)]
                    self._kernel(rows[0], rows[1], rows[2:], rate, count, decay)
            piece.scatter(changes_only=changes_only)

    def _kernel(
        self,
        values: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        rate: float,
        count: int,
        decay: float,
    ) -> None:
        """Takes one step of contiguous tensors, in place."""
        settings = self.settings
        if settings.optimizer == "sgd":
            sgd(
                values,
                grads,
                [*moments[0]] if moments else [None] * len(values),
                foreach=True,
                weight_decay=decay,
                momentum=settings.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        # The kernel only reads the counts, so the tensors of a call can share one.
        kernel: Callable[..., None] = torch._fused_adamw_ if settings.optimizer == "adamw" else torch._fused_adam_
        kernel(
            values,
            grads,
            *moments,
            [],
            [torch.full((), float(count), device=values[0].device)] * len(values),
            lr=rate,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            weight_decay=decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
        )


class _Resting:
    """Moments that wait while their slot rests.

    Args:
        places: Where they are stored, views; zero from now on.
    """

    def __init__(self, places: list[Tensor]) -> None:
        self._places = places
        self._values = [place.clone() for place in places]
        if places:
            torch._foreach_zero_(places)

    def end(self) -> None:
        """Puts them back."""
        if self._places:
            torch._foreach_copy_(self._places, self._values)


@contextmanager
def _unless(mask: Tensor, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Undoes what the block changes of some tensors, except where a mask of their leading axes is True."""
    before = [tensor.clone() for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        torch.where(mask.view(*mask.shape, *[1] * (tensor.dim() - mask.dim())), tensor, old, out=tensor)


def _squares(grad: Tensor, axis: int) -> Tensor:
    """Returns [S], the sum of each slot's squares; off a CPU in one reading, without a tensor of the squares."""
    others = [other for other in range(grad.dim()) if other != axis]
    if not others or grad.device.type == "cpu":
        return grad.square().sum(others) if others else grad.square()
    norms: Tensor = torch.linalg.vector_norm(grad, dim=others)
    return norms.square()


def _grad(trainable: SlotTensor) -> Tensor:
    grad = trainable.stored.grad
    assert grad is not None
    return grad
