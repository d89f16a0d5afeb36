"""Robust estimates in place of the means over a round's clients, for every method whose server takes means.

`trimmed_mean` and `median` are estimates of each value over the clients that hold it (`RobustMeans`): D. Yin et al.,
"Byzantine-Robust Distributed Learning", ICML 2018, Definitions 1 and 2. A client holds a value whose weight in the
method's own mean is positive: an expert that it trained, a rank that it has. Who is trimmed follows from values alone,
so that a client that claims a large weight moves no limit; those that are left weigh as in the method's own mean.

`clipped` and `centered_clipping` are the method's own means of changes that are drawn in to a ball: around no change,
or around the change of the last round, which the server remembers:

    v <- v + mean_i (x_i - v) min(1, tau / ||x_i - v||)

S. P. Karimireddy, L. He, M. Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021, Algorithm 2;
x_i is a client's change, tau the round's median of the distances ||x_i - v||, each part (`adapter`) by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedguild.core.errors import UploadError
from fedguild.core.payload import SERVER, Payload
from fedguild.server.aggregation import rank_axis
from fedguild.server.guard import change_norms, medians_of, shortened
from fedguild.server.optimizer import LAST_CHANGE
from fedguild.server.round import Onward, Passage
from fedguild.server.terms import RunningMeans, Term, Terms, Upload

Centre = Literal["trimmed_mean", "median"]
Aggregator = Centre | Literal["clipped", "centered_clipping"]
ITERATIONS = 3
"""How often centered clipping moves v in a round."""


@dataclass(frozen=True)
class RobustMean:
    """The filter of a run with a robust estimate, the last before the method's own arithmetic.

    Attributes:
        robust: The estimate.
        trim: Share of the clients that `trimmed_mean` leaves out at either end of each value.
    """

    robust: Aggregator
    trim: float = 0.2

    def __call__(self, uploads: Iterable[Upload], passage: Passage, onward: Onward) -> Payload:
        if self.robust == "clipped":
            return onward(_drawn_in(list(uploads), passage, {}))
        if self.robust == "centered_clipping":
            return _centered_clipping(list(uploads), passage, onward)
        method, means = passage.setup.method, RobustMeans(self.robust, self.trim)
        for upload in uploads:
            means.add(upload, method.terms(upload))
        return method.update(passage.state, means)


class RobustMeans(RunningMeans):
    """The robust estimates of a round; holds every client's terms.

    Args:
        robust: The estimate.
        trim: As in `RobustMean`.
    """

    def __init__(self, robust: Centre, trim: float) -> None:
        super().__init__()
        self._robust, self._trim = robust, trim
        self._terms: dict[str, list[Term]] = {}

    def add(self, sent: Upload, terms: Terms) -> None:
        """Adds a client's terms."""
        super().add(sent, terms)
        for name, term in terms.means.items():
            self._terms.setdefault(name, []).append(term)

    def _moved(self, name: str, before: Tensor) -> Tensor:
        terms = self._terms.get(name)
        if terms is None:
            return before.clone()
        return robust_centre(
            [term.value.detach() for term in terms], [term.weights for term in terms], before, self._robust, self._trim
        )


def left_out(count: int, trim: float) -> int:
    """Returns how many of so many values a trimmed mean leaves out at either end: a share, rounded up, never all."""
    return max(min(math.ceil(trim * count), (count - 1) // 2), 0)


def robust_centre(
    values: Sequence[Tensor], weights: Sequence[Tensor], before: Tensor, robust: Centre, trim: float
) -> Tensor:
    """Returns the coordinate-wise median or weighted trimmed mean of tensors, over the clients that hold a value.

    Args:
        values: A tensor of one shape from each client.
        weights: For each client, in a shape that broadcasts to the tensor's: what a value weighs; one that is not held
            weighs 0, and may be anything.
        before: The tensor whose values stay where nobody holds them.
        robust: The estimate. The median weighs all holders alike; that of an even number is the mean of the two in the
            middle.
        trim: Share of a value's holders that are left out at either end, rounded up, but never all of them.

    Returns:
        The estimate in fp32.

    Raises:
        UploadError: the shapes differ.
    """
    if len({tuple(value.shape) for value in values}) > 1:
        raise UploadError("the clients' tensors differ in shape, so that they have no robust mean")
    heaviest = max((float(weight.max()) for weight in weights), default=0.0) or 1.0
    weighed = torch.stack([(weight.double() / heaviest).float().expand(before.shape) for weight in weights])
    given = torch.stack([value.to(torch.float32) for value in values])
    held = torch.stack([(weight > 0).expand(before.shape) for weight in weights])
    ordered, order = given.masked_fill(~held, math.inf).sort(dim=0)  # who does not hold it comes last
    count = held.sum(dim=0)
    share = trim if robust == "trimmed_mean" else 0.5
    out = torch.tensor([left_out(number, share) for number in range(len(values) + 1)])[count]
    place = torch.arange(len(values)).reshape(-1, *[1] * before.dim())
    kept = ((place >= out) & (place < count - out)).float()
    shares = kept * weighed.gather(0, order) if robust == "trimmed_mean" else kept
    total = shares.sum(dim=0)
    shares = torch.where(total > 0, shares, kept)  # of weights that fp32 cannot tell from 0 beside the heaviest
    centre = (ordered.masked_fill(kept == 0, 0.0) * shares).sum(dim=0) / shares.sum(dim=0)
    return torch.where(count > 0, centre, before)


def _centered_clipping(uploads: Sequence[Upload], passage: Passage, onward: Onward) -> Payload:
    """Returns the state moved by v, which it remembers for the next round."""
    before, remembered = passage.state, passage.outcome.state.part(LAST_CHANGE)
    change, after = remembered, before
    for _ in range(ITERATIONS):
        after = onward(_drawn_in(uploads, passage, change))
        change = remembered | _changes(before, after)
    return Payload(
        {**after.tensors, **{f"{LAST_CHANGE}/{name}": value for name, value in change.items()}}, after.scalars
    )


def _changes(before: Payload, after: Payload) -> dict[str, Tensor]:
    """Returns by how much a state's tensors moved; those that nobody trained in a round are not among them."""
    return {
        name: value - before.tensors[name]
        for name, value in after.tensors.items()
        if value.is_floating_point()
        and name in before.tensors
        and before.tensors[name].shape == value.shape
        and not torch.equal(value, before.tensors[name])
    }


def _drawn_in(uploads: Sequence[Upload], passage: Passage, change: Mapping[str, Tensor]) -> Iterator[Upload]:
    """Yields uploads no part of which is further from its download, moved by a change, than the median of all is."""
    measured = [change_norms(upload.payload, _moved(upload, change), passage.bounded) for upload in uploads]
    limits = medians_of(measured, fewest=1)
    for upload, norms in zip(uploads, measured, strict=True):
        yield shortened(upload, norms, limits, passage.bounded, _moved(upload, change))


def _moved(upload: Upload, change: Mapping[str, Tensor]) -> Payload:
    """Returns an upload's download, moved by a change of the state; a client of a lower rank has its first ranks."""
    tensors = dict(upload.download.tensors)
    for name, value in tensors.items():
        by, axis = change.get(name, change.get(f"{SERVER}/{name}")), rank_axis(name)
        if by is not None and axis is not None and by.dim() == value.dim():
            by = by.narrow(axis, 0, min(value.shape[axis], by.shape[axis]))
        if by is not None and by.shape == value.shape:
            tensors[name] = value.float() + by
    return Payload(tensors, upload.download.scalars)
