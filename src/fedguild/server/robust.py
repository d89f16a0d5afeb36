"""Robust estimates in place of the means over a round's clients, for every method whose server takes means.

`trimmed_mean` and `median` are estimates of each value over the clients that hold it (`RobustMeans`), all of
which weigh the same: D. Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, Definitions 1 and 2. A client
holds a value whose weight in the method's own mean is positive: an expert that it trained, a rank that it has.
`clipped` is the method's own mean of changes that have at most the round's median norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedguild.core.errors import UploadError
from fedguild.core.payload import Payload
from fedguild.server.guard import medians_of, norms_of
from fedguild.server.round import Onward, Passage
from fedguild.server.terms import RunningMeans, Term, Terms, Upload

Centre = Literal["trimmed_mean", "median"]


@dataclass(frozen=True)
class RobustMean:
    """The filter of a run with a robust estimate, the last before the method's own arithmetic.

    Attributes:
        robust: The estimate.
        trim: Share of the clients that `trimmed_mean` leaves out at either end of each value.
    """

    robust: Centre | Literal["clipped"]
    trim: float = 0.2

    def __call__(self, uploads: Iterable[Upload], passage: Passage, onward: Onward) -> Payload:
        if self.robust == "clipped":
            return onward(_clipped(list(uploads), passage))
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
        values = [term.value.detach() for term in terms]
        holders = [term.holders for term in terms]
        if all(bool(each.all()) for each in holders):
            return robust_centre(values, self._robust, self._trim)
        return centre_of_holders(values, holders, before, self._robust, self._trim)


def robust_centre(values: Sequence[Tensor], robust: Centre, trim: float) -> Tensor:
    """Returns the coordinate-wise median or trimmed mean of several clients' tensors.

    Args:
        values: A tensor of one shape from each client.
        robust: The estimate. The median of an even number is the mean of the two in the middle.
        trim: Share of the clients left out at either end of each value, rounded up, but never all of them.

    Returns:
        The estimate in fp32.

    Raises:
        UploadError: the shapes differ.
    """
    if len({tuple(value.shape) for value in values}) > 1:
        raise UploadError("the clients' tensors differ in shape, so that they have no robust mean")
    ordered = torch.stack([value.to(torch.float32) for value in values]).sort(dim=0).values
    count = len(values)
    left_out = (count - 1) // 2
    if robust == "trimmed_mean":
        left_out = min(math.ceil(trim * count), left_out)
    return ordered[left_out : count - left_out].mean(dim=0)


def centre_of_holders(
    values: Sequence[Tensor], holders: Sequence[Tensor], before: Tensor, robust: Centre, trim: float
) -> Tensor:
    """Returns `robust_centre` of each value over the clients that hold it.

    Args:
        values: A tensor of one shape from each client.
        holders: For each client, bool in a shape that broadcasts to the tensor's: whether it holds the value.
        before: The tensor whose values stay where nobody holds them.
        robust: The estimate.
        trim: As in `robust_centre`, a share of the holders.
    """
    held = torch.stack([each.expand(before.shape) for each in holders])
    given = torch.stack([value.to(torch.float32) for value in values])
    ordered = given.masked_fill(~held, math.inf).sort(dim=0).values  # who does not hold it comes last
    count = held.sum(dim=0)
    left_out = ((count - 1) // 2).clamp(min=0)
    if robust == "trimmed_mean":
        left_out = torch.minimum((trim * count.double()).ceil().long(), left_out)
    place = torch.arange(len(values)).reshape(-1, *[1] * before.dim())
    kept = (place >= left_out) & (place < count - left_out)
    centre = ordered.masked_fill(~kept, 0.0).sum(dim=0) / kept.sum(dim=0)
    return torch.where(count > 0, centre, before)


def _clipped(uploads: Sequence[Upload], passage: Passage) -> Iterator[Upload]:
    """Yields uploads whose change of a part has at most the round's median norm."""
    measured = [norms_of(upload, passage) for upload in uploads]
    limits = medians_of(measured, fewest=1)
    for upload, norms in zip(uploads, measured, strict=True):
        payload = Payload(dict(upload.payload.tensors.items()), upload.payload.scalars)
        tensors = dict(payload.tensors)
        for part, limit in limits.items():
            if norms.get(part, 0.0) > limit:
                compared = payload.without(*passage.bounded).part(part)
                tensors |= _shortened(compared, upload.download.part(part), part, limit / norms[part])
        yield replace(upload, payload=Payload(tensors, payload.scalars))


def _shortened(tensors: Mapping[str, Tensor], before: Mapping[str, Tensor], part: str, by: float) -> dict[str, Tensor]:
    """Returns a part's tensors, by their whole names, with their change from `before` multiplied by a factor."""
    shortened = {}
    for name, tensor in tensors.items():
        start = before.get(name)
        if start is None or start.shape != tensor.shape:
            start = torch.zeros_like(tensor)
        shortened[f"{part}/{name}"] = start.to(torch.float32).lerp(tensor.to(torch.float32), by)
    return shortened
