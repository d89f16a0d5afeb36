"""DP-SGD: local training with differential privacy for every training example.

M. Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1; in our words, for one client:

    1  for each of T steps:
    2      draw every example with probability q
    3      g_i = the gradient of example i's own loss in all trained tensors
    4      g_i = g_i min(1, C / ||g_i||)
    5      g = (sum_i g_i + N(0, (sigma C)^2)) / (the expected number of drawn examples)
    6      theta = the optimizer's step with g

Symbols: T `steps`, q `probability`, C `clip`, sigma `noise_multiplier`, all of `DpSgd`.

The slot axis gives line 3. The drawn examples run in microbatches, each in its own slot with its client's weights, so
one backward pass gives every example its own gradient. Line 5 is a running sum, so memory depends on the microbatch
(`training.batch_size`) and not on the number of drawn examples. The loss of an example is the mean over its own
response tokens; the mean over all tokens of the batch would couple the examples by its denominator. A preference pair
is one example, with its own DPO loss: the reference does not depend on any data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedguild.client.cohort import Cohort, terms_of, tokens_of
from fedguild.client.preference import preference_losses
from fedguild.client.schedule import learning_rate
from fedguild.client.sums import sums_of_slots
from fedguild.core.errors import DataError
from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.storage import SlotTensor
from fedguild.model.on_device import on_device
from fedguild.model.slots import SlotModel
from fedguild.privacy.dp.clipping import with_noise
from fedguild.privacy.dp.dp_sgd import DpSgd, microbatches

Gradients = dict[str, Tensor]
"""Name of a trainable -> gradient, at the client's own shape."""


def train_privately(cohort: Cohort, penalty: Callable[[], Tensor] | None = None) -> None:
    """Trains every client of a cohort by its DP-SGD, one client after the other.

    Args:
        penalty: Returns [S], a term of each client's loss that depends on the trainables alone. It reveals nothing of
            the data, so its gradient is added after the noise.

    Raises:
        ConfigError: the cohort has trained already, which the privacy accounting does not cover.
        DataError: a client has no examples.
    """
    if not cohort.private:
        cohort.require_not_private("trains twice in a round")
    private, cohort.private = cohort.private or (), ()
    for slot, dp in enumerate(private):
        _Client(cohort, slot, dp).train(penalty)
    cohort.finish()


class _Client:
    """One client of a cohort, and its examples as slots."""

    def __init__(self, cohort: Cohort, slot: int, dp: DpSgd) -> None:
        self.cohort, self.slot, self.dp = cohort, slot, dp
        self.examples = cohort.work[slot].examples
        self.micro = cohort.settings.batch_size
        self.reference: Tensor | None = None

    def train(self, penalty: Callable[[], Tensor] | None) -> None:
        """Lines 1 to 6."""
        cohort, dp = self.cohort, self.dp
        if not self.examples:
            raise DataError("A client without training examples cannot train.", "Give every client at least one.")
        self.reference = self._refer()
        with (
            cohort.model.set_aside(),
            SlotModel(cohort.model.backbone, [cohort.model.plans[self.slot]] * self.micro) as model,
        ):
            for step in range(dp.steps):
                self._spread_weights(model, frozen=step == 0)
                total: Gradients = {}
                for drawn in microbatches(dp.batch(step, len(self.examples)), self.micro):
                    _add(total, self._clipped_sum(model, drawn, step))
                for name, shape in self._shapes().items():
                    total.setdefault(name, torch.zeros(shape, dtype=torch.float64, device=model.device))
                self._apply(step, _noisy_mean(total, dp, step), penalty)
                cohort.reports[self.slot].steps += 1
                cohort.tell_step(step + 1, dp.steps)

    def _refer(self) -> Tensor | None:
        """Returns [examples, 2], the reference's losses of every pair that is drawn; None without pairs."""
        own = sorted({i for step in range(self.dp.steps) for i in self.dp.batch(step, len(self.examples))})
        tables = self.cohort.refer([own if slot == self.slot else [] for slot in range(len(self.cohort.work))])
        return None if tables is None else tables[self.slot]

    def _spread_weights(self, model: SlotModel, *, frozen: bool) -> None:
        """Copies the client's weights to every example's slot; frozen ones only the first time."""
        for name, tensor in (model.loaded if frozen else model.trainables).items():
            spread(tensor, self.cohort.model.loaded[name].own(self.slot))

    def _clipped_sum(self, model: SlotModel, drawn: list[int], step: int) -> Gradients:
        """Lines 3 and 4: returns the sum of the clipped gradients of one microbatch.

        An example's dropout mask does not depend on the other drawn examples. Otherwise one example would change the
        gradients of others, and the sum by more than C.
        """
        cohort, rows = self.cohort, [self.examples[index] for index in drawn]
        idle = self.micro - len(rows)
        slots: list[list[Encoded]] = [[row] for row in rows] + [[] for _ in range(idle)]
        batch = collate(slots, cohort.pad_id, model.seq2seq)
        model.dropout.seed([self.dp.mask_seed(step, index) for index in drawn] + [0] * idle)
        for tensor in model.trainables.values():
            tensor.stored.grad = None
        counts = [terms_of(own) for own in slots]
        found = model.token_losses(batch)
        if self.reference is not None:
            found = preference_losses(found, rows, self.reference[drawn], cohort.settings.dpo_beta)
        sums = sums_of_slots(found, counts)
        losses = sums / on_device([max(1, count) for count in counts], sums.device, sums.dtype)
        losses.sum().backward()
        report = cohort.reports[self.slot]
        report.tokens += tokens_of(rows)
        report.examples += len(rows)
        return clipped_sum(model.trainables, self.dp.clip)

    def _apply(self, step: int, gradient: Gradients, penalty: Callable[[], Tensor] | None) -> None:
        """Line 6, by the cohort's own optimizer, in which only this client's slot steps."""
        cohort, trainables = self.cohort, self.cohort.trainables
        cohort.optimizer.zero_grad()
        if penalty is not None:
            penalty().sum().backward()
        for name, trainable in trainables.items():
            if trainable.stored.grad is None:
                trainable.stored.grad = torch.zeros_like(trainable.stored)
            if name in gradient:
                own = trainable.own(self.slot, of=trainable.stored.grad)
                own += gradient[name].to(own)
        rates: list[float | None] = [None] * len(cohort.work)
        rates[self.slot] = learning_rate(cohort.settings, step, self.dp.steps, cohort.round)
        cohort.optimizer.step(rates)
        cohort.optimizer.zero_grad()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns name -> the client's own shape of everything that it trains."""
        shapes = {name: tensor.shapes[self.slot] for name, tensor in self.cohort.trainables.items()}
        return {name: shape for name, shape in shapes.items() if shape is not None}


@torch.no_grad()
def clipped_sum(trainables: Mapping[str, SlotTensor], clip: float) -> Gradients:
    """Returns the sum over the slots of their gradients, each scaled to an L2 norm of at most `clip` over all tensors.

    A slot whose gradient is not finite adds nothing: no example can add more than `clip`.

    Args:
        trainables: With gradients; all slots have the same shapes.
        clip: C.

    Returns:
        Name -> gradient in fp64, at a slot's own shape.
    """
    grads = {name: (t, t.stored.grad) for name, t in trainables.items() if t.stored.grad is not None}
    if not grads:
        return {}
    squares = torch.stack([_rows(*pair).square().sum(1) for pair in grads.values()]).sum(0)
    norms = squares.sqrt()
    factor = torch.where(norms.isfinite(), clip / norms.clamp_min(clip), 0.0)  # line 4
    summed = {}
    for name, (tensor, grad) in grads.items():
        finite = torch.where(factor[:, None] > 0, _rows(tensor, grad), 0.0)
        whole = (factor @ finite).view(grad.movedim(tensor.axis, 0).shape[1:])
        shape = tensor.shapes[0]
        assert shape is not None
        whole = whole.transpose(-1, -2) if tensor.swapped else whole
        summed[name] = whole[tuple(slice(0, size) for size in shape)]
    return summed


def _rows(tensor: SlotTensor, grad: Tensor) -> Tensor:
    return grad.movedim(tensor.axis, 0).reshape(len(tensor.shapes), -1).to(torch.float64)


@torch.no_grad()
def spread(tensor: SlotTensor, value: Tensor) -> None:
    """Sets every slot's tensor to the same value."""
    every = tensor.stored.detach().movedim(tensor.axis, 0)
    every = every.transpose(-1, -2) if tensor.swapped else every
    every[(slice(None), *(slice(0, size) for size in value.shape))].copy_(value.expand(every.shape[0], *value.shape))


def _add(total: Gradients, more: Gradients) -> None:
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value


def _noisy_mean(total: Gradients, dp: DpSgd, step: int) -> Gradients:
    """Line 5. Every trained tensor gets noise, even one in which no drawn example has a gradient."""
    noisy = with_noise(total, dp.noise_multiplier * dp.clip, dp.noise.child("step", step))
    return {name: value / dp.divisor for name, value in noisy.items()}
